from __future__ import annotations

import numpy as np
import pytest

from energon.errors import FormatError, TruncatedError
from energon.formats.tar.scan import encode_tar_index, load_tar_index


def test_offsets_are_little_endian_numbers_without_a_header(tmp_path):
    offsets = np.array([0, 4096, 1 << 40], np.uint64)
    path = tmp_path / "x.tar.idx"
    path.write_bytes(encode_tar_index(offsets))
    assert path.read_bytes()[8:16] == (4096).to_bytes(8, "little")
    assert load_tar_index(path).tolist() == offsets.tolist()


def test_damage_is_noticed(tmp_path):
    path = tmp_path / "x.tar.idx"
    path.write_bytes(b"12345")
    with pytest.raises(TruncatedError, match="multiple of 8"):
        load_tar_index(path)
    path.write_bytes(encode_tar_index(np.array([5, 1], np.uint64)))
    with pytest.raises(FormatError, match="do not ascend"):
        load_tar_index(path)
