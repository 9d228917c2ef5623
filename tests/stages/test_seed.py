from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from energon.errors import SkipSample
from energon.stages.batch import BatchDataset
from energon.stages.hooks import random_state
from energon.stages.hooks.hook import Hook
from energon.stages.lane import Lane
from energon.stages.map import MapDataset
from energon.stages.seed import SeedDataset, may_draw
from tests.commands import run_python
from tests.stages.hooks import ids
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
"""The first sample for which something is drawn: long after it seemed that nothing ever is."""


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


def made(dataset, *, draws=None):
    """All batches, as a worker makes them that knows whether something draws."""
    lane = Lane(0, 1, seed=5)
    lane.host.draws = draws
    return list(dataset.open(lane))


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("restore_seeds", [False, True])
@pytest.mark.parametrize("start", [0, LATE])
def test_what_is_drawn_is_the_same_whether_or_not_drawing_was_expected(
    draw, start, restore_seeds, batched
):
    dataset = drawing(draw, start=start, batched=batched, restore_seeds=restore_seeds)
    expected = made(dataset, draws=True)
    assert made(dataset) == expected
    assert made(dataset, draws=False) == expected
    before = states()
    assert made(dataset) == expected
    assert states() == before


def test_what_is_drawn_late_is_the_same_after_any_restore(draw):
    dataset = drawing(draw, start=LATE, batched=True)
    expected = made(dataset, draws=True)
    for taken in range(len(expected)):
        batches = dataset.open(Lane(0, 1, seed=5))
        for _ in range(taken):
            next(batches)
        state = json.loads(json.dumps(batches.state_dict()))
        assert list(dataset.open(Lane(0, 1, seed=5), state)) == expected[taken:]


def test_the_program_goes_on_with_its_own_numbers(draw):
    expected = [draw() for _ in range(3)]
    for start in (0, LATE, 100):
        batches = drawing(lambda: random.random() + np.random.randn(), start=start).open(Lane(0, 1))
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        expected = [draw() for _ in range(15)]
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        found = []
        for _ in range(15):
            next(batches)
            found.append(draw())
        assert found == expected


def test_hooks_that_draw_nothing_are_called_once_and_leave_all_as_it_is():
    calls = []
    lane = Lane(0, 1)
    hook = Hook("note", lambda sample: calls.append(sample["n"]) or sample, restore_seeds=True)
    dataset = SeedDataset(BatchDataset(MapDataset(numbers(40), ((hook,),)), 4))
    before = states()
    assert [n for batch in dataset.open(lane) for n in ids(batch)] == list(range(40))
    assert calls == list(range(40))
    assert states() == before
    assert lane.host.draws is False


def test_failures_between_calls_that_are_seeded_leave_the_numbers_of_the_program():
    def fail(sample):
        if sample["n"] % 9 == 8:
            raise ValueError(sample["n"])
        return sample

    hook = Hook("fail", fail, restore_seeds=True, handler=lambda *_: None)
    batches = SeedDataset(BatchDataset(MapDataset(numbers(60), ((hook,),)), 4)).open(Lane(0, 1))
    before = states()
    for _ in batches:
        assert states() == before


def test_a_batch_that_is_made_again_counts_its_samples_and_failures_once():
    failures = []

    def fail_and_draw(sample):
        if sample["n"] % 7 == 0:
            raise ValueError(sample["n"])
        if sample["n"] % 5 == 0:
            raise SkipSample
        return {**sample, "x": random.random() if sample["n"] in (LATE, LATE + 6) else None}

    def dataset():
        hook = Hook(
            "fail_and_draw",
            fail_and_draw,
            handler=lambda error, sample, sources: failures.append(sample["n"]),
        )
        return SeedDataset(BatchDataset(MapDataset(numbers(60), ((hook,),)), 4))

    lanes = [Lane(0, 1, seed=5), Lane(0, 1, seed=5)]
    lanes[0].host.draws = True
    expected, found = (list(dataset().open(lane)) for lane in lanes)
    assert found == expected
    assert lanes[0].counts == lanes[1].counts
    assert failures == list(range(0, 60, 7)) * 2


def test_what_a_seeded_failure_depends_on_is_drawn_first():
    def fail_by_chance(sample):
        if sample["n"] >= LATE and random.random() < 0.5:
            raise ValueError("by chance")
        return sample

    failures = []
    hook = Hook(
        "fail_by_chance",
        fail_by_chance,
        handler=lambda error, sample, sources: failures.append(sample["n"]),
    )
    dataset = SeedDataset(BatchDataset(MapDataset(numbers(60), ((hook,),)), 4))
    expected = made(dataset, draws=True)
    first, failures[:] = list(failures), []
    assert made(dataset) == expected
    assert failures == first
    assert first


@pytest.mark.parametrize("is_known", [True, False])
def test_drawing_the_normal_number_that_numpy_keeps_is_noticed(is_known, monkeypatch):
    """It is given without a change of the words that numpy's generator holds."""
    if not is_known:  # where the number is, as on an interpreter that is not CPython
        hide(monkeypatch, "numpy")
    dataset = drawing(np.random.randn, start=LATE)
    expected = made(dataset, draws=True)
    lane = Lane(0, 1, seed=5)
    found = []
    for batch in dataset.open(lane):
        found.append(batch)
        np.random.seed(3)
        np.random.randn()
    assert found == expected


def test_the_normal_number_that_numpy_keeps_is_put_back():
    dataset = drawing(np.random.randn, start=LATE)
    np.random.seed(3)
    expected = np.random.randn(4).tolist()
    np.random.seed(3)
    found = [np.random.randn()]
    list(dataset.open(Lane(0, 1, seed=5)))
    found += np.random.randn(3).tolist()
    assert found == expected


def test_hooks_that_draw_nothing_are_not_seeded_while_numpy_keeps_a_normal_number(monkeypatch):
    lane = Lane(0, 1, seed=5)
    batches = drawing(lambda: 0).open(lane)
    next(batches)
    np.random.seed(3)
    np.random.randn()
    monkeypatch.setattr(random_state, "_seed", lambda seed: pytest.fail("seeded"))
    next(batches)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: [random.random() for _ in range(312)][-1],
        lambda: np.random.rand(312)[-1],
        lambda: float(torch.rand(624)[-1]),
    ],
    ids=["random", "numpy", "torch"],
)
def test_draws_that_replace_all_words_and_return_to_the_same_index_are_noticed(draw):
    dataset = drawing(draw, start=LATE)
    assert made(dataset) == made(dataset, draws=True)


@pytest.mark.slow
def test_a_hook_that_imports_torch_has_not_drawn():
    program = """
import sys
from energon.stages.batch import BatchDataset
from energon.stages.hooks.hook import Hook
from energon.stages.map import MapDataset
from energon.stages.seed import SeedDataset, may_draw
from energon.stages.lane import Lane
from tests.stages.numbers import numbers
calls = []
def hook(sample):
    calls.append(sample["n"])
    import torch
    return sample
dataset = SeedDataset(BatchDataset(MapDataset(numbers(8), ((Hook("hook", hook),),)), 4))
assert "torch" not in sys.modules
list(dataset.open(Lane(0, 1)))
assert calls == list(range(8)), calls
"""
    run_python(program)


@pytest.mark.parametrize("start", [0, LATE])
def test_draws_are_noticed_where_states_are_not_found_in_memory(draw, start, monkeypatch):
    dataset = drawing(draw, start=start)
    expected = made(dataset, draws=True)
    hide(monkeypatch, "python", "numpy", "torch")
    before = states()
    assert made(dataset) == made(dataset, draws=True) == expected
    assert states() == before


def hide(monkeypatch, *names):
    """Let the memory of some generators not be found."""
    finders = {"numpy": "_find_numpy_kept", "torch": "_find_torch_memory"}
    for name in set(names) - {"python"}:
        monkeypatch.setattr(random_state, finders[name], lambda *_: None)
    if "python" in names:
        monkeypatch.setattr(random_state, "_python_memory", None)
    monkeypatch.setattr(random_state, "_generators", None)
    monkeypatch.setattr(random_state._thread, "mark", None)


@pytest.mark.slow
@pytest.mark.parametrize("restore_seeds", [False, True])
def test_a_single_draw_in_a_thousand_samples_is_the_same_wherever_it_is_made(draw, restore_seeds):
    def draw_once(sample):
        return {**sample, "x": draw() if sample["n"] == 700 else None}

    def drawn(lanes, *, draws=None):
        hook = Hook("draw_once", draw_once, restore_seeds=restore_seeds)
        dataset = SeedDataset(BatchDataset(MapDataset(numbers(1000), ((hook,),)), 4))
        lane = Lane(700 % lanes, lanes, seed=5)
        lane.host.draws = draws
        (found,) = [s["x"] for batch in dataset.open(lane) for s in batch if s["x"] is not None]
        return found

    before = states()
    assert drawn(1) == drawn(1, draws=True)
    assert drawn(5) == drawn(5, draws=True)
    if restore_seeds:  # the seed of a call depends on its sample, instead of on the lane
        assert drawn(5) == drawn(1)
    assert states() == before


@pytest.mark.slow
def test_hooks_that_seed_generators_by_themselves_yield_what_they_would_alone(draw):
    def seed_and_draw(sample):
        if sample["n"] >= LATE:
            random.seed(sample["n"])
            np.random.seed(sample["n"])
            torch.manual_seed(sample["n"])
            return {**sample, "x": draw()}
        return sample

    hook = Hook("seed_and_draw", seed_and_draw)
    before = states()
    batches = made(SeedDataset(BatchDataset(MapDataset(numbers(60), ((hook,),)), 4)))
    assert states() == before
    expected = [seed_and_draw({"n": n}).get("x") for n in range(60)]
    assert [sample.get("x") for batch in batches for sample in batch] == expected


def test_draws_are_noticed_after_the_program_has_replaced_the_generator_of_numpy():
    replaced = np.random.get_bit_generator()
    dataset = drawing(np.random.rand, start=LATE)
    expected = made(dataset, draws=True)
    found = []
    try:
        for batch in dataset.open(Lane(0, 1, seed=5)):
            found.append(batch)
            np.random.set_bit_generator(np.random.MT19937(len(found)))
    finally:
        np.random.set_bit_generator(replaced)
    assert found == expected


def test_draws_are_noticed_even_if_nothing_in_the_state_of_torch_tells():
    """Bytes that happen to change when the state is set are no help after the first time."""
    for _ in range(5):
        watch = random_state.DrawWatch()
        draw_from_fork()
        assert watch.check()


def test_code_that_names_nothing_cannot_draw():
    assert not may_draw(lambda samples: samples)
    assert not may_draw(lambda samples: [sample["txt"] for sample in samples])
    assert may_draw(lambda samples: [random.random() for _ in samples])
    assert may_draw(lambda samples: sorted(samples))
    assert may_draw(len)
