from __future__ import annotations

import io
import os
import tarfile
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, DuplicateSampleKeyError
from energon.formats.tables.part_table import PartTable, part_table_path
from energon.formats.tar.scan import load_tar_index, scan_tar, tar_index_path
from energon.prepare.writers.shard_writer import TarWriter

names = st.text("ab0-_é ", min_size=1, max_size=8).filter(lambda name: not name.startswith("__"))
folders = st.lists(names, max_size=3).map(lambda parts: "".join(f"{part}/" for part in parts))
long_names = st.integers(1, 300).map(lambda length: "k" * length)
keys = st.tuples(folders, st.one_of(names, long_names)).map("".join)
parts = st.dictionaries(
    st.sampled_from(["jpg", "txt", "seg.png", "x" * 110]), st.binary(max_size=1100), min_size=1
)


def write(path, samples, **options):
    with TarWriter(path, **options) as writer:
        for key, contents in samples:
            writer.write({"__key__": key, **contents})
    return path


@given(st.lists(st.tuples(keys, parts), min_size=1, max_size=8, unique_by=lambda pair: pair[0]))
@settings(max_examples=60, deadline=None)
def test_other_readers_read_what_was_written(tmp_path_factory, samples):
    path = write(tmp_path_factory.mktemp("w") / "x.tar", samples)
    with tarfile.open(path) as file:
        found = [(info.name, file.extractfile(info).read()) for info in file]
        dates = {(info.mtime, info.uid, info.mode) for info in file}
    assert found == [
        (f"{key}.{part}", content)
        for key, contents in samples
        for part, content in contents.items()
    ]
    assert dates == {(0, 0, 0o644)}
    # And the index is that of a scan.
    scan, table = scan_tar(path), PartTable.open(part_table_path(path), verify=True)
    scanned = PartTable.from_scan(scan, shard_mtime_ns=table.shard_mtime_ns)
    assert {**table.columns, "part_crc32": None}.keys() == {
        **scanned.columns,
        "part_crc32": None,
    }.keys()
    for name, column in scanned.columns.items():
        assert np.array_equal(table.columns[name], column)
    assert bytes(table.key_bytes) == scan.key_bytes
    assert (table.schema, table.shard_size) == (scanned.schema, os.path.getsize(path))
    assert table.shard_mtime_ns == os.stat(path).st_mtime_ns
    assert load_tar_index(tar_index_path(path)).tolist() == scan.sample_offset.tolist()
    contents = [content for _, parts in samples for content in parts.values()]
    assert table.part_crc32.tolist() == [zlib.crc32(content) for content in contents]


def test_the_same_samples_are_the_same_bytes(tmp_path):
    samples = [(f"{n}", {"txt": b"x" * n, "json": b"{}"}) for n in range(20)]
    one, other = (write(tmp_path / name, samples) for name in ("a.tar", "b.tar"))
    assert one.read_bytes() == other.read_bytes()
    assert len(one.read_bytes()) == 39 * 512 + 20 * 2 * 512 + 1024


def test_values_are_encoded_by_extension(tmp_path):
    with TarWriter(tmp_path / "x.tar") as writer:
        writer.write({"__key__": "a", "txt": "ä", "json": {"n": 1}, "cls": 3, "__url__": "x"})
    with tarfile.open(tmp_path / "x.tar") as file:
        found = {name: file.extractfile(name).read() for name in file.getnames()}
    assert found == {"a.txt": "ä".encode(), "a.json": b'{"n": 1}', "a.cls": b"3"}


def test_files_are_copied_and_not_held_in_memory(tmp_path):
    source = tmp_path / "video.mp4"
    with open(source, "wb") as file:
        file.truncate(10_000_000)
    with TarWriter(tmp_path / "x.tar") as writer:
        assert writer.write({"__key__": "a", "mp4": source}) == 512 + 10_000_384
    table = PartTable.open(part_table_path(tmp_path / "x.tar"))
    assert table.part_crc32.tolist() == [zlib.crc32(bytes(10_000_000))]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"txt": "x"}, 'needs a "__key__"'),
        ({"__key__": 3, "txt": "x"}, "found 3"),
        ({"__key__": "a"}, "no parts"),
        ({"__key__": "a.b", "txt": "x"}, "replace dots in keys"),
        ({"__key__": "", "txt": "x"}, "read back as another"),
        ({"__key__": "a/", "txt": "x"}, "read back as another"),
        ({"__key__": "__a__/b", "txt": "x"}, "read back as another"),
        ({"__key__": "a", "t/xt": "x"}, "read back as another"),
        ({"__key__": "a", "": "x"}, "read back as another"),
        ({"__key__": "a\0b", "txt": "x"}, "read back as another"),
        ({"__key__": "/a", "txt": "x"}, "leads out of the shard"),
        ({"__key__": "b/../../a", "txt": "x"}, "leads out of the shard"),
        ({"__key__": "a", "txt": 3}, "does not say how to write it"),
    ],
)
def test_samples_that_would_be_read_as_others_are_refused(tmp_path, sample, message):
    with TarWriter(tmp_path / "x.tar") as writer:
        with pytest.raises(ConfigError, match=message):
            writer.write(sample)
        writer.write({"__key__": "good", "txt": "x"})
    assert scan_tar(tmp_path / "x.tar").keys == ["good"]


def test_a_key_is_written_once(tmp_path):
    with TarWriter(tmp_path / "x.tar") as writer:
        writer.write({"__key__": "a", "txt": "x"})
        with pytest.raises(DuplicateSampleKeyError, match="already has a sample with the key 'a'"):
            writer.write({"__key__": "a", "jpg": b"x"})
    assert scan_tar(tmp_path / "x.tar").keys == ["a"]


def test_nothing_is_there_until_the_shard_is_complete(tmp_path):
    writer = TarWriter(tmp_path / "x.tar")
    writer.write({"__key__": "a", "txt": "x"})
    assert not (tmp_path / "x.tar").exists()
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["x.tar", "x.tar.idx", "x.tar.parts"]
    with pytest.raises(ConfigError, match="closed"):
        writer.write({"__key__": "b", "txt": "x"})


def test_an_exception_leaves_nothing(tmp_path):
    def fail():
        with TarWriter(tmp_path / "x.tar") as writer:
            writer.write({"__key__": "a", "txt": "x"})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert os.listdir(tmp_path) == []


def test_a_shard_without_samples_is_not_written(tmp_path):
    TarWriter(tmp_path / "x.tar").close()
    assert os.listdir(tmp_path) == []


def test_a_file_that_changes_while_it_is_copied_ends_the_shard(tmp_path, monkeypatch):
    source = tmp_path / "a.bin"
    source.write_bytes(bytes(2000))
    with TarWriter(tmp_path / "x.tar") as writer:
        from energon.prepare.writers.shard_writer import encode_sample

        encoded = encode_sample({"__key__": "a", "bin": source})
        source.write_bytes(bytes(1000))
        with pytest.raises(ConfigError, match="changed while it was copied"):
            writer.write_encoded(encoded)
    assert os.listdir(tmp_path) == ["a.bin"]


def test_shards_have_the_suffix_that_readers_look_for(tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.tar"):
        TarWriter(tmp_path / "x.tgz")


def test_long_names_and_large_sizes_cost_an_extended_header_only_where_needed():
    from energon.formats.tar.writer import encode_header

    assert len(encode_header("a" * 100, 8**11 - 1)) == 512
    assert len(encode_header("a" * 120 + "/" + "b" * 90, 1)) == 512
    for name, size in [("a" * 101, 1), ("a", 8**11), ("a" * 99 + "é", 1)]:
        header = encode_header(name, size)
        assert len(header) == 1536
        with tarfile.open(fileobj=io.BytesIO(header), ignore_zeros=True) as file:
            info = file.firstmember
        assert (info.name, info.size) == (name, size)
