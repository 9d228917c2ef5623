from __future__ import annotations

import json
import pickle
import struct
import zlib

import numpy as np
import pytest

from energon.errors import FormatError, TruncatedError
from energon.sources.join import JoinIndex, write_join_index


@pytest.mark.parametrize(("largest", "bytes_each"), [(5, 4), (2**31, 8)])
def test_columns_come_back(tmp_path, largest, bytes_each):
    column = np.array([3, -1, largest])
    write_join_index(tmp_path / "i", [None, column], num_rows=3)
    index = JoinIndex.open(tmp_path / "i")
    assert index.num_rows == 3
    rows = np.array([2, 0, 1])
    assert index.ordinals(0, rows).tolist() == [2, 0, 1]
    assert index.ordinals(1, rows).tolist() == [largest, 3, -1]
    assert index.ordinals(1, rows).dtype == np.int64
    assert index.columns[1].itemsize == bytes_each


def test_anything_but_a_join_index_is_refused(tmp_path):
    path = tmp_path / "i"
    write_join_index(path, [None, np.arange(100)], num_rows=100)
    content = path.read_bytes()
    for length in (0, 10, 30, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(TruncatedError):
            JoinIndex.open(path)
    path.write_bytes(b"something else, long enough to look at")
    with pytest.raises(FormatError, match="begins with b'somethin'"):
        JoinIndex.open(path)


@pytest.mark.parametrize(
    "about",
    [
        {"rows": -1, "columns": ["<i4"]},
        {"rows": "1", "columns": ["<i4"]},
        {"rows": 1, "columns": ["O"]},
        {"rows": 1 << 60, "columns": ["<i4"]},
        {"rows": 1, "columns": [["<i4"]]},
        {"rows": 1},
        [],
        "[" * 9999,
    ],
)
def test_a_join_index_that_says_what_cannot_be_is_refused(tmp_path, about):
    text = (about if isinstance(about, str) else json.dumps(about)).encode()
    body = text + bytes(8)
    header = struct.pack("<8sQII", b"ENERGJN1", len(body), zlib.crc32(body), len(text))
    (tmp_path / "i").write_bytes(header + body)
    with pytest.raises(FormatError, match="is damaged.*delete it"):
        JoinIndex.open(tmp_path / "i")


def test_a_copy_in_another_process_maps_the_same_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_join_index("i", [None, np.arange(100_000)], num_rows=100_000)
    index = JoinIndex.open("i")
    pickled = pickle.dumps(index)
    assert len(pickled) < 500
    monkeypatch.chdir("/")
    again = pickle.loads(pickled)
    assert again.ordinals(1, np.array([99_999])).tolist() == [99_999]
    in_memory = pickle.loads(pickle.dumps(JoinIndex(2, (None, np.array([1, -1])))))
    assert in_memory.ordinals(1, np.array([0, 1])).tolist() == [1, -1]
