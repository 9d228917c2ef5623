from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    DuplicateSampleKeyError,
    TruncatedError,
)
from energon.formats.meta.info import load_info, load_split
from energon.formats.meta.yaml import dump_yaml
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.engines import Engine
from energon.prepare.verify.dataset import repair_dataset, verify_dataset
from energon.prepare.writers.shard_writer import ShardWriter
from energon.sources.webdataset import WebdatasetSource
from tests.commands import run
from tests.datasets import CRUDE, make_captions, write_shard

ALONE = Engine(num_workers=1)


@pytest.fixture
def dataset(tmp_path):
    root = tmp_path / "ds"
    with ShardWriter(root / "%d.tar", maxcount=20) as writer:
        for n in range(60):
            writer.write({"__key__": f"k{n:03}", "txt": b"x" * n, "json": {"n": n}})
    prepare_dataset(root, **CRUDE)
    return root


def kinds(root, **settings):
    found = verify_dataset(root, engine=ALONE, **settings)
    return sorted({problem.kind for problem in found.problems})


def repair(root, **settings):
    return repair_dataset(root, indexing=Indexing(ALONE), **settings)


def flip(path, at):
    """Change a byte of a file, and not its date."""
    about = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def index_of(root):
    connection = sqlite3.connect(root / ".nv-meta/index.sqlite")
    rows = connection.execute(
        "SELECT * FROM samples JOIN sample_parts USING (tar_file_id, sample_index)"
    ).fetchall()
    connection.close()
    return rows


def test_nothing_is_wrong_with_what_was_just_prepared(dataset):
    for depth in ("quick", "headers", "content"):
        report = verify_dataset(dataset, depth=depth, engine=ALONE)
        assert report.ok
        assert report.problems == []
        assert report.notes == []
        assert (report.num_samples, report.num_shards) == (60, 3)
        assert report.num_checksums == (120 if depth == "content" else 0)
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_a_flipped_bit_of_content_is_found_by_its_checksum(dataset):
    source = WebdatasetSource(dataset)
    location = source.locate(25)
    flip(dataset / location.shard, location.offset + 512 + 3)
    assert kinds(dataset) == []
    (problem,) = verify_dataset(dataset, depth="content", engine=ALONE).problems
    assert (problem.kind, problem.shard, problem.key) == ("content-damaged", "1.tar", "k025")
    assert "k025.txt at byte" in problem.message


def test_contents_without_checksums_are_noted(tmp_path):
    write_shard(tmp_path / "a.tar", [("a", {"txt": b"x"})])
    prepare_dataset(tmp_path, **CRUDE)
    report = verify_dataset(tmp_path, depth="content", engine=ALONE)
    assert report.ok
    assert any("no checksums" in note for note in report.notes)
    prepare_dataset(tmp_path, **CRUDE, indexing=Indexing(ALONE, checksum=True))
    assert verify_dataset(tmp_path, depth="content", engine=ALONE).num_checksums == 1


def test_a_flipped_bit_of_a_header_is_found(dataset):
    flip(dataset / "1.tar", 3)
    assert kinds(dataset, depth="quick") == []
    assert kinds(dataset) == ["shard-damaged"]


@pytest.mark.parametrize(
    ("name", "kind"), [("1.tar.parts", "index-damaged"), ("1.tar.idx", "index-damaged")]
)
def test_a_damaged_index_is_found_and_repaired(dataset, name, kind):
    before = index_of(dataset)
    os.truncate(dataset / name, os.path.getsize(dataset / name) - 3)
    assert kinds(dataset, depth="quick") == [kind]
    done = repair(dataset)
    assert (done.indexed, done.after.ok) == (["1.tar"], True)
    assert kinds(dataset) == []
    assert index_of(dataset) == before


@pytest.mark.parametrize("name", ["1.tar.parts", "1.tar.idx", ".nv-meta/index.uuid"])
def test_a_missing_index_is_found_and_repaired(dataset, name):
    (dataset / name).unlink()
    assert kinds(dataset)[0].endswith("-missing")
    assert repair(dataset).after.ok
    assert (dataset / name).exists()


def test_a_dataset_of_another_tool_is_compared_with_its_shards(dataset):
    for table in dataset.glob("*.parts"):
        table.unlink()
    connection = sqlite3.connect(dataset / ".nv-meta/index.sqlite")
    connection.execute("DROP TABLE energon_shards")
    connection.commit()
    connection.close()
    report = verify_dataset(dataset, engine=ALONE)
    assert (report.problems, report.num_samples) == ([], 60)
    assert report.notes[0].startswith("no shard has a part table")
    assert verify_dataset(dataset, depth="quick", engine=ALONE).ok
    shutil.copy(dataset / "0.tar.idx", dataset / "1.tar.idx")
    os.truncate(dataset / "2.tar", 5000)
    assert kinds(dataset) == ["index-stale", "shard-truncated"]
    os.remove(dataset / "2.tar")
    assert kinds(dataset) == ["index-stale", "shard-missing"]


def test_a_flipped_bit_of_an_index_is_found_and_repaired(dataset):
    for name in ("0.tar.parts", "1.tar.idx"):
        flip(dataset / name, os.path.getsize(dataset / name) - 60)
    assert "index-damaged" in kinds(dataset, depth="quick")
    done = repair(dataset)
    assert (done.indexed, done.after.ok) == (["0.tar", "1.tar"], True)


def test_a_shard_that_was_written_anew_is_found_and_repaired(dataset):
    about = os.stat(dataset / "1.tar")
    samples = [(f"n{n:03}", {"txt": b"y" * n, "json": b"{}"}) for n in range(20)]
    write_shard(dataset / "1.tar", samples)
    assert kinds(dataset) == ["index-stale"]
    os.truncate(dataset / "1.tar", about.st_size)
    os.utime(dataset / "1.tar", ns=(about.st_atime_ns, about.st_mtime_ns))
    done = repair(dataset)
    assert (done.indexed, done.after.ok) == (["1.tar"], True)
    assert "n003" in [row[1] for row in index_of(dataset)]


def test_a_copy_with_another_date_is_only_noted(dataset, tmp_path):
    for name in os.listdir(dataset):
        if name.endswith(".tar"):
            os.utime(dataset / name)
    report = verify_dataset(dataset, engine=ALONE)
    assert report.ok
    assert "3 shards have another date" in report.notes[0]
    os.truncate(dataset / "1.tar", 5000)
    damaged = verify_dataset(dataset, engine=ALONE)
    assert "2 shards have another date" in damaged.notes[0]


def replace_by_text(path):
    path.write_bytes(b"no database" * 1000)


def cut_off_a_page(path):
    os.truncate(path, os.path.getsize(path) - 4096)


def lose_a_page(path):
    with open(path, "r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))


def execute(path, script):
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)


def replace_a_table_by_an_endless_view(path):
    execute(
        path,
        "ALTER TABLE samples RENAME TO moved; CREATE VIEW samples AS WITH RECURSIVE n(x) AS "
        "(SELECT 0 UNION ALL SELECT x + 1 FROM n) SELECT 0 AS tar_file_id, 'k' || x AS sample_key, "
        "x AS sample_index, 0 AS byte_offset, 0 AS byte_size FROM n",
    )


def add_a_trigger(path):
    execute(path, DELETING)


DELETING = """
CREATE TRIGGER t AFTER INSERT ON sample_parts BEGIN DELETE FROM samples; END
"""


@pytest.mark.parametrize(
    "harm",
    [
        replace_by_text,
        cut_off_a_page,
        lose_a_page,
        replace_a_table_by_an_endless_view,
        add_a_trigger,
    ],
)
def test_a_damaged_sql_index_is_found_and_repaired(dataset, harm):
    before = index_of(dataset)
    harm(dataset / ".nv-meta/index.sqlite")
    assert kinds(dataset) == ["sqlite-damaged"]
    assert repair(dataset).after.ok
    assert index_of(dataset) == before


@pytest.mark.parametrize("harm", [replace_a_table_by_an_endless_view, add_a_trigger])
def test_what_an_sql_index_tells_sqlite_to_do_is_not_done_when_shards_are_added(dataset, harm):
    harm(dataset / ".nv-meta/index.sqlite")
    with ShardWriter(dataset / "new-%d.tar") as writer:
        writer.write({"__key__": "new", "txt": "x"})
    prepare_dataset(dataset, **CRUDE)
    assert kinds(dataset) == []
    assert len(index_of(dataset)) == 2 * 60 + 1


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE samples SET byte_offset = byte_offset + 512 WHERE sample_key = 'k030'",
        "UPDATE samples SET sample_key = 'other' WHERE sample_key = 'k030'",
        "UPDATE sample_parts SET content_byte_size = 1 WHERE {place}",
        "UPDATE sample_parts SET part_name = 'jpg' WHERE {place}",
        "DELETE FROM sample_parts WHERE {place}",
    ],
)
def test_an_sql_index_with_other_rows_is_found_and_repaired(dataset, change):
    before = index_of(dataset)
    with closing(sqlite3.connect(dataset / ".nv-meta/index.sqlite")) as connection, connection:
        place = "tar_file_id = 1 AND sample_index = 3 AND part_name = 'txt'"
        assert connection.execute(change.format(place=place)).rowcount == 1
    assert kinds(dataset, depth="quick") == []
    assert kinds(dataset) == ["sqlite-stale"]
    assert repair(dataset).after.ok
    assert index_of(dataset) == before


def test_an_sql_index_of_another_tool_is_compared_by_its_counts(dataset):
    connection = sqlite3.connect(dataset / ".nv-meta/index.sqlite")
    connection.execute("DROP TABLE energon_shards")
    connection.commit()
    assert kinds(dataset) == []
    connection.execute("DELETE FROM samples WHERE sample_key = 'k030'")
    connection.commit()
    connection.close()
    assert kinds(dataset) == ["sqlite-stale"]
    assert repair(dataset).after.ok


def test_an_sql_index_that_was_left_out_stays_out(dataset):
    (dataset / ".nv-meta/index.sqlite").unlink()
    (dataset / "1.tar.parts").unlink()
    assert repair(dataset).after.ok
    assert not (dataset / ".nv-meta/index.sqlite").exists()


def test_counts_that_do_not_fit_are_found_and_repaired(dataset):
    path = dataset / ".nv-meta/.info.json"
    path.write_text(path.read_text().replace('"1.tar": 20', '"1.tar": 21'))
    assert kinds(dataset) == ["info-stale"]
    assert repair(dataset).after.ok
    assert load_info(dataset).shard_counts["1.tar"] == 20


def lose(dataset):
    (dataset / "0.tar").unlink()
    os.truncate(dataset / "2.tar", 5000)


def test_lost_shards_are_found_and_cannot_be_repaired(dataset):
    lose(dataset)
    (dataset / "1.tar.idx").unlink()
    report = verify_dataset(dataset, engine=ALONE)
    assert [problem.kind for problem in report.problems] == [
        "shard-missing",
        "index-missing",
        "shard-truncated",
    ]
    done = repair(dataset)
    assert done.indexed == ["1.tar"]
    assert [problem.kind for problem in done.after.problems] == ["shard-missing", "shard-truncated"]


def test_lost_shards_are_dropped_and_listed_where_that_is_data_file(dataset, tmp_path):
    path = dataset / ".nv-meta/split.yaml"
    document = {
        "split_parts": {"train": ["{0..2}.tar"], "val": ["2.tar"]},
        "exclude": ["1.tar/k025"],
    }
    path.write_text(dump_yaml(document))
    lose(dataset)
    done = repair(dataset, drop=True, quarantine=tmp_path / "lost.jsonl")
    assert (done.dropped, done.after.ok) == (["0.tar", "2.tar"], True)
    assert load_info(dataset).shard_counts == {"1.tar": 20}
    split = load_split(dataset)
    assert (split.shards("train"), split.shards("val")) == (["1.tar"], [])
    assert len(WebdatasetSource(dataset)) == 19
    lost = [json.loads(line) for line in (tmp_path / "lost.jsonl").read_text().splitlines()]
    assert [entry["shard"] for entry in lost] == ["0.tar", "2.tar"]
    # A run that was killed before it could say so has dropped them, too.
    before = (tmp_path / "lost.jsonl").read_bytes()
    assert repair(dataset, drop=True, quarantine=tmp_path / "lost.jsonl").dropped == []
    assert (tmp_path / "lost.jsonl").read_bytes() == before


@pytest.mark.parametrize("damaged", [[25], [25, 26, 27, 30]])
def test_a_quarantine_file_of_damaged_samples_leaves_them_out(
    dataset, tmp_path, monkeypatch, damaged
):
    from energon.prepare.verify.dataset import write_lost

    monkeypatch.setattr("energon.prepare.verify.verify.MAX_NAMED", 2)
    for number in damaged:
        location = WebdatasetSource(dataset).locate(number)
        flip(dataset / location.shard, location.offset + 512 + 3)
    write_lost(tmp_path / "q.jsonl", verify_dataset(dataset, depth="content", engine=ALONE))
    prepare_dataset(dataset, **CRUDE, exclude_from=[tmp_path / "q.jsonl"])
    assert load_split(dataset).exclude == [f"1.tar/k{number:03}" for number in damaged]
    assert len(WebdatasetSource(dataset)) == 60 - len(damaged)


def test_dropping_all_shards_is_refused(dataset):
    for n in range(3):
        (dataset / f"{n}.tar").unlink()
    with pytest.raises(ConfigError, match="no shard would be left"):
        repair(dataset, drop=True)


def test_splits_and_descriptions_are_checked(dataset):
    meta = dataset / ".nv-meta"
    (meta / "dataset.yaml").write_text("__module__: [")
    document = {
        "split_parts": {"train": ["0.tar", "9.tar"]},
        "sample_ranges": {"train": {"0.tar": [0, 21]}},
    }
    (meta / "split.yaml").write_text(dump_yaml(document))
    report = verify_dataset(dataset, engine=ALONE)
    assert [problem.kind for problem in report.problems] == [
        "split-range",
        "split-unknown-shard",
        "description-damaged",
    ]
    assert report.notes == ["2 shards are in no split, e.g. 1.tar"]
    (meta / "split.yaml").write_text("[]")
    (meta / "dataset.yaml").unlink()
    assert kinds(dataset) == ["split-damaged"]


def test_new_shards_are_noted(dataset):
    write_shard(dataset / "sub/3.tar", [("x", {"txt": b"x"})])
    report = verify_dataset(dataset, engine=ALONE)
    assert report.ok
    assert report.notes[0].startswith("1 shard is not in the dataset, e.g. sub/3.tar, because")


def test_dropped_shards_are_not_called_new(dataset):
    os.truncate(dataset / "0.tar", 5000)
    (note,) = repair(dataset, drop=True).after.notes
    assert "e.g. 0.tar, because they are new or `energon repair --drop` removed them;" in note
    assert note.endswith("`energon prepare` adds them if they are intact")
    with pytest.raises(TruncatedError, match=r"0\.tar"):
        prepare_dataset(dataset, **CRUDE)


def test_keys_that_are_there_twice_are_found(dataset):
    shutil.copy(dataset / "0.tar", dataset / "1.tar")
    with pytest.raises(DuplicateSampleKeyError, match=r"'k000' is in 0\.tar and again in 1\.tar"):
        repair(dataset)
    assert "duplicate-key" in kinds(dataset)


def test_a_folder_that_is_no_dataset_is_an_error(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="not a prepared dataset"):
        verify_dataset(tmp_path)
    with pytest.raises(DatasetNotFoundError, match="not a prepared dataset"):
        repair(tmp_path)
    assert not (tmp_path / ".nv-meta").exists()


def test_a_damaged_list_of_shards_is_a_problem(dataset):
    (dataset / ".nv-meta/.info.json").write_text("{")
    assert kinds(dataset) == ["info-damaged"]


def test_all_datasets_of_a_metadataset_are_checked(tmp_path):
    for name in ("whole", "cut"):
        make_captions(tmp_path / name, [3, 2])
    (tmp_path / "nested.yaml").write_text("splits: {val: {path: cut, split_part: train}}\n")
    (tmp_path / "blend.yaml").write_text(
        "splits:\n"
        "  train: {blend: [{path: whole}, {path: whole}]}\n"
        "  val: {blend_epochized: [{path: nested.yaml}]}\n"
    )
    command = ("verify", tmp_path / "blend.yaml", "--workers", "1")
    done = run(*command)
    assert (done.exit_code, done.output.count("5 samples in 2 shards: no problems")) == (0, 2)
    shard = sorted((tmp_path / "cut").rglob("*.tar"))[0]
    shard.write_bytes(shard.read_bytes()[:600])
    done = run(*command, "--json", "--quarantine", tmp_path / "lost")
    about = json.loads(done.stdout)
    assert (done.exit_code, about["ok"]) == (1, False)
    assert {Path(each["dataset"]).name: each["ok"] for each in about["datasets"]} == {
        "whole": True,
        "cut": False,
    }
    assert shard.name in (tmp_path / "lost/cut.jsonl").read_text()
    (tmp_path / "lost.jsonl").touch()
    done = run(*command, "--quarantine", tmp_path / "lost.jsonl")
    assert (done.exit_code, "needs a folder" in done.output) == (2, True)
    (tmp_path / "blend.yaml").write_text("splits: {train: {path: nowhere}}\n")
    assert run(*command).exit_code == 2
