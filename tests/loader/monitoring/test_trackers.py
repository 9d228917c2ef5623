"""The lines of the documentation that send figures to Weights & Biases and TensorBoard.

They run as they are written, with stand-ins that check what the real ones accept.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.datasets import make_crude
from tests.loader.monitoring.test_verdict import Encoder, load

PAGE = Path(__file__).parents[3] / "docs/bottleneck.md"


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


def test_the_lines_of_the_documentation_send_all_figures(tmp_path):
    (text,) = re.findall(r"```python\n(wandb\.log.*?)```", PAGE.read_text(), re.DOTALL)
    wandb, writer = Tracker(), Tracker()
    with load(make_crude(tmp_path / "ds", [40]), Encoder(), workers=2, kind="thread") as loader:
        names = {f"data/{name}" for name in loader.stats(flat=True)}
        exec(text, {"wandb": wandb, "writer": writer, "loader": loader, "step": 3})
    assert set(wandb.rows) == set(writer.rows) == names
    assert wandb.rows["data/batches"] == 20


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_the_real_ones_take_them_where_they_are_installed(tmp_path, package, monkeypatch):
    pytest.importorskip(package)
    with load(make_crude(tmp_path / "ds", [40]), Encoder()) as loader:
        row = {f"data/{name}": value for name, value in loader.stats(flat=True).items()}
    if package == "wandb":
        import wandb

        monkeypatch.setenv("WANDB_MODE", "offline")
        run = wandb.init(dir=tmp_path)
        run.log(row, step=3)
        run.finish()
    else:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(tmp_path) as writer:
            for name, value in row.items():
                writer.add_scalar(name, value, 3)
        assert list(tmp_path.glob("events*"))
