"""Splits, labels and order of packed samples."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.formats.meta.info import load_info, load_split
from energon.prepare.importers.row import PackSource
from energon.prepare.writers.pack import PackOptions, SplitDraw, open_draw, pack_dataset
from energon.sources.webdataset import WebdatasetSource
from tests.commands import run
from tests.datasets import write_shard
from tests.effort import mixed
from tests.prepare.test_pack_recognition import lines, packs, samples_of, write
from tests.sources.reads import read_samples

RATIO = {"train": 8, "val": 1, "test": 1}


class Rows(PackSource):
    """Samples with these keys, and columns beside their parts."""

    def __init__(self, rows, *, fail_at=None):
        self.rows = rows
        self.fail_at = fail_at

    def samples(self, split, start=0, is_selected=lambda key, row: True):
        for number, (key, row) in enumerate(self.rows[start:], start=start):
            if is_selected(key, row):
                if number == self.fail_at:
                    raise RuntimeError("someone has pressed Ctrl-C")
                yield {"__key__": key, "txt": f"text of {key}"}


def keys_of(root):
    return {split: list(samples_of(root, split)) for split in load_split(root).split_parts}


def shards_of(root):
    return {name: Path(root, name).read_bytes() for name in load_info(root).shard_counts}


def pack(source, target, **options):
    return pack_dataset(source, target, PackOptions(maxcount=7, **options), identity={})


def animals(root, *, count=40, suffix="jpg"):
    for name in ("cat", "dog", "eel"):
        write(root, {f"{name}/{n:03}.{suffix}": f"{name} {n}" for n in range(count)})
    return root


def test_every_split_has_samples_of_every_folder(tmp_path):
    animals(tmp_path / "in")
    packs(tmp_path / "in", tmp_path / "out", "--split-ratio", "2,1")
    found = keys_of(tmp_path / "out")
    assert sorted(found["train"] + found["val"]) == sorted(
        f"{name}/{n:03}" for name in ("cat", "dog", "eel") for n in range(40)
    )
    for keys in found.values():
        assert {key.partition("/")[0] for key in keys} == {"cat", "dog", "eel"}


@settings(max_examples=50, deadline=None)
@given(
    keys=st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=60),
    added=st.sets(st.text(min_size=1, max_size=8), max_size=20),
)
def test_added_samples_move_no_others(keys, added):
    ratio = SplitDraw(RATIO)
    before = {key: ratio(key, {}) for key in keys}
    after = {key: ratio(key, {}) for key in sorted(keys | added)}
    assert before.items() <= after.items()


def test_ratios_are_met(monkeypatch):
    ratio = SplitDraw(RATIO)
    counts = Counter(ratio(f"{n:09}", {}) for n in range(20_000))
    assert counts["train"] == pytest.approx(16_000, rel=0.02)
    assert counts["val"] == pytest.approx(2_000, rel=0.08)


@pytest.mark.parametrize("count", [2, 3, 5, 10, 30])
def test_each_split_of_few_samples_gets_one_if_there_are_enough(count):
    rows = [(f"{n}", {}) for n in range(count)]
    split = open_draw(Rows(rows), RATIO)
    counts = Counter(split(key, row) for key, row in rows)
    assert len(counts) == min(count, 3)


def test_many_samples_are_not_held_in_memory_to_give_each_split_one(monkeypatch):
    monkeypatch.setattr("energon.prepare.writers.pack.PEEKED_SAMPLES", 5)
    rows = [(f"{n}", {}) for n in range(20)]
    source = Rows(rows)
    seen = []
    source.samples = lambda split, start=0, is_selected=None: (
        {"__key__": key} for key, row in rows if seen.append(key) or is_selected(key, row)
    )
    assert open_draw(source, {"train": 1e9, "val": 1}).moved == {}
    assert len(seen) == 6


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    ratios=st.lists(st.integers(1, 9), min_size=2, max_size=4),
)
def test_each_stratum_is_divided_as_exactly_as_whole_samples_allow(sizes, ratios):
    named = {f"split{n}": ratio for n, ratio in enumerate(ratios)}
    rows = [(f"{s}-{n}", {"kind": s}) for s, size in enumerate(sizes) for n in range(size)]
    split = open_draw(Rows(rows), named, "kind")
    counts = Counter((row["kind"], split(key, row)) for key, row in rows)
    moved = Counter(split.moved.values())
    for stratum, size in enumerate(sizes):
        for name, ratio in named.items():
            exact = size * ratio / sum(ratios)
            slack = 1 + moved[name] + sum(moved.values())
            assert abs(counts[stratum, name] - exact) < slack


def test_folders_and_columns_are_stratified(tmp_path):
    animals(tmp_path / "in", count=20)
    options = ("--split-ratio", "8,1,1", "--stratify")
    packs(tmp_path / "in", tmp_path / "out", *options, "folder")
    for split, each in (("train", 16), ("val", 2), ("test", 2)):
        counts = Counter(key.partition("/")[0] for key in samples_of(tmp_path / "out", split))
        assert counts == {"cat": each, "dog": each, "eel": each}
    rows = [{"kind": "rare" if n % 10 == 0 else "often", "n": n} for n in range(100)]
    write(tmp_path, {"t.jsonl": lines(rows)})
    packs(tmp_path / "t.jsonl", tmp_path / "t", *options, "kind")
    found = [json.loads(each["json"]) for each in samples_of(tmp_path / "t", "val").values()]
    assert Counter(each["kind"] for each in found) == {"rare": 1, "often": 9}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stratify", "folder"), "--split-ratio 8,1,1"),
        (("--stratify", "kind", "--split-ratio", "1,1"), "no such column, only folder"),
        (("--order", "sorted"), "expected as-is, shuffle"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, message):
    animals(tmp_path / "in", count=2)
    done = run("pack", tmp_path / "in", tmp_path / "out", *options)
    assert done.exit_code != 0
    assert message in done.output
    assert not list(tmp_path.rglob("*.tar"))


@pytest.mark.parametrize(
    ("stratify", "seed", "fail_at"),
    [("kind", 3, 5), *mixed([None, "kind"], [None, 3], [0, 5, 37, 99])],
)
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, stratify, seed, fail_at):
    rows = [(f"{n:03}", {"kind": n % 3}) for n in range(100)]
    options = {"split_ratio": RATIO, "stratify": stratify, "shuffle_seed": seed}
    pack(Rows(rows), tmp_path / "whole", **options)
    with pytest.raises(RuntimeError, match="Ctrl-C"):
        pack(Rows(rows, fail_at=fail_at), tmp_path / "cut", **options)
    pack(Rows(rows), tmp_path / "cut", **options)
    assert shards_of(tmp_path / "cut") == shards_of(tmp_path / "whole")
    found = [key for keys in keys_of(tmp_path / "cut").values() for key in keys]
    assert sorted(found) == [key for key, _ in rows]


def test_going_on_after_samples_have_vanished_is_refused(tmp_path):
    rows = [(f"{n:03}", {}) for n in range(100)]
    pack(Rows(rows), tmp_path / "out", split_ratio=RATIO)
    with pytest.raises(ConfigError, match="no longer in the source"):
        pack(Rows(rows[:50]), tmp_path / "out", split_ratio=RATIO)
    with pytest.raises(ConfigError, match="no longer in the source"):
        pack(Rows(rows[50:]), tmp_path / "out", split_ratio=RATIO)


def test_another_ratio_is_another_dataset_and_overwriting_leaves_nothing(tmp_path):
    rows = [(f"{n:03}", {}) for n in range(50)]
    pack(Rows(rows), tmp_path / "out")
    with pytest.raises(ConfigError, match="or differently"):
        pack(Rows(rows), tmp_path / "out", split_ratio=RATIO)
    pack(Rows(rows), tmp_path / "out", split_ratio=RATIO, overwrite=True)
    assert sum(len(keys) for keys in keys_of(tmp_path / "out").values()) == 50
    pack(Rows(rows), tmp_path / "out", overwrite=True)
    assert keys_of(tmp_path / "out") == {"train": [key for key, _ in rows]}
    assert {path.name for path in (tmp_path / "out/shards").rglob("*.tar*")} == {
        f"{n:05}.tar{suffix}" for n in range(8) for suffix in ("", ".idx", ".parts")
    }


def test_shuffled_shards_have_all_samples_in_an_order_of_the_seed(tmp_path):
    animals(tmp_path / "in", count=20)
    orders = {}
    for order in ("as-is", "shuffle", "shuffle:0", "shuffle(7)"):
        target = tmp_path / order
        packs(tmp_path / "in", target, "--order", order)
        source = WebdatasetSource(target)
        orders[order] = [each["__key__"] for each in read_samples(source, np.arange(len(source)))]
        assert {each.name for each in target.iterdir()} == {".nv-meta", "shards"}
    assert orders["as-is"] == sorted(orders["as-is"])
    assert orders["shuffle"] == orders["shuffle:0"]
    assert len({tuple(order) for order in orders.values()}) == 3
    for order in orders.values():
        assert sorted(order) == orders["as-is"]
    folders = [key.partition("/")[0] for key in orders["shuffle"]]
    assert folders != sorted(folders)


def test_contents_of_archives_are_shuffled_too(tmp_path):
    samples = [(f"{n:03}", {"txt": f"text {n}".encode(), "bin": bytes(n)}) for n in range(30)]
    write_shard(tmp_path / "in/0.tar", samples)
    packs(tmp_path / "in", tmp_path / "out", "--order", "shuffle:1", "--split-ratio", "2,1")
    found = samples_of(tmp_path / "out", "train") | samples_of(tmp_path / "out", "val")
    assert found == dict(samples)
    assert list(samples_of(tmp_path / "out", "train")) != sorted(
        samples_of(tmp_path / "out", "train")
    )


def test_the_splits_of_a_source_are_drawn_anew_where_that_is_data_file(tmp_path):
    write(tmp_path / "in", {f"{s}/{n}.txt": "x" for s in ("train", "test") for n in range(30)})
    said = packs(tmp_path / "in", tmp_path / "out", "--split-ratio", "train:1,val:1")
    assert "instead of train, test of the source" in said
    assert list(keys_of(tmp_path / "out")) == ["train", "val"]
    packs(tmp_path / "in", tmp_path / "one", "--split-ratio", "all:1")
    assert len(keys_of(tmp_path / "one")["all"]) == 60


def test_a_split_too_small_for_its_ratio_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("energon.prepare.writers.pack.PEEKED_SAMPLES", 5)
    rows = [(f"{n:03}", {}) for n in range(20)]
    pack(Rows(rows), tmp_path / "out", split_ratio={"train": 1e12, "val": 1})
    assert "split 'val' has no samples" in caplog.text


def test_folders_become_labels_beside_what_json_files_say(tmp_path):
    animals(tmp_path / "in", count=2)
    write(tmp_path / "in", {"dog/001.JSON": '{"age": 3}'})
    said = packs(tmp_path / "in", tmp_path / "out", "--label-from", "folder")
    assert "labels: 0 cat, 1 dog, 2 eel" in said
    found = samples_of(tmp_path / "out")
    assert json.loads(found["eel/000"]["json"]) == {"label": 2, "label_name": "eel"}
    assert json.loads(found["dog/001"]["JSON"]) == {"age": 3, "label": 1, "label_name": "dog"}


def test_labels_stay_those_of_the_first_run(tmp_path):
    animals(tmp_path / "in", count=2)
    packs(tmp_path / "in", tmp_path / "out", "--label-from", "folder")
    write(tmp_path / "in", {"bat/000.jpg": "x"})
    done = run("pack", tmp_path / "in", tmp_path / "out", "--label-from", "folder")
    assert "was packed from something else, or differently" in done.output


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"cat/1.jpg": "", "2.jpg": ""}, "'2' is not in a folder"),
        ({"cat/1.json": '{"label": 1}', "cat/1.jpg": ""}, "already has a field 'label'"),
        ({"cat/1.json": "[1]", "cat/1.jpg": ""}, "expected an object"),
        ({"cat/1.json": "{", "cat/1.jpg": ""}, "expected JSON"),
        ({"a.csv": "x\n1\n"}, "is for folders of files"),
    ],
)
def test_labels_that_make_no_sense_are_refused(tmp_path, files, message):
    write(tmp_path / "in", files)
    done = run("pack", tmp_path / "in", tmp_path / "out", "--label-from", "folder")
    assert done.exit_code != 0
    assert message in done.output
