"""How far a loop over a pipeline goes: one pass over the data, several, or a number of items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from energon.errors import ConfigError
from energon.webdataset.place import Place
from energon.webdataset.stage import StageIterator, State, close, load_state, state_of, unpack

Scope = Literal["job", "rank", "worker"]
"""Who counts the items of an epoch together: all ranks, the workers of a rank, or each alone."""


@dataclass(frozen=True)
class Extent:
    """How far a loop goes.

    Args:
        passes: How often it goes over the data; None for ever.
        items: Where it ends; None where the data ends.
        scope: Who counts these items together.
        goes_on: Whether a loop starts where the one before stopped, instead of with a new pass.
    """

    passes: int | None = 1
    items: int | None = None
    scope: Scope = "job"
    goes_on: bool = False

    def share(self, place: Place, epoch: int) -> int | None:
        """Return how many items of an epoch fall to one worker; ranks get the same number."""
        if self.items is None:
            return None
        return self.items_before(place, epoch + 1) - self.items_before(place, epoch)

    def items_before(self, place: Place, epoch: int) -> int:
        """Return how many items of all epochs before one fall to a worker.

        What cannot be dealt evenly goes to another worker each time, so that none gets ahead.
        """
        if self.scope == "worker":
            return epoch * (self.items or 0)
        number = place.num_workers
        even, odd = divmod(self.rank_share(place.world_size), number)
        return epoch * even + max(0, (epoch * odd - place.worker + number - 1) // number)

    def rank_share(self, world_size: int) -> int:
        """Return how many items fall to each rank; if they cannot be dealt evenly, one more."""
        if self.items is None:
            raise ConfigError("the pipeline has no epoch length; set one with with_epoch(n)")
        return -(-self.items // world_size) if self.scope == "job" else self.items


_END = object()


class Passes(StageIterator):
    """Items of one pass over the data after the other.

    Args:
        open_pass: Opens the pipeline for an epoch.
        epoch: The first one.
        count: How many passes; None means no end.
    """

    def __init__(
        self, open_pass: Callable[[int], Iterator[Any]], *, epoch: int, count: int | None
    ) -> None:
        self._open_pass = open_pass
        self._epoch = epoch
        self._left = count
        self._current: Iterator[Any] | None = None
        super().__init__()

    def _run(self) -> Iterator[Any]:
        while self._left is None or self._left > 0:
            is_whole = self._current is None
            if self._current is None:
                self._current = self._open_pass(self._epoch)
            items = iter(self._current)
            first = next(items, _END)
            if first is not _END:
                yield first
                yield from items
            elif self._left is None and is_whole:
                # Whoever waits for items that never come would wait for ever.
                return
            close(self._current)
            self._current = None
            self._epoch += 1
            self._left = None if self._left is None else self._left - 1

    def state_dict(self) -> State:
        current = None if self._current is None else state_of(self._current)
        return {"epoch": self._epoch, "left": self._left, "pass": current}

    def load_state_dict(self, state: State) -> None:
        self._epoch, self._left, current = unpack(state, "epoch", "left", "pass")
        if current is not None:
            self._current = self._open_pass(self._epoch)
            load_state(self._current, current)

    def close(self) -> None:
        super().close()
        close(self._current)
