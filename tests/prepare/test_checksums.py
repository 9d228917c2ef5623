from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import TruncatedError
from energon.prepare.index import checksums
from energon.prepare.index.checksums import content_crc32


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 3000)), min_size=1, max_size=20),
    st.sampled_from([512, 4096, 1 << 20]),
)
@settings(max_examples=50, deadline=None)
def test_ranges_are_read_together_and_each_has_its_checksum(tmp_path_factory, pieces, most):
    path = tmp_path_factory.mktemp("c") / "x"
    data, offsets = b"", []
    for gap, size in pieces:
        offsets.append(len(data) + gap)
        data += bytes(gap) + np.random.default_rng(len(data)).bytes(size)
    path.write_bytes(data)
    sizes = [size for _, size in pieces]
    before, checksums.CHECKED_BYTES = checksums.CHECKED_BYTES, most
    try:
        found = content_crc32(path, np.array(offsets), np.array(sizes))
    finally:
        checksums.CHECKED_BYTES = before
    assert found.tolist() == [
        zlib.crc32(data[offset : offset + size])
        for offset, size in zip(offsets, sizes, strict=True)
    ]


def test_a_file_that_ends_too_early_is_an_error(tmp_path):
    (tmp_path / "x").write_bytes(bytes(1000))
    for offsets, sizes in (([0], [1001]), ([0, 500], [10, 501])):
        with pytest.raises(TruncatedError, match="ends at byte 1000"):
            content_crc32(tmp_path / "x", np.array(offsets), np.array(sizes))
