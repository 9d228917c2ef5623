"""Share a number of actors among the ranks of a job, by how long each of them waits.

An actor that a rank gives up is handed over alive: it has imported what the next one needs, and
only loads that rank's part of the dataset.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError

from energon.loader.lane_worker import Pipeline
from energon.loader.options import RayWorkers, logger
from energon.loader.ray_actors.actor import own_versions
from energon.loader.transport.pickling import modules_named

NAMESPACE = "energon"
GRANT_SECONDS = 10.0
FORGET_SECONDS = 300.0
"""A rank that has not asked for so long has ended."""
CLEAR_SECONDS = 2.0
"""How long a rank waits for an actor to be cleared; a new one takes longer to start."""
OFFER_SECONDS = 90.0
"""How long an actor waits for another rank: each of them asks once a minute."""
WAITS_MORE = 0.1
"""A rank gives an actor to one that waits for so much more of the time."""


@dataclass
class Share:
    """The part of a rank.

    Args:
        used: How many actors it uses.
        least: How many it keeps.
        wait_share: The share of the time that it waited lately.
        asked_at: When it asked last.
        gives: Whether it is to give up an actor when it asks next.
    """

    used: int
    least: int
    wait_share: float
    asked_at: float
    gives: bool = False


@dataclass(frozen=True)
class Offer:
    """An actor that a rank has given up.

    Args:
        kind: Its kind, see `kind_of_actors`.
        actor: The actor.
        cleared: Ray's reference to the result of `LaneActor.clear`.
    """

    kind: str
    actor: Any
    cleared: Any

    @property
    def is_ready(self) -> bool:
        """Whether it has been cleared, at the latest after a while."""
        try:
            ray.get(self.cleared, timeout=CLEAR_SECONDS)
        except RayError:  # among them that there is no result in time
            return False
        return True

    def end(self) -> None:
        """End the actor."""
        with suppress(Exception):  # Ray may have been shut down
            ray.kill(self.actor)


class PoolShares:
    """The actors that each rank of a pool may use; runs in an actor of its own.

    Args:
        size: How many actors all ranks may use together.

    Example:
        >>> shares = PoolShares(4)
        >>> [shares.grant(rank, used=2, wanted=2, least=1, wait_share=0.0) for rank in (0, 1)]
        [2, 2]
        >>> shares.grant(0, used=2, wanted=3, least=1, wait_share=0.6)  # none is free
        2
        >>> shares.grant(1, used=2, wanted=2, least=1, wait_share=0.0)  # gives up one
        1
        >>> shares.grant(0, used=2, wanted=3, least=1, wait_share=0.6)
        3
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._shares: dict[int, Share] = {}
        self._offers: dict[int, Offer] = {}
        self._numbers = count()
        self._lock = threading.Lock()

    def grant(self, rank: int, *, used: int, wanted: int, least: int, wait_share: float) -> int:
        """Return how many actors a rank may use from now on.

        Args:
            rank: The rank.
            used: How many it uses.
            wanted: How many it would like to use.
            least: How many it keeps, whatever other ranks need.
            wait_share: The share of the time that it waited lately.
        """
        now = time.monotonic()
        before = self._shares.pop(rank, None)
        self._shares = {
            other: share
            for other, share in self._shares.items()
            if now - share.asked_at < FORGET_SECONDS
        }
        if before is not None and before.gives:
            wanted = min(wanted, used - 1)
        others = self._shares.values()
        free = self._size - sum(share.used for share in others)
        granted = max(least, min(wanted, free))
        if wanted > granted:
            givers = [
                share
                for share in others
                if share.used > share.least and share.wait_share + WAITS_MORE < wait_share
            ]
            if givers:
                min(givers, key=lambda share: share.wait_share).gives = True
        self._shares[rank] = Share(granted, least, wait_share, now)
        return granted

    def offer(self, kind: str, actor: list[Any], cleared: list[Any]) -> None:
        """Keep an actor for a while, for a rank that needs it; arguments are those of `Offer`.

        Both are in lists, so that Ray does not wait for the result.
        """
        number = next(self._numbers)
        with self._lock:
            self._offers[number] = Offer(kind, *actor, *cleared)
        # It has no handle of the actor, which would keep one alive whose rank has died.
        timer = threading.Timer(OFFER_SECONDS, self._withdraw, [number])
        timer.daemon = True
        timer.start()

    def take(self, kind: str, number: int) -> list[Any]:
        """Return up to so many actors of a kind. If there are fewer, others make room for new ones.

        Args:
            kind: The kind.
            number: How many actors a rank needs.
        """
        with self._lock:
            fitting = [n for n, each in self._offers.items() if each.kind == kind and each.is_ready]
            taken = [self._offers.pop(n) for n in fitting[:number]]
            others = [self._offers.pop(n) for n in list(self._offers)[: number - len(taken)]]
        for each in others:
            each.end()
        return [each.actor for each in taken]

    def _withdraw(self, number: int) -> None:
        with self._lock:
            offer = self._offers.pop(number, None)
        if offer is not None:
            offer.end()


class SharedPool:
    """A pool as one rank sees it.

    Args:
        name: Its name, the same in all ranks.
        size: How many actors all ranks may use together.
        rank: The rank.
        kind: The kind of its actors, see `kind_of_actors`.
    """

    def __init__(self, name: str, size: int, rank: int, *, kind: str) -> None:
        self._name = name
        self._size = size
        self._rank = rank
        self._kind = kind
        self._handed_over: deque[Any] = deque()
        # Ray ends an actor to which no handle is left.
        self._shares: Any = None

    def grant(self, *, used: int, wanted: int, least: int, wait_share: float) -> int:
        """Return how many actors the rank may use from now on, see `PoolShares`."""
        try:
            self._shares = self._shares or self._shares_actor()
            answer = self._shares.grant.remote(
                self._rank, used=used, wanted=wanted, least=least, wait_share=wait_share
            )
            granted: int = ray.get(answer, timeout=GRANT_SECONDS)
            if granted > used:
                answer = self._shares.take.remote(self._kind, granted - used)
                self._handed_over.extend(ray.get(answer, timeout=GRANT_SECONDS))
        except (RayError, ValueError) as error:
            # It ends with the rank that has started it; the next rank to ask starts another one.
            self._shares = None
            logger.info("the pool %r of Ray actors does not answer: %s", self._name, error)
            return used
        return granted

    def next_handed_over(self) -> Any | None:
        """Return an actor that another rank has given up for this one; None if there is none."""
        return self._handed_over.popleft() if self._handed_over else None

    def offer(self, actor: Any, cleared: Any) -> None:
        """Offer an actor to other ranks; end it if the pool does not answer."""
        offer = Offer(self._kind, actor, cleared)
        if self._shares is None:
            offer.end()
        else:
            self._shares.offer.remote(offer.kind, [offer.actor], [offer.cleared])

    def _shares_actor(self) -> Any:
        """Return the actor that has the shares; start it if there is none."""
        kind: Any = ray.remote(num_cpus=0, scheduling_strategy="DEFAULT")(PoolShares)
        named = kind.options(
            name=f"energon pool {self._name}", namespace=NAMESPACE, get_if_exists=True
        )
        return named.remote(self._size)


def kind_of_actors(pipeline: Pipeline[Any], workers: RayWorkers, content: bytes) -> str:
    """Return the kind of the actors of a rank; ranks hand over actors of the same kind only.

    Actors keep the modules that they have imported, and what hooks have changed in these. So ranks
    have the same kind if they run the same program with the same packages on the same data.

    Args:
        pipeline: The pipeline that a rank runs.
        workers: The actors that it wants.
        content: The pickled pipeline.
    """
    context = ray.get_runtime_context()
    described = [
        own_versions(),
        [workers.num_cpus, workers.resources, workers.runtime_env],
        context.get_runtime_env_string(),  # type: ignore[no-untyped-call]
        [os.getcwd(), sys.path, sys.argv[:1]],
        modules_named(content),
        pipeline.fingerprint(pipeline.default_lanes),
    ]
    return hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()
