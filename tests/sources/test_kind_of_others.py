"""A kind of dataset that another package adds: the one of the documentation, installed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from energon import SampleDecoder
from energon.sources.files.open import open_file_store
from energon.sources.files.store import DecodeFileStore
from energon.sources.open_tree import TreeOpener
from tests.commands import run
from tests.datasets import make_crude
from tests.kind_checks import check_kind
from tests.sources.test_every_kind import Contents, document, joined_with_shards

PAGE = Path(__file__).parents[2] / "docs/extend.md"
PACKAGE = {
    "METADATA": "Metadata-Version: 2.1\nName: npy-rows\nVersion: 1.0\n",
    "entry_points.txt": "[energon.dataset_kinds]\nnpy = npy_rows:ENTRY\n",
}


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """What a document says of a dataset of the kind, whose package is installed."""
    found = re.search(r"```python\n(# npy_rows\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    installed = tmp_path / "installed"
    (installed / "npy_rows-1.0.dist-info").mkdir(parents=True)
    (installed / "npy_rows.py").write_text(found[1])
    for name, content in PACKAGE.items():
        (installed / "npy_rows-1.0.dist-info" / name).write_text(content)
    monkeypatch.syspath_prepend(installed)
    np.save(tmp_path / "numbers.npy", np.arange(60).reshape(20, 3))
    return {"path": str(tmp_path / "numbers.npy")}


def test_every_command_takes_it(entry):
    for command, words in (
        (["info"], "- samples: 20\n- split train\n"),
        (["info", "--json"], '"kind": "npy"'),
        (["lint", "--num-workers", 1], "20 samples: no problems"),
        (["preview", "--count", 1], "CrudeSample '0'\n  row: "),
        (["plan"], "20 samples in 20 batches"),
        (["prepare"], "Done. Found 20 samples."),
    ):
        result = run(command[0], entry["path"], *command[1:])
        assert (result.exit_code, words in result.output) == (0, True), result.output
    for command in ("verify", "repair", "index"):
        result = run(command, entry["path"])
        assert (result.exit_code, "dataset without shards" in result.output) == (2, True)
    with pytest.raises(ValueError, match="is an array of samples, which cannot be shown as files"):
        TreeOpener().open(entry["path"])


def test_its_parts_are_auxiliary_data(entry):
    store = DecodeFileStore(open_file_store(entry["path"]), decoder=SampleDecoder())
    assert store.get("3.row").tolist() == store.get("3.row.npy").tolist() == [9, 10, 11]


@pytest.mark.slow  # many processes
@pytest.mark.parametrize("which", ["alone", "blended", "joined"])
def test_its_order_is_equal_on_all_topologies_and_after_any_restore(entry, tmp_path, which):
    if which == "blended":
        make_crude(tmp_path / "tars", [20, 15])
        entry = {"blend": [{"path": str(tmp_path / "tars"), "weight": 1}, {**entry, "weight": 2}]}
    elif which == "joined":
        entry, count = joined_with_shards(entry, tmp_path)
        assert count == 19
    path = document(tmp_path, entry)
    check_kind(path, encoder=Contents, num_batches=24, resumed=4)
