"""Folders are walked once, without hidden files, and patterns match each path once."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from glob import glob

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import StorageError
from energon.io.backends.local import PathPattern, walk_files
from energon.io.epath import EPath
from energon.io.files import list_files, match_files
from energon.sources.media_folder import MediaFiles
from energon.sources.tables.parquet import ParquetSource
from tests.commands import run
from tests.datasets import write_shard

NAMES = ("0.tar", "1.txt", "a", "b", ".git", ".0.tar")
STEPS = ("**", "*", "*.tar", "?", "[ab]", "a", ".*", "0.tar")
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=5)
patterns = st.lists(st.sampled_from(STEPS), min_size=1, max_size=6)


def tree(top, *names):
    for name in names:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(b"x")
    return top


def matches(path, pattern):
    """Return whether a path matches, by trying every number of folders for each `**`."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        may_skip = bool(path) and not path[0].startswith(".")
        return matches(path, pattern[1:]) or (may_skip and matches(path[1:], pattern))
    fits = bool(path) and fnmatchcase(path[0], pattern[0])
    return (
        fits
        and (pattern[0].startswith(".") or not path[0].startswith("."))
        and matches(path[1:], pattern[1:])
    )


@given(paths, patterns)
def test_a_path_matches_as_if_every_number_of_folders_was_tried(path, pattern):
    assert PathPattern("/".join(pattern)).matches("/".join(path)) == matches(path, pattern)


@pytest.mark.parametrize(
    "pattern",
    ["*", "**", "**/*.tar", "*/*.tar", "**/**/*.tar", "a/**/0.tar", "**/a/**/*", ".git/*", "?/?"],
)
def test_a_folder_has_the_files_that_glob_finds(tmp_path, pattern):
    tree(tmp_path, "0.tar", "a/0.tar", "a/b/1.tar", "a/a/2.txt", ".git/3.tar", "a/.x/4.tar", "a/.5")
    found = glob(pattern, root_dir=tmp_path, recursive=True)
    expected = sorted({name for name in found if (tmp_path / name).is_file()})
    assert sorted(name for name, _ in walk_files(str(tmp_path), pattern)) == expected
    folder, listed = match_files(f"{tmp_path}/{pattern}")
    assert [os.path.join(folder, info.key) for info in listed] == [
        str(tmp_path / name) for name in expected
    ]


def test_several_stars_count_each_file_once(tmp_path):
    deep = "/".join("d" * 24)
    (tmp_path / deep).mkdir(parents=True)
    pq.write_table(pa.table({"n": range(20)}), tmp_path / deep / "0.parquet")
    for stars in range(1, 7):
        pattern = f"{tmp_path}/{'**/' * stars}*.parquet"
        assert len(ParquetSource(pattern)) == 20
    pattern = f"{tmp_path}/**/d/**/d/**/d/**/d/**/*.parquet"
    assert len(ParquetSource(pattern)) == 20
    assert len(list(EPath(tmp_path).glob("**/d/**/d/**/d/**/*.parquet"))) == 1


def test_loops_of_links_end(tmp_path):
    tree(tmp_path, "a/0.tar")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    (tmp_path / "a" / "itself").symlink_to("itself")
    found = [name for name, _ in walk_files(str(tmp_path))]
    assert found == ["a/0.tar", "a/itself"]
    (tmp_path / "a" / "itself").unlink()
    assert [info.key for info in list_files(tmp_path)] == ["a/0.tar"]
    assert [info.key for info in match_files(f"{tmp_path}/**/*.tar")[1]] == ["a/0.tar"]


def test_a_walk_has_limits_of_entries_and_time(tmp_path, monkeypatch):
    tree(tmp_path, *(f"{number}/0.parquet" for number in range(20)))
    monkeypatch.setenv("ENERGON_LIMIT_WALKED_ENTRIES", "30")
    with pytest.raises(StorageError, match=r"than 30 files .* set ENERGON_LIMIT_WALKED_ENTRIES"):
        ParquetSource(f"{tmp_path}/**/**/*.parquet")
    monkeypatch.delenv("ENERGON_LIMIT_WALKED_ENTRIES")
    monkeypatch.setenv("ENERGON_LIMIT_WALKED_SECONDS", "0")
    with pytest.raises(StorageError, match="ENERGON_LIMIT_WALKED_SECONDS"):
        list(walk_files(str(tmp_path)))


def test_unreadable_folders_are_left_out_with_a_warning(tmp_path, monkeypatch, caplog):
    tree(tmp_path, "0.tar", "lost+found/1.tar")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert [name for name, _ in walk_files(str(tmp_path))] == ["0.tar"]
    assert caplog.messages == [f"{tmp_path}/lost+found: left out: Permission denied"]


def test_packing_and_reading_skip_the_same_hidden_files(tmp_path):
    hidden = (".ipynb_checkpoints/0.jpg", ".git/1.jpg", "dog/.Trash/2.jpg", "cat/.thumb.jpg")
    source = tree(tmp_path / "in", "cat/0.jpg", "dog/1.jpg", *hidden)
    media = MediaFiles(str(source))
    assert media.keys == ["cat/0", "dog/1"]
    assert media.classes == {"cat": 0, "dog": 1}
    result = run("pack", source, tmp_path / "out", "--label-from", "folder")
    assert result.exit_code == 0
    assert "2 samples in 1 shard" in result.stderr
    assert "labels: 0 cat, 1 dog" in result.stderr


def test_hidden_shards_are_not_prepared(tmp_path):
    for name in ("0.tar", ".ipynb_checkpoints/0.tar", "._0.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_shard(tmp_path / name, [("a", {"txt": b"x"})])
    result = run("prepare", tmp_path, "--split-ratio", "1", "--sample-type", "CrudeWebdataset")
    assert result.exit_code == 0
    assert "1 sample" in result.stderr + result.stdout
