"""Training for long, with kills of workers, of the process that starts them and of the trainer.

The order of batches stays exact to the byte, and what a process holds stays flat.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from tests.datasets import make_crude
from tests.drills.trainer import digest, make_loader
from tests.waiting import descendants, wait_for_end, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")

ROOT = Path(__file__).parents[2]
SLACK = {"descriptors": 8, "shared": 16, "threads": 4, "memory_mb": 24}
"""By how much the median of the last third of a life may exceed that of the first.

Slots of shared memory come and go with what the trainer keeps, and the C library keeps freed
memory; what is lost with every kill or loader exceeds this within a minute.
"""
MIN_SAMPLES = 15


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blend")
    make_crude(folder / "a", [40, 3, 25], prefix="a")
    make_crude(folder / "b", [17], prefix="b")
    parts = [{"weight": 3, "path": "a"}, {"weight": 1, "path": "b"}]
    (folder / "blend.yaml").write_text(json.dumps({"splits": {"train": {"blend": parts}}}))
    return folder / "blend.yaml"


class Reference:
    """The order of batches, made in this process without any worker."""

    def __init__(self, path):
        self._batches = iter(make_loader(path, workers=0))
        self._digests = []

    def __getitem__(self, step):
        while len(self._digests) <= step:
            self._digests.append(digest(next(self._batches)))
        return self._digests[step]


@contextmanager
def trainer(path, folder, rng: random.Random, seconds, *, measurements=0):
    """Start a trainer, and see to it that nothing of it is left."""
    words = [path, folder, rng.random(), seconds, measurements]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.drills.trainer", *map(str, words)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            started = descendants(process.pid)
            process.kill()
    wait_for_end(started)


def live_and_be_killed(path, folder, rng: random.Random, seconds):
    """Train, and kill the trainer with SIGKILL while it starts, or some steps later."""
    steps = folder / "steps"
    before = steps.stat().st_size if steps.exists() else 0
    begins = rng.random() < 0.3
    with trainer(path, folder, rng, 3600) as process:
        while not begins and not (steps.exists() and steps.stat().st_size > before):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        time.sleep(rng.uniform(0, seconds))
        assert process.poll() is None, process.stderr.read()


def check_order(folder, reference, first_line):
    """Compare the batches that were written down since a line; return the number of lines."""
    lines = (folder / "steps").read_text().split("\n")[:-1]
    expected = None
    for line in lines[first_line:]:
        step, found = line.split(" ", 1)
        assert found == reference[int(step)], f"step {step}"
        assert expected is None or int(step) == expected
        expected = int(step) + 1
    return len(lines)


def check_flat(folder):
    """Compare what each life held late and early; return how many could be compared."""
    lives = defaultdict(list)
    for line in (folder / "holdings").read_text().split("\n")[:-1]:
        about = json.loads(line)
        lives[about["pid"]].append(about)
    compared = 0
    for measured in lives.values():
        if len(measured) < MIN_SAMPLES:
            continue
        compared += 1
        third = len(measured) // 3
        for name, slack in SLACK.items():
            early, late = (
                median(each[name] for each in some)
                for some in (measured[:third], measured[-third:])
            )
            assert late <= early + slack, (name, early, late, measured[-1])
    return compared


def kills_of(folder):
    """How many workers and trainers were killed, as far as the trainers have written that down."""
    last = {}
    for line in (folder / "holdings").read_text().split("\n")[:-1]:
        about = json.loads(line)
        last[about["pid"]] = about["kills"]
    return {"kills of workers": sum(last.values()), "trainers": len(last)}


def shared_names():
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "torch_"))}


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_soak_with_kills_keeps_the_order_and_what_it_holds(
    budget, blend, tmp_path, monkeypatch, method
):
    monkeypatch.setenv("ENERGON_START_METHOD", method)
    reference = Reference(blend)
    before = shared_names()
    line = 0
    for rng in budget.rounds(at_least=2):
        live_and_be_killed(blend, tmp_path, rng, min(max(budget.seconds / 4, 1), 60))
        if (tmp_path / "steps").exists():
            line = check_order(tmp_path, reference, line)
    rng = random.Random(budget.seed)
    with trainer(blend, tmp_path, rng, budget.seconds / 4, measurements=MIN_SAMPLES) as process:
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
    last = check_order(tmp_path, reference, line)
    assert last > line
    assert check_flat(tmp_path) > 0
    budget.done.update(batches=last, **kills_of(tmp_path))
    wait_until(lambda: shared_names() <= before)
