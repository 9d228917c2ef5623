from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from energon.errors import SkipSample
from energon.stages.batch import BatchDataset
from energon.stages.hooks.hook import Hook
from energon.stages.hooks.random_state import seeded
from energon.stages.lane import Lane
from energon.stages.map import MapDataset
from energon.stages.seed import SeedDataset
from tests.commands import run_python
from tests.stages.numbers import numbers


def draw_from_fork():
    """Draw a number from torch, and put its state back."""
    with torch.random.fork_rng():
        return float(torch.rand(1))


DRAWS = {
    "random": random.random,
    "random, a normal number": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy, a normal number": np.random.randn,
    "torch": lambda: float(torch.rand(1)),
    "torch, a normal number": lambda: float(torch.randn(1, dtype=torch.float64)),
    "torch, in fork_rng": draw_from_fork,
}
LATE = 23
"""The first sample for which something is drawn."""


@pytest.fixture(params=DRAWS)
def draw(request):
    return DRAWS[request.param]


def states():
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


def drawing(draw, *, start=0, batched=False, **settings):
    """Batches of four samples, of which those from `start` on have random numbers."""

    def jitter(sample):
        return {**sample, "x": draw() if sample["n"] >= start else None}

    def jitter_batch(samples):
        return [*samples, draw() if samples[0]["n"] >= start else None]

    per_sample = (Hook("jitter", jitter, **settings),)
    per_batch = (Hook("jitter_batch", jitter_batch, **settings),) if batched else ()
    return SeedDataset(BatchDataset(MapDataset(numbers(60), (per_sample,)), 4, per_batch))


def made(dataset):
    return list(dataset.open(Lane(0, 1, seed=5)))


@pytest.mark.parametrize("restore_seeds", [False, True])
def test_what_is_drawn_is_the_same_after_any_restore(draw, restore_seeds):
    dataset = drawing(draw, start=LATE, batched=True, restore_seeds=restore_seeds)
    expected = made(dataset)
    assert len({x for *_, x in expected[LATE // 4 + 1 :]}) == len(expected) - LATE // 4 - 1
    for taken in range(len(expected)):
        batches = dataset.open(Lane(0, 1, seed=5))
        for _ in range(taken):
            next(batches)
        state = json.loads(json.dumps(batches.state_dict()))
        assert list(dataset.open(Lane(0, 1, seed=5), state)) == expected[taken:]


@pytest.mark.parametrize("restore_seeds", [False, True])
@pytest.mark.parametrize("start", [0, LATE, 100])
def test_the_program_goes_on_with_its_own_numbers(draw, start, restore_seeds):
    def seed_all():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed_all()
    expected = [draw() for _ in range(15)]
    hooks = {"start": start, "restore_seeds": restore_seeds}
    batches = drawing(lambda: random.random() + np.random.randn(), **hooks).open(Lane(0, 1))
    seed_all()
    drawn = []
    for _ in range(15):
        next(batches)
        drawn.append(draw())
    assert drawn == expected


def test_the_normal_number_that_numpy_keeps_is_put_back():
    np.random.seed(3)
    expected = np.random.randn(4).tolist()
    np.random.seed(3)
    drawn = [np.random.randn()]
    made(drawing(np.random.randn))
    drawn += np.random.randn(3).tolist()
    assert drawn == expected


def test_hooks_are_called_once_whether_or_not_they_draw():
    calls = []

    def draw_late(sample):
        calls.append(sample["n"])
        return {**sample, "x": random.random() if sample["n"] == LATE else None}

    made(SeedDataset(BatchDataset(MapDataset(numbers(40), ((Hook("late", draw_late),),)), 4)))
    assert calls == list(range(40))


@pytest.mark.parametrize("error", [ValueError("by chance"), SkipSample()])
def test_failures_and_skips_leave_the_numbers_of_the_program(error):
    def fail(sample):
        if random.random() < 0.2:
            raise error
        return sample

    hook = Hook("fail", fail, restore_seeds=True, handler=lambda *_: None)
    batches = SeedDataset(BatchDataset(MapDataset(numbers(60), ((hook,),)), 4)).open(Lane(0, 1))
    before = states()
    assert 0 < sum(len(batch) for batch in batches if states() == before) < 60


@pytest.mark.parametrize("restore_seeds", [False, True])
def test_seeds_of_calls_depend_on_the_sample_and_those_of_batches_on_the_lane(draw, restore_seeds):
    def drawn(lanes):
        dataset = drawing(draw, restore_seeds=restore_seeds)
        batches = [b for v in range(lanes) for b in dataset.open(Lane(v, lanes, seed=5))]
        return {sample["n"]: sample["x"] for batch in batches for sample in batch}

    assert (drawn(3) == drawn(1)) == restore_seeds


def test_hooks_that_seed_generators_by_themselves_yield_what_they_would_alone(draw):
    def seed_and_draw(sample):
        random.seed(sample["n"])
        np.random.seed(sample["n"])
        torch.manual_seed(sample["n"])
        return {**sample, "x": draw()}

    before = states()
    hook = Hook("seed_and_draw", seed_and_draw)
    batches = made(SeedDataset(BatchDataset(MapDataset(numbers(60), ((hook,),)), 4)))
    assert states() == before
    expected = [seed_and_draw({"n": n})["x"] for n in range(60)]
    assert [sample["x"] for batch in batches for sample in batch] == expected


def test_threads_put_nothing_back_that_the_program_may_have_used_meanwhile():
    random.seed(1)
    before = random.random()
    random.seed(1)
    with ThreadPoolExecutor(1) as threads:
        inside = threads.submit(draw_seeded).result()
    assert inside == draw_seeded()
    assert random.random() != before


def draw_seeded():
    with seeded(5):
        return random.random(), np.random.rand(), np.random.randn()


DRAWS_IN_OWN_PROCESS = """
import random
import sys
import numpy as np
from energon.stages.hooks.random_state import own_process, seeded
own_process()
with seeded(7):
    inside = random.random(), np.random.rand()
with seeded(7):
    assert inside == (random.random(), np.random.rand())
assert "torch" not in sys.modules
"""


def test_blocks_are_seeded_in_a_process_of_its_own():
    run_python(DRAWS_IN_OWN_PROCESS)
