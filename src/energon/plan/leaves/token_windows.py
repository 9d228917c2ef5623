"""Windows over the tokens of shuffled documents, found by arithmetic.

The documents of a corpus are laid end to end in a shuffled order, and the line is cut into
windows of one length. Nothing is written down for that: blocks of consecutive documents are
permuted, and the documents within each block. What is kept is one number for each block, where
it begins on the line; the documents of a block are looked up when one of its windows is asked for,
all at once: picking them one by one would touch pages all over an index of gigabytes.

The order of the documents is the same in each epoch, since a window is a sample: its number has
to stand for the same tokens on any rank and in any epoch. Which window comes when is up to
the plan, as for all samples.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from energon.arrays import Ints, distinct
from energon.plan.randomness import derive_seed, permute

BLOCK_DOCUMENTS = 1024
"""Documents that are permuted among themselves. They lie close together, so that the windows of a
slice, which are read together, take few reads."""
CACHED_BLOCKS = 128


class Pieces(NamedTuple):
    """The parts of documents in windows, in the order of the windows."""

    window: Ints
    """The window, as its index among the requested ones."""
    document: Ints
    """The document, by its number in the corpus."""
    start: Ints
    """The first token of the piece in the document."""
    stop: Ints
    """The token after the last."""
    origin: Ints
    """Where the document begins, according to `Documents`."""


class Documents(NamedTuple):
    """Consecutive documents of a corpus."""

    tokens: Ints
    """The number of tokens in each."""
    origin: Ints
    """Where each begins, in the terms of the corpus."""


class _Block(NamedTuple):
    """The documents of a block, in their order on the line."""

    number: Ints
    ends: Ints
    """The token of the block at which each begins, and the number of tokens."""
    origin: Ints


class TokenWindows:
    """Windows over concatenated documents. Each token occurs once, except in overlaps.

    The rest after the last full window, which is shorter than a step, is left out.

    Args:
        block_tokens: Tokens of each run of `BLOCK_DOCUMENTS` documents, in the order of the corpus.
        documents: Returns the documents from one number up to another.
        num_documents: How many there are.
        length: Tokens of a window.
        overlap: Tokens that a window has in common with the one before.
        seed: Chooses the order of the documents; None keeps that of the corpus.
    """

    def __init__(
        self,
        block_tokens: Ints,
        documents: Callable[[int, int], Documents],
        num_documents: int,
        *,
        length: int,
        overlap: int = 0,
        seed: int | None = 0,
    ) -> None:
        self.documents = documents
        self.num_documents = num_documents
        self.length = length
        self.step = length - overlap
        self.key = None if seed is None else derive_seed(seed, "documents")
        self._order = self._permuted(len(block_tokens), "blocks")
        self._ends = np.concatenate(([0], np.cumsum(block_tokens[self._order])))
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return int(self._ends[-1])

    def __len__(self) -> int:
        return max(0, (self.num_tokens - self.length) // self.step + 1)

    def pieces(self, windows: Ints) -> Pieces:
        """Return the parts of windows."""
        begin = windows * self.step
        first = np.searchsorted(self._ends, begin, side="right") - 1
        last = np.searchsorted(self._ends, begin + self.length, side="left") - 1
        window, number = _expand(first, last)
        # The documents of all blocks that windows are in, one block behind the other.
        blocks = distinct(number)
        contents = [self._block(each) for each in blocks.tolist()]
        documents = np.concatenate([block.number for block in contents])
        origins = np.concatenate([block.origin for block in contents])
        starts = np.concatenate(
            [
                block.ends[:-1] + base
                for block, base in zip(contents, self._ends[blocks], strict=True)
            ]
        )
        sizes = np.concatenate([np.diff(block.ends) for block in contents])
        # What each window has in each block, and of that in each document.
        low = np.maximum(begin[window], self._ends[number])
        high = np.minimum(begin[window] + self.length, self._ends[number + 1])
        which, at = _expand(
            np.searchsorted(starts, low, side="right") - 1,
            np.searchsorted(starts, high, side="left") - 1,
        )
        start = np.maximum(low[which], starts[at])
        stop = np.minimum(high[which], starts[at] + sizes[at])
        full = np.flatnonzero(stop > start)
        which, at, start, stop = which[full], at[full], start[full], stop[full]
        window = window[which]
        return Pieces(
            window,
            documents[at],
            start - starts[at],
            stop - starts[at],
            origins[at],
        )

    def _block(self, number: int) -> _Block:
        block_documents = self._blocks.get(number)
        if block_documents is None:
            block = int(self._order[number])
            start = block * BLOCK_DOCUMENTS
            stop = min(start + BLOCK_DOCUMENTS, self.num_documents)
            order = self._permuted(stop - start, "block", block)
            documents = self.documents(start, stop)
            ends = np.concatenate(([0], np.cumsum(documents.tokens[order])))
            block_documents = self._blocks[number] = _Block(
                start + order, ends, documents.origin[order]
            )
            if len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return block_documents

    def _permuted(self, count: int, *address: int | str) -> Ints:
        numbers = np.arange(count)
        if self.key is None or not count:
            return numbers
        key = np.array([derive_seed(self.key, *address)], np.uint64)
        return permute(numbers, np.array([count]), key)


def _expand(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return the numbers in each range from `first` to `last`, and the index of their range."""
    counts = np.maximum(last - first + 1, 0)
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - first, counts)
