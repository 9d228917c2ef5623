"""Divide the rows of a block among the lanes that are read together: arithmetic on arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from energon.arrays import Ints
from energon.plan.rows import Rows


class BlockPieces(NamedTuple):
    """How a block is divided among lanes; two arrays of equal length.

    One after another, each piece is what a lane needs for its next batch.
    """

    place: Ints
    """The position in the list of lanes of the lane that a piece belongs to."""
    number: Ints
    """Number of rows of each piece."""

    @classmethod
    def of(cls, pieces: Iterable[tuple[int, int]]) -> BlockPieces:
        """Return the pieces of some pairs, without empty ones."""
        place, number = np.array([*pieces, (0, 0)], np.int64).T
        return cls(place[number > 0], number[number > 0])

    def followed_by(self, places: Sequence[int], turn: int, room: int) -> BlockPieces:
        """Return these pieces, and then a turn of each lane again and again until `room` is full.

        Args:
            places: The lanes that have rows left.
            turn: Rows of a turn.
            room: Rows to be shared; the last turn may be shorter.
        """
        turns = -(-room // turn) if places else 0
        number = np.full(turns, turn)
        number[-1:] -= turns * turn - room
        turns_of = np.resize(np.array(places, np.int64), turns)
        place = np.concatenate([self.place, turns_of])
        return BlockPieces(place, np.concatenate([self.number, number]))

    @property
    def are_even(self) -> bool:
        """Whether all pieces but the first and last have the same size."""
        between = self.number[1:-1]
        return bool((between == between[:1]).all())

    def by_lane(self, lanes: int) -> list[int]:
        """Return the number of rows of each lane."""
        counts: list[int] = np.bincount(self.place, self.number, lanes).astype(np.int64).tolist()
        return counts

    def cut(self, counts: Sequence[int]) -> BlockPieces:
        """Return these pieces, shortened to `counts`: the rows that lanes have left."""
        left, found = list(counts), []
        for place, number in zip(self.place.tolist(), self.number.tolist(), strict=True):
            found.append((place, min(number, left[place])))
            left[place] -= found[-1][1]
        return BlockPieces.of(found)

    def in_order(self, rows: Sequence[Rows]) -> Rows:
        """Return the rows of all lanes in the order of the pieces.

        Samples are then used in their order in memory.
        """
        if len(self.place) == 1:
            return rows[int(self.place[0])]
        by_lane, ends = self._by_lane, np.cumsum(self.number)
        begins = np.empty_like(ends)
        begins[by_lane] = np.cumsum(self.number[by_lane]) - self.number[by_lane]
        order = np.arange(ends[-1]) + np.repeat(begins - (ends - self.number), self.number)
        return Rows(*(np.concatenate(columns)[order] for columns in zip(*rows, strict=True)))

    def bounds(self, lanes: int) -> list[list[tuple[int, int]]]:
        """Return for each lane the indices in the block at which its pieces start and stop."""
        by_lane, stops = self._by_lane, np.cumsum(self.number)
        pairs = zip((stops - self.number)[by_lane].tolist(), stops[by_lane].tolist(), strict=True)
        return [
            list(islice(pairs, number))
            for number in np.bincount(self.place, minlength=lanes).tolist()
        ]

    @property
    def _by_lane(self) -> Ints:
        """The numbers of the pieces, those of the first lane first."""
        return np.argsort(self.place, kind="stable")
