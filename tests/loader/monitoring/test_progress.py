from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from energon import DefaultTaskEncoder, SkipSample, WorkerConfig, get_savable_loader
from energon import get_train_dataset as train
from energon.loader.monitoring.monitor import with_progress
from tests.datasets import make_crude


class Choosing(DefaultTaskEncoder):
    decoder = None

    def encode_sample(self, sample):
        if sample["__key__"].endswith("3"):
            raise SkipSample("too short")
        return sample

    def batch(self, samples):
        return [sample["__key__"] for sample in samples]


@pytest.fixture
def loader(tmp_path):
    make_crude(tmp_path / "ds", [10, 10])
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=1)
    dataset = train(tmp_path / "ds", worker_config=config, batch_size=2, task_encoder=Choosing())
    with get_savable_loader(dataset) as loader:
        yield loader


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch):
    """Without it, rich draws nothing where the tests themselves run in a dumb one."""
    monkeypatch.setenv("TERM", "xterm-256color")


def batches(loader, console, count=12):
    return [batch for _, batch in zip(range(count), loader.progress(console), strict=False)]


def test_a_terminal_shows_where_the_run_is(loader):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    found = batches(loader, console)
    last = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue().split("\x1b[2K")[-1])
    assert last.startswith("12 batches · ")
    assert "samples/s · trainer waits" in last
    assert "samples skipped" in last
    epochs = loader.report()["datasets"]["ds/train"]["epochs"]
    assert f"{epochs:.2f}" in last
    # Watching changes nothing.
    loader.close()
    with get_savable_loader(loader.dataset) as plain:
        assert [batch for _, batch in zip(range(12), plain, strict=False)] == found


def test_a_dumb_terminal_gets_no_escapes(loader, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert len(batches(loader, console)) == 12
    assert "\x1b[2K" not in console.file.getvalue()


def test_a_cell_of_a_notebook_is_drawn_over(loader):
    pages = []

    def show(html):
        pages.append(html)
        return lambda html: pages.append(f"again: {html}")

    console = Console(file=io.StringIO(), force_jupyter=True)
    shown = with_progress(loader, console, show=show)
    assert len([batch for _, batch in zip(range(12), shown, strict=False)]) == 12
    shown.close()
    assert pages[0].startswith("<pre>1 batch ·")
    assert pages[-1].startswith("again: <pre>12 batches ·")
    assert "ds/train" in pages[-1]


def test_a_file_gets_the_batches_and_no_text(loader):
    console = Console(file=io.StringIO())
    assert len(batches(loader, console)) == 12
    assert console.file.getvalue() == ""


def test_the_display_is_left_when_the_loop_fails(loader):
    console = Console(file=io.StringIO(), force_terminal=True)
    shown = loader.progress(console)
    next(shown)
    with pytest.raises(ZeroDivisionError):
        shown.throw(ZeroDivisionError)
    # The cursor is shown again.
    assert console.file.getvalue().endswith("\x1b[?25h")
