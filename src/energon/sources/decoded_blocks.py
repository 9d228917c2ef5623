"""Blocks of data that are decoded as a whole, kept while their slices are open.

A row group of Parquet, a compressed chunk or a stretch of a gzip file is decoded once, although
its samples are read in several calls. All sources of a process share one budget for that: a blend
of a hundred Parquet datasets takes no more memory than one.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, wait
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from energon.io.backends.base import request_is_needed, while_needed
from energon.io.threads import fork_safe_rlock
from energon.plan.leaves.leaf import PARALLEL_SLICES

Key = TypeVar("Key", bound=Hashable)
Block = TypeVar("Block")

BUDGET_BYTES = 1 << 30
"""Decoded blocks that all sources of a process keep together."""
MAX_SOURCE_BYTES = BUDGET_BYTES // 2
"""Memory for the open slices of one source; the rest is for blocks that several slices share."""

MAX_EXIT_SECONDS = 10.0
"""How long the interpreter waits at its end for a block that is made."""


class SliceCost(NamedTuple):
    """The cost of a slice that is as long as a block."""

    samples: int
    """Samples in a block, and so in such a slice."""
    num_bytes: int
    """Memory that the slice takes while it is open, in all blocks that it may overlap."""
    blocks: tuple[int, ...] | None = None
    """The samples of each block, so that slices can follow them; None if their edges are between
    samples, or there are too many blocks."""


def open_slices(costs: Sequence[SliceCost | None]) -> list[int]:
    """Return how many slices of each source of a run may be open at a time.

    Args:
        costs: The cost of a slice of each; None for sources that read single samples.

    Example:
        >>> open_slices([SliceCost(1000, 100 << 20), None])
        [5, 16]
        >>> open_slices([SliceCost(1000, 100 << 20)] * 10)
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    sizes = [0 if cost is None else cost.num_bytes for cost in costs]
    share = min(MAX_SOURCE_BYTES, BUDGET_BYTES // max(1, sum(size > 0 for size in sizes)))
    # The slices that follow blocks begin in the middle of one, which is then open as well.
    partial = [int(cost is not None and cost.blocks is not None) for cost in costs]
    # A slice that takes no memory is limited by the number of slices alone.
    return [
        min(PARALLEL_SLICES, max(1, share // max(1, size) - more))
        for size, more in zip(sizes, partial, strict=True)
    ]


class DecodedBlocks(Generic[Key, Block]):
    """The decoded blocks of one source.

    When all sources together exceed the budget, the blocks that were used longest ago are dropped,
    but never the latest two of a source: it may be reading where one ends and the next begins.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        self._coming: dict[Key, Future[Block]] = {}
        self._number = next(_numbers)
        # Garbage may be collected anywhere, even while a thread that holds the lock waits for this
        # one, so the lock is not taken here.
        weakref.finalize(self, _kept.gone.append, self._number).atexit = False
        _kept.owners[self._number] = self

    def begin(
        self,
        keys: Sequence[Key],
        make: Callable[[Key], Block],
        submit: Callable[..., Future[Block]],
        *,
        most: int,
    ) -> None:
        """Make the blocks that are read next in another thread, unless they are kept.

        `get` waits for them and returns them, or raises what `make` has raised. Blocks that were
        begun before and are not among these are discarded to make room.

        Args:
            keys: The blocks, in the order in which they are read.
            make: Makes a block.
            submit: Runs a function in another thread.
            most: How many blocks may be begun and not read yet.
        """
        with _kept.lock:
            wanted = dict.fromkeys(key for key in keys if key not in self._blocks)
            unwanted = [key for key in self._coming if key not in wanted]
            for key in wanted:
                if key in self._coming:
                    continue
                if len(self._coming) >= most and unwanted:
                    self._discard(unwanted.pop(0))
                if len(self._coming) >= most:
                    break
                with while_needed(_until_exit(request_is_needed())):
                    self._coming[key] = submit(make, key)

    def get(self, key: Key) -> Block | None:
        """Return a block and count it as used; None if it is neither kept nor begun."""
        coming = self._coming.pop(key, None)
        if coming is not None:
            return coming.result()
        with _kept.lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
                _kept.sizes.move_to_end((self._number, key))
            return block

    def keep(self, key: Key, block: Block, num_bytes: int) -> None:
        """Keep a block of this size, and drop others if there is no room."""
        with _kept.lock:
            self.drop(key)
            self._blocks[key] = block
            _kept.sizes[self._number, key] = num_bytes
            _kept.num_bytes += num_bytes
            _kept.make_room()

    def drop(self, key: Key) -> None:
        """Drop a block if it is kept."""
        with _kept.lock:
            if self._blocks.pop(key, None) is not None:
                _kept.num_bytes -= _kept.sizes.pop((self._number, key))

    def _discard(self, key: Key) -> None:
        """Discard a block that was begun, unless it is just being made."""
        if self._coming[key].cancel() or self._coming[key].done():
            del self._coming[key]

    def forget_begun(self) -> None:
        """Let blocks that were begun be made again when they are read."""
        self._coming.clear()

    def end(self) -> None:
        """Begin no more blocks of those that are waiting, and wait for the one that is made.

        Its requests are not retried any more, and one that is not answered is abandoned.
        """
        wait([each for each in self._coming.values() if not each.cancel()], MAX_EXIT_SECONDS)

    def __len__(self) -> int:
        return len(self._blocks)


class _Kept:
    """The blocks of all sources of this process, those used longest ago first."""

    def __init__(self) -> None:
        self.lock = fork_safe_rlock()
        self.sizes: OrderedDict[tuple[int, Hashable], int] = OrderedDict()
        self.num_bytes = 0
        self.gone: deque[int] = deque()
        """Sources that no longer exist, whose blocks are still counted."""
        self.is_ending = False
        """Whether the interpreter ends, so that no further blocks are needed."""
        self.owners: weakref.WeakValueDictionary[int, DecodedBlocks[Any, Any]] = (
            weakref.WeakValueDictionary()
        )

    def make_room(self) -> None:
        """Drop blocks until the rest fits into the budget, or every source has only two."""
        while self.gone:
            self.forget(self.gone.popleft())
        for number, key in list(self.sizes) if self.num_bytes > BUDGET_BYTES else ():
            owner = self.owners.get(number)
            if owner is not None and len(owner) > 2:
                owner.drop(key)
            if self.num_bytes <= BUDGET_BYTES:
                break

    def forget(self, number: int) -> None:
        """Stop counting the blocks of a source that no longer exists."""
        for key in [key for key in self.sizes if key[0] == number]:
            self.num_bytes -= self.sizes.pop(key)


_kept = _Kept()
_numbers = count()


def _until_exit(is_needed: Callable[[], bool] | None) -> Callable[[], bool]:
    return lambda: not _kept.is_ending and (is_needed is None or is_needed())


def _reset_after_fork() -> None:
    """Forget the blocks that threads make, which a forked process does not have."""
    for owner in _kept.owners.values():
        owner.forget_begun()


os.register_at_fork(after_in_child=_reset_after_fork)


@atexit.register
def _end_all() -> None:
    """Let no thread be in the code of pyarrow when the interpreter ends, which may abort then."""
    _kept.is_ending = True
    for owner in list(_kept.owners.values()):
        owner.end()
