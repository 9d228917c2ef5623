from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import TruncatedError
from energon.prepare import index
from energon.prepare.index import RangeSums


def reader_of(data, *, at_most):
    """Reads some bytes, at most so many at a time."""

    def read_into(offset, buffer):
        piece = data[offset : offset + min(len(buffer), at_most)]
        buffer[: len(piece)] = piece
        return len(piece)

    return read_into


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 3000)), min_size=1, max_size=20),
    st.sampled_from([1, 512, 4096]),
    st.sampled_from([512, 1 << 20]),
    st.lists(st.integers(0, 3000), max_size=5),
)
@settings(max_examples=50, deadline=None)
def test_each_range_has_its_checksum_whatever_else_is_read(pieces, at_most, piece_bytes, offsets):
    data, starts = b"", []
    for gap, size in pieces:
        starts.append(len(data) + gap)
        data += bytes(gap) + np.random.default_rng(len(data)).bytes(size)
    sizes = [size for _, size in pieces]
    before, index.CHECKED_PIECE_BYTES = index.CHECKED_PIECE_BYTES, piece_bytes
    try:
        read_into = reader_of(data, at_most=at_most)
        sums = RangeSums(np.array(starts), np.array(sizes), read_into, "x")
        for offset in sorted(offsets):  # as the headers of an archive are
            sums.read_into(offset, memoryview(bytearray(512)))
        crc32 = sums.finish()
    finally:
        index.CHECKED_PIECE_BYTES = before
    assert crc32.tolist() == [
        zlib.crc32(data[start : start + size]) for start, size in zip(starts, sizes, strict=True)
    ]


@pytest.mark.parametrize(("starts", "sizes"), [([0], [1001]), ([0, 500], [10, 501])])
def test_a_file_that_ends_too_early_is_an_error(starts, sizes):
    sums = RangeSums(np.array(starts), np.array(sizes), reader_of(bytes(1000), at_most=512), "x")
    with pytest.raises(TruncatedError, match="ends at byte 1000"):
        sums.finish()
