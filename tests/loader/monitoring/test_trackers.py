"""The lines of the documentation that send figures to Weights & Biases and TensorBoard.

They run as they are written, with stand-ins that check what the real ones accept, and with the
real ones where these are installed, whose files are read back.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.datasets import make_crude
from tests.loader.monitoring.test_verdict import Encoder, load

PAGE = Path(__file__).parents[3] / "docs/operate.md"


class Tracker:
    """Takes what `wandb` and a `SummaryWriter` take: names, numbers and the step."""

    def __init__(self):
        self.rows = {}

    def log(self, row, step):
        for name, value in row.items():
            self.add_scalar(name, value, step)

    def add_scalar(self, name, value, step):
        assert isinstance(name, str)
        assert math.isfinite(value)
        assert isinstance(step, int)
        self.rows[name] = value


@pytest.fixture(scope="module")
def lines():
    (text,) = re.findall(r"```python\n(wandb\.log.*?)```", PAGE.read_text(), re.DOTALL)
    return text


def sent_by(lines, loader, *, steps=1, **trackers):
    """Run the lines after each of some batches; return what they sent, by step."""
    sent = {}

    class Recorded:
        def stats(self, *, flat):
            assert flat
            return sent.setdefault(step, loader.stats(flat=True))

    for step, _ in zip(range(3, 3 + steps), loader, strict=False):
        exec(lines, {**trackers, "loader": Recorded(), "step": step})
    return {
        step: {f"data/{name}": number for name, number in row.items()} for step, row in sent.items()
    }


def test_the_lines_of_the_documentation_send_all_figures(tmp_path, lines):
    wandb, writer = Tracker(), Tracker()
    with load(make_crude(tmp_path / "ds", [40]), Encoder(), workers=2, kind="thread") as loader:
        sent = sent_by(lines, loader, wandb=wandb, writer=writer)
    assert wandb.rows == writer.rows == sent[3]
    assert wandb.rows["data/batches"] == 21


class Nobody:
    """The other tracker."""

    def log(self, row, step):
        pass

    def add_scalar(self, name, value, step):
        pass


def wandb_records(path):
    """Yield the records of a run that was recorded offline: those of LevelDB's logs."""
    data, position, record = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while len(data) - position >= 7:
        if (left := -position % 32_768) < 7:
            position += left
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_weights_and_biases_has_what_was_sent(tmp_path, lines, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    with load(make_crude(tmp_path / "ds", [40]), Encoder()) as loader:
        run = wandb.init(dir=tmp_path)
        sent = sent_by(lines, loader, steps=3, wandb=wandb, writer=Nobody())
        run.finish()
    found = {}
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    for record in map(Record.FromString, wandb_records(path)):
        if record.HasField("history"):
            items = record.history.item
            row = {"/".join(each.nested_key) or each.key: each.value_json for each in items}
            found[record.history.step.num] = row
    assert set(found) == set(sent)
    for step, row in sent.items():
        assert {name: json.loads(found[step][name]) for name in row} == pytest.approx(row)


def test_tensorboard_has_what_was_sent(tmp_path, lines):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    loader = load(make_crude(tmp_path / "ds", [40]), Encoder())
    with loader, SummaryWriter(tmp_path / "events") as writer:
        sent = sent_by(lines, loader, steps=3, wandb=Nobody(), writer=writer)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    for step, row in sent.items():
        found = {
            name: event.value
            for name in events.Tags()["scalars"]
            for event in events.Scalars(name)
            if event.step == step
        }
        assert found == pytest.approx(row)  # as 32-bit floats
