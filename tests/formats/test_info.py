from __future__ import annotations

import pytest

from energon.errors import DatasetNotFoundError, FormatError
from energon.formats.info import DatasetInfo, load_info


def write(root, name, text):
    (root / ".nv-meta").mkdir(exist_ok=True)
    (root / ".nv-meta" / name).write_text(text)


def test_reads_what_it_writes_in_order(tmp_path):
    counts = {"b.tar": 5, "a.tar": 0}
    write(tmp_path, ".info.json", DatasetInfo(counts, "7.4.1").to_json())
    info = load_info(tmp_path)
    assert list(info.shard_counts.items()) == list(counts.items())
    assert (info.energon_version, info.num_samples) == ("7.4.1", 5)


def test_reads_the_older_yaml(tmp_path):
    write(tmp_path, ".info.yaml", "shard_counts:\n  shards/000.tar: 1223\n  shards/001.tar: 1420\n")
    assert load_info(tmp_path).shard_counts == {"shards/000.tar": 1223, "shards/001.tar": 1420}


@pytest.mark.parametrize("text", ["", "{}", '{"shard_counts": {"a": "b"}}', "[1]", "{"])
def test_damaged_files_say_so(tmp_path, text):
    write(tmp_path, ".info.json", text)
    with pytest.raises(FormatError, match=r"\.info\.json"):
        load_info(tmp_path)


def test_other_folders_say_what_to_do(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="is not a prepared dataset.*energon prepare"):
        load_info(tmp_path)
    with pytest.raises(DatasetNotFoundError, match="does not exist"):
        load_info(tmp_path / "nothing")


def test_a_folder_of_that_name_is_refused(tmp_path):
    (tmp_path / ".nv-meta/.info.json").mkdir(parents=True)
    with pytest.raises(FormatError, match="info.json: is a folder"):
        load_info(tmp_path)
