from __future__ import annotations

import pytest

from energon.errors import ConfigError, DatasetNotFoundError
from energon.metadataset.kind import dataset_kind
from tests.metadataset.folders import write


@pytest.mark.parametrize(
    ("file", "path", "kind"),
    [
        ("d/.nv-meta/.info.json", "d", "webdataset"),
        ("d/.nv-meta/.info.yaml", "d", "webdataset"),
        ("d.yaml/.nv-meta/.info.json", "d.yaml", "webdataset"),
        ("d/.nv-meta/index.sqlite", "d", "filesystem"),
        ("m.yaml", "m.yaml", "metadataset"),
        ("m.yml", "m.yml", "metadataset"),
        ("x.jsonl", "x.jsonl", "jsonl"),
    ],
)
def test_tells_kinds_apart(tmp_path, file, path, kind):
    write(tmp_path / file, "")
    assert dataset_kind(tmp_path / path) == kind


def test_a_folder_with_shards_and_index_is_a_webdataset(tmp_path):
    write(tmp_path / ".nv-meta/index.sqlite", "")
    write(tmp_path / ".nv-meta/.info.json", "{}")
    assert dataset_kind(str(tmp_path)) == "webdataset"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("folder", "{root}/folder has no .nv-meta/.info.json; run `energon prepare {root}/folder`"),
        ("a.tar", "{root}/a.tar is a file; wanted is the folder of a prepared dataset"),
        ("no/such.yaml", "{root}/no/such.yaml does not exist: no 'no' in {root}"),
        ("folder/gone", "{root}/folder/gone does not exist: no 'gone' in {root}/folder"),
    ],
)
def test_says_what_was_looked_for(tmp_path, path, message):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "a.tar", "")
    with pytest.raises(DatasetNotFoundError) as info:
        dataset_kind(tmp_path / path)
    assert str(info.value).startswith(message.format(root=tmp_path))


def test_a_bare_name_is_missing_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetNotFoundError, match=r"^gone does not exist: no 'gone' in \.$"):
        dataset_kind("gone")


def test_an_unknown_scheme_is_named():
    with pytest.raises(ConfigError, match="no store for nosuch://"):
        dataset_kind("nosuch://host/d")
