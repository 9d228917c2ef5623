from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest

from energon.errors import ConfigError, DatasetNotFoundError, DuplicateSampleKeyError, FormatError
from energon.formats.meta.info import load_info, load_split
from energon.formats.tables.part_table import part_table_path
from energon.formats.tables.sqlite_index import indexed_shards
from energon.prepare import index
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.engines import Engine
from energon.prepare.verify.dataset import verify_dataset
from energon.sources.source import SampleSelection
from energon.sources.webdataset import WebdatasetSource
from tests.datasets import CRUDE, write_shard
from tests.sources.reads import read_samples


def shards(root, counts, *, prefix=""):
    for number, count in enumerate(counts):
        samples = [(f"{prefix}{number}_{n}", {"txt": b"x" * n}) for n in range(count)]
        write_shard(root / f"{number:03}.tar", samples)
    return root


def test_writes_all_that_a_dataset_is_made_of(tmp_path):
    done = []
    info = prepare_dataset(
        shards(tmp_path, [3, 4]), **CRUDE, progress=lambda *about: done.append(about)
    )
    assert info.shard_counts == {"000.tar": 3, "001.tar": 4}
    assert done == [(2, 2)]
    assert sorted(os.listdir(tmp_path / ".nv-meta")) == [
        ".info.json",
        "dataset.yaml",
        "index.sqlite",
        "index.uuid",
        "split.yaml",
    ]
    assert sorted(os.listdir(tmp_path)) == [
        ".nv-meta",
        *(f"{n:03}.tar{suffix}" for n in range(2) for suffix in ("", ".idx", ".parts")),
    ]
    assert load_split(tmp_path).shards("train") == ["000.tar", "001.tar"]


def note_scans(monkeypatch):
    """Return the names of shards, to which those are added that are read from now on."""
    scanned = []
    scan = index.scan_archive

    def scan_and_note(read_into, size, *, origin):
        scanned.append(os.path.basename(origin))
        return scan(read_into, size, origin=origin)

    monkeypatch.setattr(index, "scan_archive", scan_and_note)
    return scanned


def test_only_new_and_changed_shards_are_read_again(tmp_path, monkeypatch):
    prepare_dataset(shards(tmp_path, [3, 4]), **CRUDE)
    scanned = note_scans(monkeypatch)
    prepare_dataset(tmp_path, **CRUDE)
    assert scanned == []
    write_shard(tmp_path / "001.tar", [("other", {"txt": b"changed"})])
    write_shard(tmp_path / "002.tar", [("new", {"txt": b"new"})])
    info = prepare_dataset(tmp_path, **CRUDE)
    assert scanned == ["001.tar", "002.tar"]
    assert info.shard_counts == {"000.tar": 3, "001.tar": 1, "002.tar": 1}


def test_shards_with_an_index_of_another_release_are_read_again(tmp_path, monkeypatch):
    prepare_dataset(shards(tmp_path, [3, 4]), **CRUDE)
    old = part_table_path(tmp_path / "001.tar")
    present = old.read_bytes()
    old.write_bytes(b"ENERGPT2" + present[8:])
    (problem,) = verify_dataset(tmp_path, depth="quick", engine=Engine(num_workers=1)).problems
    assert (problem.kind, problem.repairable, problem.shard) == ("index-stale", True, "001.tar")
    assert len(read_samples(WebdatasetSource(tmp_path), np.arange(7))) == 7
    scanned = note_scans(monkeypatch)
    prepare_dataset(tmp_path, **CRUDE)
    assert (scanned, old.read_bytes()) == (["001.tar"], present)


def test_a_key_in_two_shards_is_an_error_and_writes_no_index(tmp_path):
    shards(tmp_path, [3])
    write_shard(tmp_path / "001.tar", [("0_1", {"txt": b"again"})])
    with pytest.raises(DuplicateSampleKeyError, match=r"'0_1' is in 000\.tar .* 001\.tar"):
        prepare_dataset(tmp_path, **CRUDE)
    assert not (tmp_path / ".nv-meta/.info.json").exists()
    assert not list((tmp_path / ".nv-meta").glob("*index.sqlite*"))


def test_a_shard_without_samples_is_an_error_that_says_why(tmp_path):
    shards(tmp_path, [3])
    write_shard(tmp_path / "001.tar", [("__meta__/a", {"txt": b"x"})])
    with pytest.raises(FormatError, match=r"001\.tar: has no samples.*--exclude"):
        prepare_dataset(tmp_path, **CRUDE)
    assert prepare_dataset(tmp_path, **CRUDE, exclude=["001"]).shard_counts == {"000.tar": 3}


def test_shards_may_have_any_names(tmp_path):
    names = ["x{0..1}", "y{a", "q}", "a,b", "back\\slash", "new\nline", "[1]", "-v", "#h", "ü"]
    for number, name in enumerate(names):
        write_shard(tmp_path / f"{name}.tar", [(f"{number}_{n}", {"txt": b"x"}) for n in range(2)])
    prepare_dataset(tmp_path, **CRUDE)
    source = WebdatasetSource(tmp_path)
    assert sorted(source.shards) == sorted(f"{name}.tar" for name in names)
    assert len(read_samples(source, np.arange(20))) == 20
    (tmp_path / "q.txt").write_text("x{0..1}.tar\ny{a.tar/1_0\n")
    prepare_dataset(tmp_path, **CRUDE, exclude_from=[tmp_path / "q.txt"])
    assert len(WebdatasetSource(tmp_path)) == 17


def test_folders_without_shards_are_refused(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="no .tar file"):
        prepare_dataset(tmp_path, **CRUDE)
    with pytest.raises(DatasetNotFoundError, match="does not exist: no 'nothing' in"):
        prepare_dataset(tmp_path / "nothing", **CRUDE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split_parts": []}, "none of split_ratio, split_parts"),
        ({"dataset_yaml_name": "a/b.yaml"}, "expected the name of a file in .nv-meta"),
        ({"dataset_yaml_name": "split.yaml"}, "expected the name of a file in .nv-meta"),
        ({"dataset_yaml_name": ".info.yaml"}, "expected the name of a file in .nv-meta"),
        ({"dataset_yaml_name": "crude"}, "expected the name of a file in .nv-meta"),
        ({"sample_type": "CaptoinSample"}, "did you mean 'CaptioningSample'"),
        ({"sample_type": "TextSample", "field_map": {"txt": "txt"}}, "no field 'txt'"),
        ({"sample_type": "TextSample"}, "needs the field 'text'"),
        ({"field_map": {"text": "txt"}}, "takes no field_map"),
        ({"sample_type": None, "field_map": {"text": "txt"}}, "requires the sample_type"),
        ({"exclude": [".*"]}, "leaves none"),
        ({"exclude": ["["]}, "exclude"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_written(
    tmp_path, arguments, message
):
    shards(tmp_path, [2])
    with pytest.raises(ConfigError, match=message):
        prepare_dataset(tmp_path, **{**CRUDE, **arguments})
    assert os.listdir(tmp_path) == ["000.tar"]


class Killer:
    """Runs programs that print a line when they begin, and kills them at random moments.

    The moments are spread over the time that a program takes, also on a busy machine: it is
    taken to be longer while programs do not come to their end, and shorter when they do.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.longest = 0.03

    def run(self, program, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(self.random.uniform(0, self.longest))
        self.longest *= 1.2 if process.poll() is None else 0.8
        process.send_signal(signal.SIGKILL)
        process.communicate()


def read_all(source):
    return read_samples(source, np.arange(len(source)))


@pytest.mark.slow
def test_killing_it_at_any_moment_leaves_the_old_or_the_new_dataset(tmp_path):
    """Kill -9 during the second preparation."""
    shards(tmp_path, [40] * 4)
    prepare_dataset(tmp_path, **CRUDE)
    program = (
        "from energon.prepare.dataset import prepare_dataset\n"
        f"print('go', flush=True); prepare_dataset({str(tmp_path)!r}, split_parts=['train:.*'],"
        " sample_type='CrudeWebdataset')"
    )
    old, new = {f"{n:03}.tar": 40 for n in range(4)}, {f"{n:03}.tar": 40 for n in range(6)}
    for number in range(4, 6):
        samples = [(f"{number}_{n}", {"txt": b"x"}) for n in range(40)]
        write_shard(tmp_path / f"{number:03}.tar", samples)
    killer = Killer(1)
    for _ in range(6):
        for number in range(4, 6):
            part_table_path(tmp_path / f"{number:03}.tar").unlink(missing_ok=True)
        killer.run(program)
        assert load_info(tmp_path).shard_counts in (old, new)
        source = WebdatasetSource(tmp_path)
        assert len(read_all(source)) == len(source)
    assert prepare_dataset(tmp_path, **CRUDE).shard_counts == new


@pytest.mark.slow
def test_killing_it_while_shards_change_their_numbers_leaves_no_index_that_does_not_fit(tmp_path):
    """Kill -9 while the dataset goes back and forth between two sets of shards."""
    shards(tmp_path, [30] * 5)
    program = (
        "import sys\nfrom energon.prepare.dataset import prepare_dataset\n"
        "print('go', flush=True)\n"
        f"prepare_dataset({str(tmp_path)!r}, split_parts=['train:.*'], exclude=[sys.argv[1]],"
        " sample_type='CrudeWebdataset')"
    )
    prepare_dataset(tmp_path, **CRUDE, exclude=["000"])
    sets = {
        exclude: [f"{n:03}.tar" for n in range(5) if f"{n:03}" != exclude]
        for exclude in ("000", "004")
    }
    killer = Killer(5)
    seen = set()
    turn = 0
    while turn < 6 or len(seen) < 2:
        killer.run(program, ("004", "000")[turn % 2])
        turn += 1
        source = WebdatasetSource(tmp_path)
        assert source.shards in sets.values()
        assert len(read_all(source)) == 120
        seen.add(tuple(source.shards))
        listed = list(load_info(tmp_path).shard_counts)
        index = indexed_shards(tmp_path / ".nv-meta/index.sqlite") or []
        assert [shard.name for shard in index] == listed[: len(index)]
    prepare_dataset(tmp_path, **CRUDE)
    assert verify_dataset(tmp_path, engine=Engine(num_workers=1)).ok


def rows(root):
    connection = sqlite3.connect(root / ".nv-meta/index.sqlite")
    found = [sorted(connection.execute(f"SELECT * FROM {t}")) for t in ("samples", "sample_parts")]
    connection.close()
    return found


@pytest.mark.parametrize("change", ["nothing", "append", "insert", "replace", "remove"])
def test_the_sql_index_after_a_change_is_the_one_of_a_fresh_dataset(tmp_path, change):
    root = shards(tmp_path / "ds", [3, 4, 5])
    prepare_dataset(root, **CRUDE)
    uuid = (root / ".nv-meta/index.uuid").read_text()
    written = os.stat(root / ".nv-meta/index.sqlite").st_mtime_ns
    match change:
        case "append":
            write_shard(root / "900.tar", [("new", {"txt": b"new"})])
        case "insert":
            write_shard(root / "000a.tar", [("new", {"txt": b"new"})])
        case "replace":
            write_shard(root / "001.tar", [("new", {"txt": b"new"})])
        case "remove":
            (root / "001.tar").unlink()
    prepare_dataset(root, **CRUDE)
    assert (uuid == (root / ".nv-meta/index.uuid").read_text()) == (change == "nothing")
    same = written == os.stat(root / ".nv-meta/index.sqlite").st_mtime_ns
    assert same == (change == "nothing")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    for path in root.glob("*.tar"):
        (fresh / path.name).write_bytes(path.read_bytes())
    prepare_dataset(fresh, **CRUDE)
    assert rows(root) == rows(fresh)


def test_a_stale_sql_index_is_not_left_where_none_is_data_file(tmp_path):
    without = Indexing(Engine(num_workers=1), sqlite=False)
    prepare_dataset(shards(tmp_path, [3, 4]), **CRUDE)
    prepare_dataset(tmp_path, **CRUDE, indexing=without)
    assert (tmp_path / ".nv-meta/index.sqlite").exists()
    write_shard(tmp_path / "001.tar", [("new", {"txt": b"new"})])
    prepare_dataset(tmp_path, **CRUDE, indexing=without)
    assert not (tmp_path / ".nv-meta/index.sqlite").exists()


def test_reading_shards_for_their_checksums_keeps_the_sql_index(tmp_path):
    prepare_dataset(shards(tmp_path, [3, 4]), **CRUDE)
    for sqlite in (True, False):
        how = Indexing(Engine(num_workers=1), sqlite=sqlite, checksum=True)
        part_table_path(tmp_path / "000.tar").unlink()
        prepare_dataset(tmp_path, **CRUDE, indexing=how)
        assert (tmp_path / ".nv-meta/index.sqlite").exists()
    assert verify_dataset(tmp_path, depth="content", engine=Engine(num_workers=1)).ok


def test_what_a_killed_preparation_has_indexed_counts_as_changed_in_the_next(tmp_path):
    """Kill -9 between the indexes of shards and what says what the dataset consists of."""
    prepare_dataset(shards(tmp_path, [3, 4]), **CRUDE)
    before = (tmp_path / ".nv-meta/index.uuid").read_text()
    write_shard(tmp_path / "001.tar", [("new", {"txt": b"new"})])
    program = (
        "import os\nfrom energon.prepare.dataset import Indexing, prepare_dataset\n"
        "from energon.prepare.engines import Engine\n"
        "def kill(done, total):\n    if done == total: os.kill(os.getpid(), 9)\n"
        "how = Indexing(Engine(num_workers=1), sqlite=False, progress=kill)\n"
        f"prepare_dataset({str(tmp_path)!r}, split_parts=['train:.*'], indexing=how)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert (tmp_path / ".nv-meta/index.uuid").read_text() == before
    without = Indexing(Engine(num_workers=1), sqlite=False)
    prepare_dataset(tmp_path, **CRUDE, indexing=without)
    after = (tmp_path / ".nv-meta/index.uuid").read_text()
    assert after != before  # joins and caches go by it
    assert not (tmp_path / ".nv-meta/index.sqlite").exists()
    prepare_dataset(tmp_path, **CRUDE, indexing=without)
    assert (tmp_path / ".nv-meta/index.uuid").read_text() == after


def test_few_shards_are_shared_by_splits(tmp_path, caplog):
    ratio = {"train": 8, "val": 1, "test": 1}
    prepare_dataset(shards(tmp_path, [20]), split_ratio=ratio)
    assert "1 shard cannot be divided between" in caplog.text
    lengths = {name: len(WebdatasetSource(tmp_path, SampleSelection(name))) for name in ratio}
    assert lengths == {"train": 16, "val": 2, "test": 2}
    prepare_dataset(tmp_path, split_ratio=ratio, split_unit="shard")
    assert set(load_split(tmp_path).split_parts) == {"train"}


def test_samples_may_be_dealt_where_there_are_shards_enough(tmp_path):
    prepare_dataset(
        shards(tmp_path, [10, 10, 10]), split_ratio={"a": 1, "b": 1}, split_unit="sample"
    )
    keys = []
    for name in ("a", "b"):
        source = WebdatasetSource(tmp_path, SampleSelection(name))
        keys += [sample["__key__"] for sample in read_samples(source, np.arange(len(source)))]
    assert keys == [f"{shard}_{n}" for shard in range(3) for n in range(10)]


def test_folders_may_be_splits(tmp_path):
    for name in ("train/0", "train/1", "val/0"):
        write_shard(tmp_path / f"shards/{name}.tar", [(name.replace("/", "_"), {"txt": b"x"})])
    prepare_dataset(tmp_path, split_by_folder=True)
    split = load_split(tmp_path)
    assert split.shards("train") == ["shards/train/0.tar", "shards/train/1.tar"]
    assert split.shards("val") == ["shards/val/0.tar"]


def test_a_shuffled_order_is_always_the_same(tmp_path):
    shards(tmp_path, [1] * 8)
    orders = []
    for _ in range(2):
        prepare_dataset(tmp_path, split_ratio={"train": 1, "val": 1}, shuffle_shards=True)
        split = load_split(tmp_path)
        orders.append([split.shards("train"), split.shards("val")])
    assert orders[0] == orders[1]
    assert orders[0][0] != [f"{n:03}.tar" for n in range(4)]
    assert sorted(orders[0][0] + orders[0][1]) == [f"{n:03}.tar" for n in range(8)]


def test_a_shard_that_is_written_to_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    shards(tmp_path, [3])
    scan = index.scan_archive

    def scan_and_touch(read_into, size, *, origin):
        os.utime(origin)
        return scan(read_into, size, origin=origin)

    monkeypatch.setattr(index, "scan_archive", scan_and_touch)
    with pytest.raises(FormatError, match="was modified while it was read"):
        prepare_dataset(tmp_path, **CRUDE)


def test_a_program_writes_the_description_that_the_command_writes(tmp_path):
    shards(tmp_path, [3])
    prepare_dataset(tmp_path, split_ratio={"train": 1})
    description = tmp_path / ".nv-meta/dataset.yaml"
    assert "__class__: CrudeWebdataset" in description.read_text()
    description.write_text("own: 1\n")
    prepare_dataset(tmp_path, split_ratio={"train": 1})
    assert description.read_text() == "own: 1\n"
    prepare_dataset(tmp_path, split_ratio={"train": 1}, sample_type="CrudeWebdataset")
    assert "CrudeWebdataset" in description.read_text()


def test_without_a_sample_type_there_is_no_description(tmp_path):
    shards(tmp_path, [3])
    prepare_dataset(tmp_path, split_ratio={"train": 1}, sample_type=None)
    assert not (tmp_path / ".nv-meta/dataset.yaml").exists()
