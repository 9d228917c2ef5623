from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energon.plan.rows import Rows
from energon.stages.reading.shared_reading import BlockPieces

LANES = 5
PIECES = st.lists(st.tuples(st.integers(0, LANES - 1), st.integers(0, 7)), min_size=1, max_size=40)


def pairs(pieces):
    return list(zip(pieces.place.tolist(), pieces.number.tolist(), strict=True))


@given(PIECES)
def test_each_piece_holds_the_next_rows_of_its_lane(drawn):
    pieces = BlockPieces.of(drawn)
    assert pairs(pieces) == [(place, number) for place, number in drawn if number]
    counts = pieces.by_lane(LANES)
    assert counts == [sum(number for lane, number in drawn if lane == own) for own in range(LANES)]
    if not sum(counts):
        return
    # Row r of lane v is number 100 * v + r.
    rows = [100 * lane + np.arange(count) for lane, count in enumerate(counts)]
    found = pieces.in_order([Rows(each.astype(np.int32), each, each) for each in rows]).ordinal
    left, expected = [each.tolist() for each in rows], []
    for place, number in pairs(pieces):
        expected += left[place][:number]
        del left[place][:number]
    assert found.tolist() == expected
    for lane, bounds in enumerate(pieces.bounds(LANES)):
        taken = [number for start, stop in bounds for number in found[start:stop].tolist()]
        assert taken == rows[lane].tolist()
        assert all(start < stop for start, stop in bounds)


@given(PIECES, st.lists(st.integers(0, 20), min_size=LANES, max_size=LANES))
def test_pieces_are_cut_to_the_rows_that_lanes_have_left(drawn, left):
    pieces = BlockPieces.of(drawn)
    counts = [min(number, most) for number, most in zip(pieces.by_lane(LANES), left, strict=True)]
    cut = pieces.cut(counts)
    assert cut.by_lane(LANES) == counts
    assert pieces.cut(pieces.by_lane(LANES)).by_lane(LANES) == pieces.by_lane(LANES)
    # Every lane loses the end of its pieces.
    for lane in range(LANES):
        before = [number for place, number in pairs(pieces) if place == lane]
        after = [number for place, number in pairs(cut) if place == lane]
        assert after[:-1] == before[: max(0, len(after) - 1)]


@given(PIECES, st.sets(st.integers(0, LANES - 1)), st.integers(1, 9), st.integers(0, 60))
def test_turns_fill_the_room(drawn, lanes, turn, room):
    first, places = BlockPieces.of(drawn), sorted(lanes)
    both = first.followed_by(places, turn, room)
    count = len(first.place)
    assert pairs(both)[:count] == pairs(first)
    turns = pairs(both)[count:]
    assert sum(number for _, number in turns) == (room if places else 0)
    assert [place for place, _ in turns] == [
        places[each % len(places)] for each in range(len(turns))
    ]
    assert [number for _, number in turns[:-1]] == [turn] * max(0, len(turns) - 1)
    assert all(0 < number <= turn for _, number in turns)
