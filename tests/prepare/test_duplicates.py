from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon import DefaultTaskEncoder, get_loader
from energon.errors import DecodeError, DuplicateSampleKeyError
from energon.formats.meta.info import load_split
from energon.formats.tables.part_table import PartTable, part_table_path
from energon.formats.tar.scan import scan_tar
from energon.formats.tar.writer import END, encode_header, padded
from energon.inspect.lint import lint_dataset
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.engines import Engine
from energon.prepare.index import index_shard, summarize
from energon.prepare.verify import duplicates
from energon.prepare.verify.dataset import verify_dataset
from energon.prepare.verify.duplicates import check_unique, shards_with_repeated_keys
from energon.sources.webdataset import WebdatasetSource
from tests.datasets import CRUDE, write_shard
from tests.sources.reads import read_samples
from tests.task_encoder.runs import val

FIX = Indexing(Engine(num_workers=1), fix_duplicates=True)
ROOT = Path(__file__).parents[2]
keys = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=12, unique=True)


def indexed(folder, shards):
    tables = {}
    for number, names in enumerate(shards):
        path = folder / f"{number}.tar"
        write_shard(path, [(name, {"txt": b"x"}) for name in names])
        tables[path.name] = PartTable.from_scan(scan_tar(path))
    found = [summarize(name, table, was_read=True) for name, table in tables.items()]
    return found, tables.__getitem__


@given(st.lists(keys, min_size=1, max_size=5), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_keys_that_shards_share_are_found_a_range_at_a_time(tmp_path_factory, shards, most):
    found, open_table = indexed(tmp_path_factory.mktemp("d"), shards)
    seen, sharing = set(), []
    for number, names in enumerate(shards):
        if seen & set(names):
            sharing.append(f"{number}.tar")
        seen |= set(names)
    before, duplicates.MAX_HELD_KEYS = duplicates.MAX_HELD_KEYS, most
    try:
        assert sorted(set(shards_with_repeated_keys(found, open_table))) == sharing
        if sharing:
            with pytest.raises(DuplicateSampleKeyError, match="`energon prepare --fix-dup"):
                check_unique(found, open_table)
        else:
            check_unique(found, open_table)
    finally:
        duplicates.MAX_HELD_KEYS = before


def test_shards_whose_keys_do_not_overlap_are_not_opened(tmp_path):
    found, _ = indexed(tmp_path, [["a", "b"], ["c", "d"], ["e"]])

    def refuse(name):
        raise AssertionError(name)

    check_unique(found, refuse)


def test_a_key_that_a_shard_has_twice_is_named(tmp_path):
    write_shard(tmp_path / "a.tar", [("a", {"txt": b"1"}), ("b", {"txt": b"2"}), ("a", {"j": b""})])
    with pytest.raises(DuplicateSampleKeyError, match=r"'a' occurs twice in a\.tar.*--fix-dup"):
        prepare_dataset(tmp_path, **CRUDE)


def content(root):
    source = WebdatasetSource(root)
    return [
        (sample["__key__"], {k: v for k, v in sample.items() if not k.startswith("__")})
        for sample in read_samples(source, np.arange(len(source)))
    ]


def test_shards_with_repeated_keys_are_written_anew_with_their_path_before_each_key(tmp_path):
    first = [("0", {"txt": b"a"}), ("1", {"txt": b"b", "jpg": b"c"})]
    second = [("1", {"txt": b"d"}), ("2", {"txt": b"e" * 1000})]
    write_shard(tmp_path / "s/0.tar", first)
    write_shard(tmp_path / "s/1.tar", second)
    write_shard(tmp_path / "s/2.tar", [("3", {"txt": b"f"})])
    before = {name: (tmp_path / name).read_bytes() for name in ("s/0.tar", "s/2.tar")}
    info = prepare_dataset(tmp_path, **CRUDE, indexing=FIX)
    assert info.shard_counts == {"s/0.tar": 2, "s/1.tar": 2, "s/2.tar": 1}
    assert content(tmp_path) == [
        *first,
        ("s/1/1", {"txt": b"d"}),
        ("s/1/2", {"txt": b"e" * 1000}),
        ("3", {"txt": b"f"}),
    ]
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert load_split(tmp_path).shards("train") == list(info.shard_counts)


def test_parts_that_are_apart_are_brought_together(tmp_path, caplog):
    path = tmp_path / "a.tar"
    names = ["a.jpg", "a_2.jpg", "a.txt", "a_2.txt", "README", "a.txt"]
    data = [encode_header(name, 1) + padded(b"%d" % n) for n, name in enumerate(names)]
    path.write_bytes(b"".join(data) + END)
    prepare_dataset(tmp_path, **CRUDE, indexing=FIX)
    assert content(tmp_path) == [
        ("a", {"jpg": b"0", "txt": b"2"}),
        ("a_2", {"jpg": b"1", "txt": b"3"}),
        ("a_3", {"txt": b"5"}),
    ]
    assert "1 members that belong to no sample are skipped" in caplog.text


def same_key_twice(path):
    """Two samples with the key `b` side by side, between others."""
    contents = {"a": b"1", "b": b"first", "c": b"3"}
    samples = [(key, {"jpg": contents[key], "txt": b"x"}) for key in "abc"]
    samples.insert(2, ("b", {"jpg": b"second", "txt": b"y"}))
    write_shard(path, samples)


@given(st.lists(st.lists(st.sampled_from("xyz"), min_size=1, max_size=6), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_parts_that_a_sample_has_twice_are_found(tmp_path_factory, samples):
    path = tmp_path_factory.mktemp("d") / "0.tar"
    data, at, expected = [], 0, []
    for number, parts in enumerate(samples):
        seen = {}
        for part in parts:
            offset = at + 512
            if part in seen:
                expected.append((str(number), part, seen[part], offset))
            seen.setdefault(part, offset)
            data.append(encode_header(f"{number}.{part}", 1) + padded(b"1"))
            at += len(data[-1])
    path.write_bytes(b"".join(data) + END)
    table = PartTable.from_scan(scan_tar(path))
    assert sorted(table.repeated_parts()) == sorted(expected)
    for number in range(len(samples)):
        found = table.repeated_parts(np.array([number]))
        assert sorted(found) == sorted(e for e in expected if e[0] == str(number))


def test_neighbouring_samples_with_one_key_are_refused_and_not_merged(tmp_path):
    same_key_twice(tmp_path / "0.tar")
    with pytest.raises(
        DuplicateSampleKeyError,
        match=r"0\.tar: sample 'b' has the part 'jpg' twice, at bytes 2560 and 4608; .*--fix-dup",
    ):
        prepare_dataset(tmp_path, **CRUDE)
    assert not (tmp_path / ".nv-meta/.info.json").exists()
    assert not (tmp_path / ".nv-meta/.info.yaml").exists()


def test_neighbouring_samples_with_one_key_get_different_keys(tmp_path):
    same_key_twice(tmp_path / "0.tar")
    prepare_dataset(tmp_path, **CRUDE, indexing=FIX)
    assert content(tmp_path) == [
        ("a", {"jpg": b"1", "txt": b"x"}),
        ("b", {"jpg": b"first", "txt": b"x"}),
        ("b_2", {"jpg": b"second", "txt": b"y"}),
        ("c", {"jpg": b"3", "txt": b"x"}),
    ]
    assert verify_dataset(tmp_path, depth="content").ok


def prepared_by_another_tool(root):
    """A dataset that was prepared in spite of its two neighbours with one key."""
    same_key_twice(root / "0.tar")
    table = index_shard(str(root / "0.tar"))
    meta = root / ".nv-meta"
    meta.mkdir()
    (meta / ".info.json").write_text(
        json.dumps({"energon_version": "7.0.0", "shard_counts": {"0.tar": table.num_samples}})
    )
    (meta / "split.yaml").write_text("split_parts: {train: [0.tar]}\nexclude: []\n")
    (meta / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")


@pytest.mark.parametrize(
    ("depth", "indexed"),
    [("quick", True), ("headers", True), ("headers", False), ("content", True), ("content", False)],
)
def test_verify_names_parts_that_a_sample_has_twice(tmp_path, depth, indexed):
    prepared_by_another_tool(tmp_path)
    if not indexed:
        part_table_path(tmp_path / "0.tar").unlink()
    found = verify_dataset(tmp_path, depth=depth).problems
    assert [(p.kind, p.shard, p.key, p.repairable) for p in found] == [
        ("duplicate-part", "0.tar", "b", False)
    ] * 2
    assert "sample 'b' has the part 'jpg' twice, at bytes 2560 and 4608" in found[0].message


class Undecoded(DefaultTaskEncoder):
    decoder = None

    def encode_sample(self, sample):
        sample["jpg"]
        return sample


def test_a_sample_that_has_a_part_twice_fails_alone(tmp_path):
    prepared_by_another_tool(tmp_path)
    a, b, c = read_samples(WebdatasetSource(tmp_path), np.arange(3))
    assert [a["jpg"], c["jpg"]] == [b"1", b"3"]
    with pytest.raises(DecodeError, match=r"0\.tar: sample 'b' has the part 'jpg' twice"):
        b["jpg"]
    with get_loader(val(tmp_path, Undecoded(), split_part="train")) as batches:
        assert [batch["__key__"] for batch in batches] == [["a", "c"]]
        assert batches.stats()["failed"] == 1


def test_lint_names_the_sample_that_has_a_part_twice(tmp_path):
    prepared_by_another_tool(tmp_path)
    found = lint_dataset(tmp_path, engine=Engine(num_workers=1)).findings
    repeated = [f for f in found if "twice" in f.reason]
    assert [(f.shard, f.key) for f in repeated] == [("0.tar", "b")]
    assert "at bytes 2560 and 4608" in repeated[0].reason


KILLED = """
import os, signal, sys
from energon.prepare.writers import shard_writer

def write_atomic(*_):
    os.kill(os.getpid(), signal.SIGKILL)

shard_writer.write_atomic = write_atomic
from tests.datasets import CRUDE
from tests.prepare.test_duplicates import FIX
from energon.prepare.dataset import prepare_dataset
prepare_dataset(sys.argv[1], indexing=FIX, **CRUDE)
"""


def has_checksums(path):
    return PartTable.open(part_table_path(path)).part_crc32 is not None


@pytest.mark.slow
def test_a_shard_that_is_rewritten_keeps_its_checksums_through_a_kill(tmp_path):
    with_checksums = Indexing(Engine(num_workers=1), checksum=True)
    shards = [tmp_path / f"{n}.tar" for n in range(2)]
    write_shard(shards[0], [("a", {"txt": b"1"})])
    write_shard(shards[1], [("b", {"txt": b"2"})])
    prepare_dataset(tmp_path, indexing=with_checksums, **CRUDE)
    write_shard(shards[1], [("a", {"txt": b"2"}), ("c", {"txt": b"3"})])
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert scan_tar(shards[1]).num_samples == 2
    prepare_dataset(tmp_path, indexing=FIX, **CRUDE)
    assert all(map(has_checksums, shards))
    report = verify_dataset(tmp_path, depth="content")
    assert (report.ok, report.num_checksums) == (True, 3)


def test_shards_that_have_changed_keep_having_checksums_and_others_get_none(tmp_path):
    for n in range(3):
        write_shard(tmp_path / f"{n}.tar", [(f"{n}", {"txt": b"1"})])
    prepare_dataset(tmp_path, **CRUDE)
    index_shard(str(tmp_path / "0.tar"), checksum=True)
    for n in range(2):
        write_shard(tmp_path / f"{n}.tar", [(f"{n}x", {"txt": b"12"})])
    prepare_dataset(tmp_path, **CRUDE)
    assert [has_checksums(tmp_path / f"{n}.tar") for n in range(3)] == [True, False, False]
