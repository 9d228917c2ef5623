"""Share a number of actors among the ranks of a job, by how long each of them waits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from energon.loader.options import logger

NAMESPACE = "energon"
GRANT_SECONDS = 10.0
FORGET_SECONDS = 300.0
"""A rank that has not asked for so long has ended."""
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


class SharedPool:
    """A pool as one rank sees it.

    Args:
        name: Its name, the same in all ranks.
        size: How many actors all ranks may use together.
        rank: The rank.
    """

    def __init__(self, name: str, size: int, rank: int) -> None:
        self._name = name
        self._size = size
        self._rank = rank
        # Ray ends an actor to which no handle is left.
        self._shares: Any = None

    def grant(self, *, used: int, wanted: int, least: int, wait_share: float) -> int:
        """Return how many actors the rank may use from now on, see `PoolShares`."""
        try:
            self._shares = self._shares or self._found()
            answer = self._shares.grant.remote(
                self._rank, used=used, wanted=wanted, least=least, wait_share=wait_share
            )
            granted: int = ray.get(answer, timeout=GRANT_SECONDS)
        except (RayError, ValueError) as error:
            # It ends with the rank that has started it; the next rank to ask starts another one.
            self._shares = None
            logger.info("the pool %r of Ray actors does not answer: %s", self._name, error)
            return used
        return granted

    def _found(self) -> Any:
        """Return the actor that has the shares; start it if there is none."""
        kind: Any = ray.remote(num_cpus=0, scheduling_strategy="DEFAULT")(PoolShares)
        named = kind.options(
            name=f"energon pool {self._name}", namespace=NAMESPACE, get_if_exists=True
        )
        return named.remote(self._size)
