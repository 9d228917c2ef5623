from __future__ import annotations

import os
import pickle

import pytest
from click.testing import CliRunner

from energon.cli.main import main
from energon.errors import DatasetNotFoundError
from energon.inspect.lint import lint_dataset
from energon.io.files import write_bytes
from energon.prepare.engines import Engine
from energon.prepare.media import MediaFilter, prepare_media
from tests.datasets import jpeg

ALONE = Engine(num_workers=1)


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return os.abort, ()


FILES = {
    "a/whole.jpg": jpeg(0),
    "a/torn.jpg": jpeg(1)[:300],
    "b.json": b"{}",
    "c.json": b"{",
    "note.txt": b"text",
    "other": b"\0",
    "pickled.pkl": pickle.dumps(Deadly()),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files/a").mkdir(parents=True)
    for name, content in FILES.items():
        (tmp_path / "files" / name).write_bytes(content)
    return tmp_path / "files"


def failing(report):
    return [(each.key, each.reason.partition(":")[0]) for each in report.findings]


def test_files_of_a_folder_are_decoded(folder):
    report = lint_dataset(f"filesystem://{folder}", engine=ALONE)
    assert failing(report) == [("a/torn.jpg", "a/torn.jpg"), ("c.json", "c.json")]
    assert report.num_samples == {"files": 7}
    assert report.unchecked == {"pkl": 1}


def test_a_file_that_kills_the_process_is_found(folder, monkeypatch):
    monkeypatch.setenv("ENERGON_ALLOW", "pickle")
    report = lint_dataset(f"filesystem://{folder}", engine=ALONE)
    assert [key for key, _ in failing(report)] == ["a/torn.jpg", "c.json", "pickled.pkl"]
    assert "died" in report.findings[-1].reason
    assert report.num_samples == {"files": 7}


def test_a_folder_with_media_metadata_needs_no_prefix(folder):
    prepare_media(folder, MediaFilter("EXTENSION"), engine=ALONE)
    result = CliRunner().invoke(main, ["lint", str(folder), "--num-workers", "1"])
    assert result.exit_code == 1
    assert "7 files: 2 problems" in result.output


def test_some_files_of_a_distant_folder_are_decoded(s3):
    for name, content in FILES.items():
        write_bytes(f"{s3.address}/files/{name}", content)
    report = lint_dataset(f"filesystem+{s3.address}/files", engine=ALONE, max_samples=4)
    assert set(failing(report)) == {("a/torn.jpg", "a/torn.jpg"), ("c.json", "c.json")}
    assert report.num_samples == {"files": 4}


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="nowhere"):
        lint_dataset(f"filesystem://{tmp_path}/nowhere", engine=ALONE)
