from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from energon import SampleDecoder, WorkerConfig, get_loader, get_train_dataset, get_val_dataset
from energon.samples.display import as_pixels, images_in, register_tables, sample_html
from energon.task_encoder.encoder import DefaultTaskEncoder
from tests.commands import run_python
from tests.datasets import make_captions, make_crude

INLINE = WorkerConfig(rank=0, world_size=1, num_workers=0)


def test_arrays_and_tensors_of_images_are_pixels():
    pixels = np.random.default_rng(0).integers(0, 255, (6, 5, 3), dtype=np.uint8)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    for value in (pixels, tensor, tensor.float() / 255, tensor.to(torch.bfloat16) / 255):
        found = as_pixels(value)
        assert found.shape == (6, 5, 3)
        assert np.abs(found.astype(int) - pixels).max() <= 2
    assert len(list(images_in(torch.stack([tensor, tensor])))) == 2
    assert len(list(images_in([tensor, pixels]))) == 2
    for value in (np.zeros(4, np.uint8), np.zeros((4, 4)), np.zeros((4, 4, 3), int), "text", None):
        assert as_pixels(value) is None


def test_samples_and_batches_are_tables_of_what_they_have(tmp_path):
    root = make_captions(tmp_path / "ds", [6])
    encoder = DefaultTaskEncoder()
    encoder.decoder = SampleDecoder(image_decode="torchrgb")
    train = get_train_dataset(root, worker_config=INLINE, batch_size=3, task_encoder=encoder)
    page = next(iter(train))._repr_html_()
    assert page.count("<img src=") == 3
    assert "Tensor (3, 3, 8, 12) torch.float32" in page
    assert re.findall(r"caption \d", page)
    assert str(root) in page
    assert "shards/000.tar" in page
    assert "tensor(" not in page
    sample = next(iter(get_val_dataset(root, worker_config=INLINE, batch_size=None)))
    assert "CaptioningSample" in sample._repr_html_()
    assert "shapes" not in train._repr_html_()
    assert "ds/train: 6 samples" in train._repr_html_()


def test_what_data_contain_stays_text(tmp_path):
    sample = next(
        iter(
            get_val_dataset(make_crude(tmp_path / "ds", [1]), worker_config=INLINE, batch_size=None)
        )
    )
    assert "text 0" in sample._repr_html_()
    page = sample_html("<b>", {"__key__": "<i>", "<u>": "<script>", "raw": b"\x00<s>"})
    assert not re.search("<(b|i|u|script|s)>", page.replace("<b>&lt;b&gt;</b>", ""))


def test_a_notebook_shows_dicts_and_lists_of_samples_as_tables_and_all_others_as_before(tmp_path):
    formatter = pytest.importorskip("IPython.core.formatters").HTMLFormatter()
    register_tables(formatter)
    root = make_crude(tmp_path / "ds", [6])
    train = get_train_dataset(root, worker_config=INLINE, batch_size=3)
    batch = next(iter(train))
    assert type(batch) is dict
    assert "Batch of 3 samples" in formatter(batch)
    assert "000.tar" in formatter(batch)
    sample = next(iter(get_val_dataset(root, worker_config=INLINE, batch_size=None)))
    assert formatter(sample) == sample._repr_html_()
    assert formatter([sample] * 12).count("<table") == 8
    assert "and 4 more" in formatter([sample] * 12)
    for value in ({}, {"a": 1}, [], [1], [sample, 1], {"key": "a"}, [{"a": 1}]):
        assert formatter(value) is None

    class Own(dict):
        def _repr_html_(self):
            return self.get("html")

    assert formatter(Own(__key__="a", html="own")) == "own"
    assert formatter(Own(__key__="a")) is None
    # A function that the user has registered stays.
    chosen = type(formatter)()
    chosen.for_type(dict, lambda value: "chosen")
    register_tables(chosen)
    assert chosen(batch) == "chosen"


@pytest.mark.slow
def test_the_notebook_of_this_process_is_the_one_that_shows_tables(tmp_path):
    program = f"""
from IPython.core.interactiveshell import InteractiveShell
from energon import WorkerConfig, get_train_dataset
from energon.webdataset import WebDataset

shell = InteractiveShell.instance()
root = {str(make_crude(tmp_path / "ds", [2]))!r}
shown, _ = shell.display_formatter.format(list(WebDataset(f"{{root}}/000.tar", shardshuffle=False)))
print(shown["text/html"].count("<b>Sample</b>"))
shell.display_formatter.formatters["text/html"].type_printers.clear()
config = WorkerConfig(rank=0, world_size=1, num_workers=0)
train = get_train_dataset(root, worker_config=config, batch_size=2)
shown, _ = shell.display_formatter.format(next(iter(train)))
print(shown["text/html"].count("<b>Batch of 2 samples</b>"))
"""
    pytest.importorskip("IPython")
    assert run_python(program, IPYTHONDIR=str(tmp_path / "ipython")).stdout == "2\n1\n"


def test_a_notebook_shows_what_hooks_return_as_tables(tmp_path, monkeypatch):
    formatters = pytest.importorskip("IPython.core.formatters")
    shell = SimpleNamespace(display_formatter=formatters.DisplayFormatter())
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)

    class Pair(NamedTuple):
        images: np.ndarray
        label: int

    class Encoder(DefaultTaskEncoder):
        def encode_batch(self, batch):
            images = np.zeros((2, 4, 4, 3), np.uint8)
            return [{"images": images, "n": 1}, [images, 1], Pair(images, 1)][self.form]

    root = make_crude(tmp_path / "ds", [6])
    formatter = shell.display_formatter.formatters["text/html"]
    for form in range(3):
        encoder = Encoder()
        encoder.form = form
        train = get_train_dataset(root, worker_config=INLINE, batch_size=2, task_encoder=encoder)
        with get_loader(train) as loader:
            assert "verdict" not in formatter(loader)
            for batch in (next(iter(loader)), next(iter(train))):
                assert type(batch) in (dict, list, Pair)
                assert formatter(batch).count("<img") == 2
                assert "ndarray (2, 4, 4, 3) uint8" in formatter(batch)
                assert ("images" in formatter(batch)) == (form != 1)
                assert formatter(copy.copy(batch)) is None
            assert "<td" in formatter(loader)
            assert "verdict" in formatter(loader)
            assert "ds/train: 6 samples" in formatter(loader)
