"""Windows over the tokens of shuffled documents, found by arithmetic.

The documents of a corpus are laid end to end in a shuffled order, and the line is cut into
windows of one length. Nothing is written down for that: blocks of consecutive documents are
permuted, and the documents within each block. What is kept is one number for each block, where
it begins on the line; the documents of a block are looked up when one of its windows is asked for.

The order of the documents is the same in each epoch, since a window is a sample: its number has
to stand for the same tokens whoever asks, in whichever epoch. Which window comes when is up to
the plan, as for all samples.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from energon.arrays import Ints
from energon.plan.seeds import derive_seed, permute

BLOCK_DOCUMENTS = 1024
"""Documents that are permuted among themselves. They lie close together, so that the windows of a
slice, which are read together, take few reads."""
CACHED_BLOCKS = 128


class Pieces(NamedTuple):
    """Parts of documents that windows are made of, in the order of the windows."""

    window: Ints
    """The window, as its place among those that were asked for."""
    offset: Ints
    """Where in the window the piece begins."""
    document: Ints
    """The document, by its number in the corpus."""
    start: Ints
    """The first token of the piece in the document."""
    stop: Ints
    """The token behind the last."""


class TokenWindows:
    """Windows over documents laid end to end. Each token comes once, but for overlaps.

    The rest behind the last full window, which is shorter than a step, is left out.

    Args:
        block_tokens: Tokens of each run of `BLOCK_DOCUMENTS` documents, in the order of the corpus.
        document_lengths: Returns the tokens of the documents from a number to another.
        num_documents: How many there are.
        length: Tokens of a window.
        overlap: Tokens that a window has in common with the one before.
        seed: Chooses the order of the documents; None keeps that of the corpus.
    """

    def __init__(
        self,
        block_tokens: Ints,
        document_lengths: Callable[[int, int], Ints],
        num_documents: int,
        *,
        length: int,
        overlap: int = 0,
        seed: int | None = 0,
    ) -> None:
        self.document_lengths = document_lengths
        self.num_documents = num_documents
        self.length = length
        self.step = length - overlap
        self.key = None if seed is None else derive_seed(seed, "documents")
        self._order = self._permuted(len(block_tokens), "blocks")
        self._ends = np.concatenate(([0], np.cumsum(block_tokens[self._order])))
        self._blocks: OrderedDict[int, tuple[Ints, Ints]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return int(self._ends[-1])

    def __len__(self) -> int:
        return max(0, (self.num_tokens - self.length) // self.step + 1)

    def pieces(self, windows: Ints) -> Pieces:
        """Return what windows are made of."""
        begin = windows * self.step
        first = np.searchsorted(self._ends, begin, side="right") - 1
        last = np.searchsorted(self._ends, begin + self.length, side="left") - 1
        counts = last - first + 1
        place = np.repeat(np.arange(len(windows)), counts)
        block = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        block += first[place]
        found = []
        for number in np.unique(block).tolist():
            inside = np.flatnonzero(block == number)
            found.append(self._in_block(number, place[inside], begin[place[inside]]))
        window = np.concatenate([each.window for each in found])
        offset = np.concatenate([each.offset for each in found])
        order = np.lexsort((offset, window))
        return Pieces(
            *(
                np.concatenate([each[field] for each in found])[order]
                for field in range(len(Pieces._fields))
            )
        )

    def _in_block(self, number: int, place: Ints, begin: Ints) -> Pieces:
        """Return the pieces that lie in a block, of windows that begin at `begin` on the line."""
        documents, ends = self._block(number)
        base = int(self._ends[number])
        low = np.maximum(begin - base, 0)
        high = np.minimum(begin + self.length - base, ends[-1])
        first = np.searchsorted(ends, low, side="right") - 1
        last = np.searchsorted(ends, high, side="left") - 1
        counts = np.maximum(last - first + 1, 0)
        which = np.repeat(np.arange(len(place)), counts)
        at = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + first[which]
        start = np.maximum(low[which], ends[at])
        stop = np.minimum(high[which], ends[at + 1])
        full = np.flatnonzero(stop > start)
        which, at, start, stop = which[full], at[full], start[full], stop[full]
        return Pieces(
            place[which],
            start + base - begin[which],
            documents[at],
            start - ends[at],
            stop - ends[at],
        )

    def _block(self, number: int) -> tuple[Ints, Ints]:
        """Return the documents of a block in their order, and where each begins in it."""
        found = self._blocks.get(number)
        if found is None:
            block = int(self._order[number])
            start = block * BLOCK_DOCUMENTS
            stop = min(start + BLOCK_DOCUMENTS, self.num_documents)
            order = self._permuted(stop - start, "block", block)
            ends = np.cumsum(self.document_lengths(start, stop)[order])
            found = self._blocks[number] = (start + order, np.concatenate(([0], ends)))
            if len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return found

    def _permuted(self, count: int, *address: int | str) -> Ints:
        numbers = np.arange(count)
        if self.key is None or not count:
            return numbers
        key = np.array([derive_seed(self.key, *address)], np.uint64)
        return permute(numbers, np.array([count]), key)
