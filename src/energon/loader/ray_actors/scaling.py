"""Decide how many actors a rank uses, by how long it waits and how busy they are."""

from __future__ import annotations

from typing import Any

from energon.loader.monitoring.monitor import LoaderMark, figures_between
from energon.loader.options import LoaderOptions, RayWorkers, logger
from energon.loader.ray_actors.pool import SharedPool
from energon.loader.workers import number_of_workers
from energon.worker import WorkerConfig

SCALE_SECONDS = 60.0
"""How long to measure before each decision."""
WAITS = 0.05
"""A rank that waits for more than this share of the time gets more actors."""
WAITS_LITTLE = 0.01
BUSY_AFTERWARDS = 0.7
"""A rank that waits little gives up an actor if the others would be less busy than this."""


class ActorScaling:
    """How many of its actors a rank uses.

    Args:
        least: The smallest number.
        most: The largest number.
        in_use: The number to begin with.
        pool: The pool that other ranks share; None if there is none.
    """

    def __init__(
        self, least: int, most: int, *, in_use: int, pool: SharedPool | None = None
    ) -> None:
        self.least = least
        self.most = most
        self.in_use = in_use
        self._pool = pool
        self._since: LoaderMark | None = None
        self._changes: list[dict[str, Any]] = []

    def decide(self, mark: LoaderMark) -> bool:
        """Decide how many actors to use from now on; return whether that has changed."""
        since = self._since
        if since is None:
            self._since = mark
            before = self.in_use  # others of the pool may have begun earlier and use more
            self.in_use = self._grant(before, 0.0)
            return self.in_use != before
        if mark.time - since.time < SCALE_SECONDS:
            return False
        self._since = mark
        figures = figures_between(since, mark, None)
        before, wait_share = self.in_use, figures["wait_share"]
        wanted = self._wanted(wait_share, figures["busy_share"])
        self.in_use = self._grant(wanted, wait_share)
        if self.in_use == before:
            return False
        change = {
            "from": before,
            "to": self.in_use,
            "wait_share": figures["wait_share"],
            "busy_share": figures["busy_share"],
            "batch": mark.batches,
        }
        self._changes.append(change)
        logger.info(
            "the trainer waited %.0f%% of the last %.0f s, and %d Ray actors were busy %.0f%%: "
            "using %d of %d from now on",
            100 * figures["wait_share"],
            mark.time - since.time,
            before,
            100 * figures["busy_share"],
            self.in_use,
            self.most,
        )
        return True

    def _wanted(self, wait_share: float, busy_share: float) -> int:
        """Return how many actors to use.

        Args:
            wait_share: Which share of the time the trainer waited.
            busy_share: Which share of it the actors worked, on average.
        """
        if wait_share > WAITS:
            return min(self.most, self.in_use + max(1, self.in_use // 2))
        if wait_share < WAITS_LITTLE and self.in_use > self.least:
            others = self.in_use - 1
            return others if busy_share * self.in_use < BUSY_AFTERWARDS * others else self.in_use
        return self.in_use

    def _grant(self, wanted: int, wait_share: float) -> int:
        """Return how many of the wanted actors the pool has for this rank."""
        if self._pool is None:
            return wanted
        return self._pool.grant(
            used=self.in_use, wanted=wanted, least=self.least, wait_share=wait_share
        )

    def stats(self) -> dict[str, Any]:
        """Return the number of actors and its changes, as JSON."""
        return {
            "in_use": self.in_use,
            "least": self.least,
            "most": self.most,
            "changes": self._changes,
        }


def initial_actors(options: LoaderOptions, config: WorkerConfig, lanes: int) -> int:
    """Return how many actors a rank with so many lanes begins with."""
    number = min(number_of_workers(options, config), lanes)
    scaling = scaling_of(options, config, number)
    return number if scaling is None else scaling.in_use


def scaling_of(
    options: LoaderOptions,
    config: WorkerConfig,
    number: int,
    *,
    pool: SharedPool | None = None,
) -> ActorScaling | None:
    """Return the scaling of the actors of a rank; None if all of them are used.

    Args:
        options: How lanes are hosted.
        config: The configuration of the rank.
        number: How many actors it can use.
        pool: The pool that other ranks share; None if there is none.
    """
    workers = options.workers
    if not isinstance(workers, RayWorkers) or config.is_replicated or number == 1:
        return None
    if workers.pool is not None:
        part = max(1, (workers.num_actors or number) // config.world_size)
        return ActorScaling(1, number, in_use=min(part, number), pool=pool)
    if workers.min_actors is None:
        return None
    least = min(workers.min_actors, number)
    return ActorScaling(least, number, in_use=least)
