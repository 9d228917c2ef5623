from __future__ import annotations

import os
import pickle
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon import get_savable_loader
from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EmptyDatasetError,
    FormatError,
    ShardChangedError,
    TruncatedError,
)
from energon.formats.meta import yaml
from energon.formats.meta.yaml import dump_yaml
from energon.plan.leaves.subset import resolve_range
from energon.prepare.dataset import prepare_dataset
from energon.samples.provenance import record_sources
from energon.sources.shard_samples import LARGE_PART_BYTES
from energon.sources.shards import MAX_SPAN_BYTES, ShardPool
from energon.sources.source import SampleSelection
from energon.sources.webdataset import WebdatasetSource
from tests.commands import ok
from tests.datasets import CRUDE, make_crude, write_shard
from tests.effort import mixed
from tests.sources.reads import read_samples
from tests.task_encoder.runs import config, val

META = {"__key__", "__shard__", "__restore_key__", "__subflavors__"}
MIB = 1 << 20


def make(root, shards, *, exclude=()):
    """Prepare `shards`, a list of lists of (key, parts); all of them are the split "train"."""
    for number, samples in enumerate(shards):
        write_shard(root / f"{number}.tar", samples)
    prepare_dataset(root, **CRUDE)
    leave_out(root, exclude)
    return root


def leave_out(root, exclude):
    path = root / ".nv-meta/split.yaml"
    document = yaml.load(path.read_text(), origin=str(path))
    path.write_text(dump_yaml({**document, "exclude": list(exclude)}))


def read(source, ordinals=None, **settings):
    chosen = range(len(source)) if ordinals is None else ordinals
    return read_samples(source, np.array(list(chosen), dtype=np.int64), **settings)


def check_late(source, ordinals):
    """Check that samples taken in steps, with sources, equal those taken at once."""
    chosen = np.array(list(ordinals), dtype=np.int64)
    keys = [(0, 0, ordinal) for ordinal in ordinals]
    block, middle = source.read(chosen, restore_keys=keys).with_sources("ds"), len(chosen) // 2
    samples = read(source, ordinals, restore_keys=keys)
    record_sources("ds", samples)
    assert [*block.samples(0, middle), *block.samples(middle, len(chosen))] == samples


def keys(source, ordinals=None):
    return [sample["__key__"] for sample in read(source, ordinals)]


def parts(sample):
    return {name: value for name, value in sample.items() if name not in META}


def random_order(count):
    return random.Random(0).sample(range(count), count)


def content(seed, size):
    return random.Random(seed).randbytes(size)


@pytest.fixture(scope="module")
def crude(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("crude") / "ds", [4, 3, 5])


# What is read


def test_samples_are_numbered_through_all_shards(crude):
    source = WebdatasetSource(crude)
    assert len(source) == 12
    samples = read(source)
    assert [sample["__key__"] for sample in samples] == [f"s{n}" for n in range(12)]
    assert [sample["txt"] for sample in samples] == [f"text {n}".encode() for n in range(12)]
    counts = {"000.tar": 4, "001.tar": 3, "002.tar": 5}
    assert [s["__shard__"] for s in samples] == [n for n, c in counts.items() for _ in range(c)]
    assert read(source, []) == []


def test_samples_carry_the_restore_keys_and_subflavors_that_are_given(crude):
    source = WebdatasetSource(crude)
    restore_keys = [(0, n, 9 - n) for n in range(3)]
    samples = read(source, [9, 0, 5], restore_keys=restore_keys, subflavors={"a": 1})
    assert [sample["__key__"] for sample in samples] == ["s9", "s0", "s5"]
    assert [sample["__restore_key__"] for sample in samples] == restore_keys
    assert all(sample["__subflavors__"] == {"a": 1} for sample in samples)
    assert [sample["__restore_key__"] for sample in read(source, [9, 0])] == [(9,), (0,)]
    assert read(source, [1])[0]["__subflavors__"] is None


@pytest.mark.parametrize("ordinal", [-1, 12, 1 << 40])
def test_a_sample_that_does_not_exist_is_an_index_error(crude, ordinal):
    source = WebdatasetSource(crude)
    with pytest.raises(IndexError, match=rf"samples 0 to 11, not {ordinal}"):
        read(source, [3, ordinal])
    with pytest.raises(IndexError, match=rf"not {ordinal}"):
        source.locate(ordinal)
    with pytest.raises(IndexError, match="samples 0 to 3, not 4"):
        read(
            WebdatasetSource(crude, SampleSelection(subsets=[(2, 6)])), [4]
        )  # which is a neighbour


SIZES = st.sampled_from([0, 1, 511, 512, 513, 5_000, LARGE_PART_BYTES - 1, LARGE_PART_BYTES])
SCHEMAS = st.lists(st.sampled_from(["jpg", "txt", "a.json", "b c"]), min_size=1, unique=True)
SAMPLES = st.lists(st.tuples(SCHEMAS, SIZES), min_size=1, max_size=6)


@given(st.lists(SAMPLES, min_size=1, max_size=4), st.data())
@settings(max_examples=40, deadline=None)
def test_any_samples_of_any_shards_are_what_was_written(tmp_path_factory, shards, data):
    """Shards with other parts in every sample, excludes, a subset, and a filter of parts."""
    number = 0
    written = []
    for shard, samples in enumerate(shards):
        for schema, size in samples:
            named = {part: content(f"{number} {part}", size) for part in schema}
            written.append((f"{shard}.tar", f"dir.x/k{number}", named))
            number += 1
    left_out = data.draw(st.sets(st.integers(0, number - 1), max_size=number - 1))
    root = make(
        tmp_path_factory.mktemp("ds"),
        [
            [(key, named) for name, key, named in written if name == f"{shard}.tar"]
            for shard in range(len(shards))
        ],
        exclude=[f"{written[n][0]}/{written[n][1]}" for n in left_out],
    )
    # Bounds count the samples before exclusion; at least one of them is left.
    kept = data.draw(st.sampled_from([n for n in range(number) if n not in left_out]))
    start = data.draw(st.integers(0, kept))
    stop = data.draw(st.integers(kept + 1, number))
    left = [written[n] for n in range(start, stop) if n not in left_out]
    wanted = data.draw(st.none() | st.sets(st.sampled_from(["jpg", "txt", "a.json", "png"])))
    source = WebdatasetSource(root, SampleSelection(subsets=[(start, stop)], parts=wanted))
    assert len(source) == len(left)

    ordinals = data.draw(st.lists(st.integers(0, len(left) - 1), max_size=12))
    samples = read(source, ordinals)
    check_late(source, ordinals)
    for ordinal, sample in zip(ordinals, samples, strict=True):
        shard, key, named = left[ordinal]
        assert (sample["__shard__"], sample["__key__"]) == (shard, key)
        assert parts(sample) == {
            name: value for name, value in named.items() if wanted is None or name in wanted
        }


def test_samples_of_more_than_one_span_are_cut_where_spans_are(tmp_path):
    # Medium parts, so that they are read in spans, and more of them than fit into one.
    size = LARGE_PART_BYTES - 600
    count = 2 * MAX_SPAN_BYTES // size
    root = make(tmp_path, [[(f"s{n}", {"bin": content(n, size)}) for n in range(count)]])
    source = WebdatasetSource(root)
    assert [sample["bin"] for sample in read(source)] == [content(n, size) for n in range(count)]
    far_apart = [count - 1, 0, count // 2]
    assert [sample["bin"] for sample in read(source, far_apart)] == [
        content(n, size) for n in far_apart
    ]
    check_late(source, random_order(count))
    check_late(source, [0, 1])  # few enough bytes to cut each sample when its turn comes


def test_large_samples_of_a_block_are_released_as_they_are_taken(tmp_path):
    size, count = LARGE_PART_BYTES - 600, 3 * MIB // LARGE_PART_BYTES
    root = make(tmp_path, [[(f"s{n}", {"bin": content(n, size)}) for n in range(count)]])
    chosen = np.arange(count)
    restore_keys = [(0, 0, n) for n in chosen.tolist()]
    block = WebdatasetSource(root).read(chosen, restore_keys=restore_keys)
    first, _ = block.samples(0, 2)
    references = sys.getrefcount(first["bin"])
    assert references == 2  # the sample's, and that of the call


class CountingPool(ShardPool):
    """Counts the shards that are open at the same time."""

    def __init__(self, max_open):
        super().__init__(max_open)
        self.files, self.most = WeakSet(), 0

    def open(self, path, **about):
        shard = super().open(path, **about)
        self.files.add(shard.file)
        self.most = max(self.most, len(self.files))
        return shard


@pytest.mark.parametrize("size", [10, LARGE_PART_BYTES])
def test_samples_of_many_shards_are_read_with_few_of_them_open(tmp_path, size):
    shards = [[(f"{s}.{n}", {"bin": content(s, size)}) for n in range(2)] for s in range(9)]
    pool = CountingPool(2)
    source = WebdatasetSource(make(tmp_path, shards), pool=pool)
    check_late(source, random_order(len(source)))
    # Those of the pool, those being opened, and two that wait to be read.
    assert pool.most <= 4 * pool.max_open


def test_parts_that_are_filtered_out_are_not_read(tmp_path):
    root = make(tmp_path, [[(f"s{n}", {"bin": content(n, MIB), "txt": b"x"}) for n in range(3)]])
    source = WebdatasetSource(root, SampleSelection(parts=["txt"]))
    before = _bytes_read()
    assert [parts(sample) for sample in read(source)] == [{"txt": b"x"}] * 3
    assert [
        parts(sample) for sample in read(WebdatasetSource(root, SampleSelection(parts=[])))
    ] == [{}] * 3
    assert _bytes_read() - before < MIB // 2


def _bytes_read():
    with open("/proc/self/io") as file:
        return int(re.search(r"rchar: (\d+)", file.read())[1])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_whose_name_is_not_utf8_is_read_and_verified(tmp_path, workers):
    root = make(tmp_path / os.fsdecode(b"\xff"), [[("a", {"txt": b"x"}), ("b", {"txt": b"y"})]])
    dataset = val(root, split_part="train", worker_config=config(num_workers=workers))
    with get_savable_loader(dataset) as loader:
        assert [batch["__key__"] for batch in loader] == [["a", "b"]]
    for command in ("info", "verify", "lint"):
        ok(command, root)


# Which samples there are


def test_excluded_shards_and_samples_have_no_number(crude, caplog):
    leave_out(crude, ["000.tar/s{1..2}", "001.tar", "002.tar/s11", "002.tar/no such key"])
    try:
        source = WebdatasetSource(crude)
        assert keys(source) == ["s0", "s3", "s7", "s8", "s9", "s10"]
        assert source.locate(1).key == "s3"
        assert "002.tar/no such key is excluded, but does not exist" in caplog.text
    finally:
        leave_out(crude, [])


@pytest.mark.slow
@given(
    st.sets(st.sampled_from(["000.tar", "001.tar", "002.tar"]), max_size=2),
    st.sets(st.integers(0, 11)),
    st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted),
    st.booleans(),
)
def test_excluded_samples_move_no_other_into_or_out_of_a_subset(
    crude, shards, numbers, bounds, in_percent
):
    entries = [f"{shard_of(n)}/s{n}" for n in numbers] + list(shards)
    if in_percent:
        bounds = [f"{8 * n}%" for n in bounds]
    start, stop = resolve_range(12, [bounds])
    left = [f"s{n}" for n in range(start, stop) if n not in numbers and shard_of(n) not in shards]
    if not left:
        with pytest.raises(EmptyDatasetError):
            WebdatasetSource(crude, SampleSelection(subsets=[bounds], exclude=entries))
        return
    source = WebdatasetSource(crude, SampleSelection(subsets=[bounds], exclude=entries))
    assert keys(source) == left
    whole, excluded = source.unexcluded
    every = keys(whole)
    assert every == [f"s{n}" for n in range(start, stop)]
    assert [key for n, key in enumerate(every) if n not in excluded] == left


def shard_of(number):
    """The shard of a sample of `crude`."""
    return next(f"00{n}.tar" for n, end in enumerate((4, 7, 12)) if number < end)


def test_many_entries_that_match_nothing_are_one_warning(crude, caplog):
    entries = [f"000.tar/{n}" for n in range(2000)] + [f"x{n}.tar" for n in range(2000)]
    assert len(WebdatasetSource(crude, SampleSelection(exclude=entries))) == 12
    shards, samples = caplog.messages
    assert "'x0.tar' is excluded, but matches no shard" in shards
    assert samples.startswith(f"{crude}: 000.tar/0 is excluded, but does not exist; 000.tar/1 is")
    assert shards.endswith("; and 1997 more")
    assert samples.endswith("; and 1997 more")
    assert len(samples) < 500


def test_an_excluded_shard_that_is_lost_is_no_part_of_the_whole_split(tmp_path):
    root = make_crude(tmp_path / "d", [2, 3, 4])
    (root / "001.tar").unlink()
    whole, excluded = WebdatasetSource(
        root, SampleSelection(exclude=["001.tar", "002.tar/s5"])
    ).unexcluded
    assert whole.shards == ["000.tar", "002.tar"]
    assert (keys(whole)[int(excluded[0])], len(excluded)) == ("s5", 1)


def test_subsets_narrow_one_another(crude):
    source = WebdatasetSource(
        crude, SampleSelection(subsets=[(2, 10), ("25%", "75%"), ("50%", "100%")])
    )
    assert keys(source) == ["s6", "s7"]


@pytest.mark.parametrize("subset", [(3, 3), ("1%", "2%")])
def test_no_samples_are_an_error_that_says_what_took_them_away(crude, subset):
    with pytest.raises(EmptyDatasetError, match=r"'train' has no samples: 3 shards with 12"):
        WebdatasetSource(crude, SampleSelection(subsets=[subset]))


def test_all_samples_may_not_be_excluded(crude):
    leave_out(crude, ["{000..002}.tar"])
    try:
        with pytest.raises(
            EmptyDatasetError, match=r"no samples: 3 shards, all excluded.*split\.y"
        ):
            WebdatasetSource(crude)
    finally:
        leave_out(crude, [])


def test_a_split_that_lists_shards_beyond_the_index_says_which(crude, tmp_path):
    text = 'split_parts: {train: ["000.tar", "00{7..9}.tar"]}\n'
    (crude / ".nv-meta/more.yaml").write_text(text)
    with pytest.raises(DatasetNotFoundError, match=r"'007\.tar'.*3 such shards.*energon prepare"):
        WebdatasetSource(crude, split_config="more.yaml")


def test_another_file_of_splits_and_another_split_may_be_named(crude):
    (crude / ".nv-meta/mine.yaml").write_text("split_parts: {odd: [002.tar, 000.tar]}\n")
    source = WebdatasetSource(crude, SampleSelection("odd"), split_config="mine.yaml")
    assert keys(source, [0, 5]) == ["s7", "s0"]
    with pytest.raises(ConfigError, match="no split 'train'"):
        WebdatasetSource(crude, split_config="mine.yaml")


# Where samples are


def test_locations_say_where_samples_begin(tmp_path):
    samples = [("a/x", {"jpg": b"1" * 600, "txt": b"2"}), ("b", {"seg.png": b"3"})]
    root = make(tmp_path, [[("z", {"txt": b""})], samples])
    source = WebdatasetSource(root, SampleSelection(parts=["txt"]))
    content = (root / "1.tar").read_bytes()
    first, second = source.locate(1), source.locate(2)
    assert first == ("a/x", "1.tar", 0, 0, ("jpg", "txt"))
    assert second[:3] == ("b", "1.tar", 1)
    assert second.parts == ("seg.png",)
    assert content[second.offset :].startswith(b"b.seg.png\0")


def test_the_fingerprint_tells_samples_and_their_order(crude):
    plain = WebdatasetSource(crude).fingerprint()
    assert plain["samples"] == 12
    assert WebdatasetSource(crude, SampleSelection(parts=["txt"])).fingerprint() == plain
    others = [
        WebdatasetSource(crude, SampleSelection(subsets=[(0, 6)])),
        WebdatasetSource(crude, SampleSelection(subsets=[(6, 12)])),
    ]
    for exclude in (["000.tar"], ["000.tar/s0"], ["000.tar/s1"]):
        leave_out(crude, exclude)
        others.append(WebdatasetSource(crude))
    leave_out(crude, [])
    prints = [plain["index"], *(other.fingerprint()["index"] for other in others)]
    assert len(set(prints)) == len(prints)


def test_the_mean_size_of_samples_is_that_of_the_shards(crude):
    size = sum((crude / f"00{n}.tar").stat().st_size for n in range(3))
    assert WebdatasetSource(crude).mean_sample_bytes == size / 12


# Who reads


def test_copies_in_other_processes_read_the_same(crude):
    leave_out(crude, ["001.tar/s5"])
    try:
        source = WebdatasetSource(crude, SampleSelection(subsets=[(1, 9)]))
    finally:
        leave_out(crude, [])
    expected = read(source)
    data = pickle.dumps(source)
    assert len(data) < 4_000
    again = pickle.loads(data)
    assert read(again) == expected
    assert again.fingerprint() == source.fingerprint()
    assert read(source) == expected


def test_many_threads_may_read(crude):
    source = WebdatasetSource(crude)
    expected = read(source)

    def check(seed):
        chosen = random.Random(seed).choices(range(12), k=7)
        return read(source, chosen) == [{**expected[n]} for n in chosen]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(check, range(300)))


# What is on disk


def strip(root, *suffixes):
    """Remove what only some tools write beside a shard."""
    for path in root.iterdir():
        if path.name.endswith(suffixes):
            path.unlink()


@pytest.mark.parametrize("gone", [(".parts",), (".idx",), (".parts", ".idx")])
def test_samples_are_read_with_whatever_index_there_is(tmp_path, gone):
    root = make_crude(tmp_path / "ds", [4, 3, 5])
    expected = read(WebdatasetSource(root))
    strip(root, *gone)
    (root / ".nv-meta/index.sqlite").unlink()
    source = WebdatasetSource(root)
    assert read(source) == expected
    assert source.locate(8).key == "s8"


@pytest.mark.parametrize(
    ("gone", "shard"), mixed([(), (".parts",), (".parts", ".idx")], ["000.tar", "002.tar"])
)
def test_a_missing_shard_says_which_and_what_to_do(tmp_path, gone, shard):
    root = make_crude(tmp_path / "ds", [4, 3, 5])
    strip(root, *gone)
    (root / shard).unlink()
    with pytest.raises(DatasetNotFoundError, match=rf"{shard}: no such file.*energon prepare"):
        read(WebdatasetSource(root))


@pytest.mark.parametrize("gone", [(), (".parts",), (".parts", ".idx")])
def test_a_shard_that_is_cut_off_anywhere_is_never_half_read(tmp_path, gone):
    root = make_crude(tmp_path / "ds", [20])
    strip(root, *gone)
    whole = (root / "000.tar").read_bytes()
    end = 20 * 1024
    for size in (0, 1, 511, 512, 600, 1024, end // 2, end - 1024, end - 513, end - 511, end - 506):
        (root / "000.tar").write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"000\.tar: (has|ends|'s\d+\.txt' at byte)"):
            read(WebdatasetSource(root))


@pytest.mark.parametrize("gone", [(), (".parts",)])
def test_a_shard_that_is_cut_off_between_the_parts_of_a_sample_is_refused(tmp_path, gone):
    root = make(tmp_path, [[(f"s{n}", {"jpg": b"1", "txt": b"2"}) for n in range(20)]])
    strip(root, *gone)
    os.truncate(root / "0.tar", 20 * 2048 - 1024)
    with pytest.raises(TruncatedError, match=r"0\.tar: has 39936 bytes, had \d+ when"):
        read(WebdatasetSource(root))


def test_a_shard_that_is_cut_off_while_it_is_read_says_where(tmp_path):
    root = make_crude(tmp_path / "ds", [20])
    source = WebdatasetSource(root)
    read(source, [0])
    os.truncate(root / "000.tar", 5_000)
    with pytest.raises(ShardChangedError, match=r"000\.tar: was changed at"):
        read(source)


@pytest.mark.parametrize("gone", [(), (".parts",)])
def test_a_shard_with_other_samples_than_were_indexed_is_refused(tmp_path, gone):
    root = make_crude(tmp_path / "ds", [4, 3])
    strip(root, *gone)
    write_shard(root / "000.tar", [(f"x{n}", {"txt": b"x" * 900}) for n in range(30)])
    with pytest.raises(ShardChangedError, match=r"000\.tar: has .*, had .* when.*energon index"):
        read(WebdatasetSource(root))


@pytest.mark.parametrize(
    "samples",
    [
        [(f"s{n}", {"txt": b"longer than it was" * 50}) for n in range(4)],
        [(f"s{n}", {"txt": b"text %d" % n, "more": b""}) for n in range(4)],
        [(f"t{n}", {"txt": b"text %d" % n}) for n in range(4)],
        [("s0", {"txt": b"text 0"}), ("s2", {"txt": b"text 2"}), *[("s1", {"txt": b"text 1"})] * 2],
        [(f"s{n}", {"txt": b"text"}) for n in range(4)],
    ],
    ids=["longer", "more parts", "other keys", "other order", "shorter"],
)
def test_a_shard_of_the_same_size_with_other_samples_is_refused(tmp_path, samples):
    """Archives are padded to 10 kB, so small changes do not change their size."""
    root = make_crude(tmp_path / "ds", [4])
    before = os.stat(root / "000.tar")
    write_shard(root / "000.tar", samples)
    assert os.stat(root / "000.tar").st_size == before.st_size
    os.utime(root / "000.tar", ns=(0, before.st_mtime_ns + 1))
    with pytest.raises(ShardChangedError, match=r"000\.tar.*energon index"):
        read(WebdatasetSource(root))


def test_a_copied_shard_of_another_date_is_read(tmp_path):
    root = make_crude(tmp_path / "ds", [4, 3, 5])
    expected = read(WebdatasetSource(root))
    for path in root.iterdir():
        os.utime(path, ns=(0, 0))
    assert read(WebdatasetSource(root)) == expected


@pytest.mark.parametrize(
    "garbage", [b"", b"no table", os.urandom(3_000)], ids=["empty", "text", "random"]
)
def test_a_damaged_part_table_says_so(tmp_path, garbage):
    root = make_crude(tmp_path / "ds", [4])
    (root / "000.tar.parts").write_bytes(garbage)
    with pytest.raises(FormatError, match=r"000\.tar\.parts"):
        read(WebdatasetSource(root))


def test_a_shard_that_is_no_archive_says_so(tmp_path):
    root = make_crude(tmp_path / "ds", [4])
    strip(root, ".parts")
    (root / "000.tar").write_bytes(content(1, 10_240))
    with pytest.raises(FormatError, match=r"000\.tar: no tar header at byte 0"):
        read(WebdatasetSource(root))


def test_splits_may_share_a_shard(tmp_path):
    root = make(tmp_path, [[(f"{s}{n}", {"txt": b"x"}) for n in range(10)] for s in "ab"])
    path = root / ".nv-meta/split.yaml"
    document = {
        "split_parts": {"train": ["0.tar", "1.tar"], "val": ["1.tar"]},
        "sample_ranges": {"train": {"1.tar": [0, 4]}, "val": {"1.tar": [4, 10]}},
        "exclude": ["1.tar/b2", "1.tar/b7"],
    }
    path.write_text(dump_yaml(document))
    train, val = (WebdatasetSource(root, SampleSelection(name)) for name in ("train", "val"))
    assert keys(train) == [*(f"a{n}" for n in range(10)), "b0", "b1", "b3"]
    assert keys(val) == ["b4", "b5", "b6", "b8", "b9"]
    assert keys(val, [4, 0]) == ["b9", "b4"]
    assert (val.locate(3).key, val.locate(3).sample) == ("b8", 8)
    assert train.fingerprint() != val.fingerprint()
