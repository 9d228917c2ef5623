from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import FormatError, TruncatedError
from energon.formats.tables.part_table import PartTable, open_part_table, part_table_path
from energon.formats.tables.part_table_bytes import (
    TABLE_MAGIC,
    decode_part_table,
    encode_part_table,
)
from energon.formats.tar.scan import scan_tar
from tests.datasets import write_shard

keys = st.lists(
    st.text(st.characters(exclude_characters="/.\0", exclude_categories=["Cs"]), min_size=1).filter(
        lambda key: not key.startswith("__") and len(key.encode()) < 90
    ),
    min_size=1,
    max_size=12,
    unique=True,
)


@given(keys, st.data())
@settings(max_examples=40, deadline=None)
def test_tables_read_back_what_was_scanned(tmp_path_factory, keys, data):
    path = tmp_path_factory.mktemp("shard") / "x.tar"
    parts = st.sets(st.sampled_from(["jpg", "txt", "a.json"]), min_size=1)
    samples = [(f"k{key}", dict.fromkeys(sorted(data.draw(parts)), b"x")) for key in keys]
    try:
        write_shard(path, samples)
    except ValueError:
        return  # the name does not fit a ustar header
    scan = scan_tar(path)
    table = PartTable.from_buffer(PartTable.from_scan(scan).to_bytes(), origin="x", verify=True)
    everything = np.arange(len(samples))
    assert table.keys(everything) == scan.keys == [key for key, _ in samples]
    assert [table.index_of(key) for key in scan.keys] == everything.tolist()
    assert table.index_of("no such key") is None
    for name in ("sample_offset", "first_part", "part_name", "part_offset", "part_size"):
        assert np.array_equal(getattr(table, name), getattr(scan, name))
    for index, (_, parts) in enumerate(samples):
        numbers = table.part_numbers(index)
        offsets, sizes = scan.part_offset[numbers], scan.part_size[numbers]
        assert table.sample_parts(index) == list(zip(parts, offsets, sizes, strict=True))
        edges = scan.sample_offset[index : index + 2]
        assert table.sample_extent(index) == tuple(edges.tolist())
    same = len({tuple(parts) for _, parts in samples}) == 1
    assert table.common_parts == (tuple(samples[0][1]) if same else None)


def make_table(tmp_path):
    shard = tmp_path / "x.tar"
    write_shard(shard, [(f"s{n}", {"txt": b"x"}) for n in range(5)])
    path = part_table_path(shard)
    path.write_bytes(PartTable.from_scan(scan_tar(shard)).to_bytes())
    return shard, path


def test_tables_lie_beside_their_shard_which_is_scanned_without_one(tmp_path):
    shard, path = make_table(tmp_path)
    assert path == tmp_path / "x.tar.parts"
    assert open_part_table(shard).num_samples == 5
    path.unlink()
    assert open_part_table(shard).keys(np.array([4, 0])) == ["s4", "s0"]


def test_damage_is_noticed(tmp_path):
    _, path = make_table(tmp_path)
    data = bytearray(path.read_bytes())
    with pytest.raises(TruncatedError, match="`energon index`"):
        PartTable.from_buffer(data[:-1], origin="x.tar.parts")
    with pytest.raises(FormatError, match="expected b'ENERGPT3'"):
        PartTable.from_buffer(b"x" * len(data), origin="x.tar.parts")
    data[-1] ^= 1
    with pytest.raises(FormatError, match="checksum"):
        PartTable.from_buffer(data, origin="x.tar.parts", verify=True)


@pytest.mark.parametrize("version", [b"1", b"2", b"9"])
def test_a_table_of_another_version_does_not_count(tmp_path, caplog, version):
    shard, path = make_table(tmp_path)
    path.write_bytes(b"ENERGPT" + version + b"whatever that version has to say")
    with pytest.raises(FormatError, match="another version.*`energon index`"):
        PartTable.open(path)
    for _ in range(2):
        assert open_part_table(shard).key_of(4) == "s4"
    assert caplog.text.count("written by another release of energon") == 1
    assert "`energon index`" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about, columns: about.pop("unique"), "unique missing"),
        (lambda about, columns: about.pop("samples"), "samples missing"),
        (lambda about, columns: columns.pop("part_size"), "'part_size' of 5 numbers"),
        (lambda about, columns: about.update(header=None), "'sample_block' of 6 numbers"),
        (lambda about, columns: about.update(schema=None), "'first_part' of 6 numbers"),
        (lambda about, columns: about.update(key_length=None), "'key_start' of 6 numbers"),
        (lambda about, columns: about.update(key_length=3), "10 bytes of keys"),
        (lambda about, columns: about.update(samples="many"), "is damaged"),
        (lambda about, columns: columns.update(key_order=np.zeros(3, "u1")), "of 5 numbers"),
        (
            lambda about, columns: columns.update(part_block=np.zeros(5)),
            "a column .'part_block', '<f8'",
        ),
    ],
)
def test_a_table_that_lacks_something_is_an_error_that_says_what(tmp_path, change, message):
    _, path = make_table(tmp_path)
    about, columns, keys = decode_part_table(path.read_bytes(), origin="x", verify=True)
    change(about, columns)
    path.write_bytes(encode_part_table(about, columns, bytes(keys)))
    with pytest.raises(FormatError, match=message):
        PartTable.open(path, verify=True)


def mixed_table(tmp_path):
    """A table with every column: samples, keys and headers differ, keys are not in order."""
    samples = [("b", {"txt": b"1"}), ("aaa", {"txt": b"2", "jpg": b"x" * 600}), ("c", {"jpg": b""})]
    write_shard(tmp_path / "x.tar", samples)
    scan = scan_tar(tmp_path / "x.tar")
    table = PartTable.from_scan(replace(scan, part_crc32=np.arange(4, dtype=np.uint32)))
    offset = table.sample_offset // 512
    table = replace(table, header=None, columns={**table.columns, "sample_block": offset})
    return table.to_bytes()


def changed(data, name, value):
    """A table, with a right checksum, in which a field or a column is another."""
    about, columns, keys = decode_part_table(data, origin="x", verify=True)
    about["names"] = [each.encode().hex() for each in about["names"]]
    if name in columns:
        columns[name] = np.array(value, np.uint64)
    else:
        about[name] = value
    about.pop("columns")
    return encode_part_table(about, columns, bytes(keys))


def test_the_table_that_is_changed_below_is_sound(tmp_path):
    data = mixed_table(tmp_path)
    table = PartTable.from_buffer(data, origin="x", verify=True)
    assert len(table.columns) == 8
    assert PartTable.from_buffer(changed(data, "unique", True), origin="x", verify=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("samples", "parts", "shard_size") for value in (
            -1, True, None, 2.0, "2", [], 10**30, 1 << 63
        )],
        ("shard_mtime_ns", 1.5),
        ("unique", 1),
        ("names", None),
        ("names", "00"),
        ("names", ["00", "00"]),
        ("names", ["xy"]),
        ("names", [1]),
        ("header", []),
        ("header", [1]),
        ("header", [1, 2, 3]),
        ("header", [1, "2"]),
        ("header", [-1, 2]),
        ("header", [1, 1 << 61]),
        ("schema", []),
        ("schema", [0]),
        ("schema", [0, 7]),
        ("schema", 3),
        ("key_length", -1),
        ("key_length", 1 << 61),
        ("sample_block", [0, 1, 1, 5]),
        ("sample_block", [0, 2, 1, 5]),
        ("sample_block", [0, 1, 2, 1000]),
        ("sample_block", [2, 3, 7, 8]),
        ("sample_block", [0, 4, 7, 8]),
        ("sample_block", [0, 2, 6, 8]),
        ("part_block", [1, 2, 3, 255]),
        ("part_block", [1, 5, 3, 8]),
        ("part_block", [1, 3, 7, 8]),
        ("part_size", [1, 2, 20_000, 0]),
        ("part_size", [1, 2, 3, 9000]),
        ("first_part", [0, 2, 3, 4]),
        ("first_part", [0, 1, 1, 4]),
        ("first_part", [1, 2, 3, 4]),
        ("first_part", [0, 1, 2, 3]),
        ("first_part", [0, 3, 2, 4]),
        ("part_name", [0, 1, 2, 0]),
        ("key_start", [0, 2, 1, 5]),
        ("key_start", [0, 1, 2, 99]),
        ("key_order", [0, 0, 1]),
        ("key_order", [0, 1, 3]),
    ],
)  # fmt: skip
def test_numbers_that_lead_elsewhere_are_refused(tmp_path, name, value):
    data = changed(mixed_table(tmp_path), name, value)
    with pytest.raises(FormatError, match=r"x\.tar\.parts: is damaged: .*`energon index`"):
        PartTable.from_buffer(data, origin="x.tar.parts", verify=True)


@pytest.mark.parametrize("header", [None, [1, 6]])
def test_parts_that_reach_into_the_header_of_the_next_sample_are_refused(tmp_path, header):
    samples = [(f"{n}", {"txt": b"x"}) for n in range(3)]
    write_shard(tmp_path / "x.tar", samples)
    table = PartTable.from_scan(scan_tar(tmp_path / "x.tar"))
    if header is None:
        blocks = table.sample_offset // 512
        table = replace(table, header=None, columns={**table.columns, "sample_block": blocks})
    data = table.to_bytes()
    assert PartTable.from_buffer(changed(data, "part_size", [512, 1, 1]), origin="x", verify=True)
    for sizes in ([513, 1, 1], [1, 1, 600]):
        with pytest.raises(FormatError, match="x: is damaged: parts are outside of their samples"):
            PartTable.from_buffer(changed(data, "part_size", sizes), origin="x", verify=True)


@pytest.mark.parametrize("largest", [(1 << 64) - 1, 1 << 63, 1 << 55])
@pytest.mark.parametrize("name", ["part_block", "part_size", "sample_block", "key_start"])
def test_sums_that_overflow_are_refused(tmp_path, name, largest):
    about, columns, keys = decode_part_table(mixed_table(tmp_path), origin="x", verify=True)
    about["names"] = [each.encode().hex() for each in about["names"]]
    columns[name] = columns[name].astype(np.uint64)
    columns[name][-1] = largest
    about.pop("columns")
    with pytest.raises(FormatError, match="is damaged"):
        PartTable.from_buffer(
            encode_part_table(about, columns, bytes(keys)), origin="x", verify=True
        )


@pytest.mark.parametrize(
    "columns",
    [
        [["part_block", "O", 1]],
        [["part_block", "<u8", -1]],
        [["part_block", "<u8", 1 << 60]],
        [["part_block", "<u8", True]],
        [["part_block", "V4000000000", 1]],
        [["part_block", ["a", "<u8"], 1]],
        [["part_block", "<u1", 0], ["part_block", "<u1", 0]],
        [[["part_block"], "<u1", 0]],
        [["part_block"]],
        "part_block",
        None,
    ],
)
def test_columns_that_cannot_be_are_refused(columns):
    about = {
        "samples": 0, "parts": 0, "shard_size": 0, "shard_mtime_ns": 0, "names": [],
        "header": None, "schema": None, "key_length": None, "unique": True, "columns": columns,
    }  # fmt: skip
    text = json.dumps(about).encode()
    body = text + bytes(8)
    data = struct.pack("<8sQII", TABLE_MAGIC, len(body), zlib.crc32(body), len(text)) + body
    with pytest.raises(FormatError, match="is damaged"):
        PartTable.from_buffer(data, origin="x", verify=True)


def test_json_that_is_deep_is_refused():
    text = b"[" * 100_000
    data = struct.pack("<8sQII", TABLE_MAGIC, len(text), zlib.crc32(text), len(text)) + text
    with pytest.raises(FormatError, match="is damaged"):
        PartTable.from_buffer(data, origin="x", verify=True)
