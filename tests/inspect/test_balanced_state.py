"""States of runs with balanced batches and planned packs: shown, and edited exactly."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from energon import Balance, SkipSample, StateError
from energon.inspect.encoded_run import EncodedRun
from energon.inspect.saved_run import open_saved_run
from energon.inspect.saved_state import change_mix, drawn_samples, leave_out, skip_steps
from energon.loader.state import merge_states
from tests.effort import some
from tests.test_balanced_documents import SETTINGS, Whole
from tests.test_balanced_order import Run, make_texts, write_blend
from tests.test_packed_order import Packing

REPEATING = Balance(cost="txt:bytes", window=2, skipped="repeat")
ALL_SETTINGS = {**SETTINGS, "repeating": {"balance": REPEATING}}
NAMES = some(list(SETTINGS), 2)


class Skipping(Whole):
    def encode_sample(self, sample):
        if sample["__key__"].endswith("7"):
            raise SkipSample
        return super().encode_sample(sample)


class SkippingPacks(Packing, Skipping):
    pass


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    root = tmp_path_factory.mktemp("states")
    make_texts(root / "a", [40, 25], "a")
    make_texts(root / "b", [20, 17], "b")
    write_blend(root / "blend.yaml", a=3, b=1)
    write_blend(root / "changed.yaml", a=1, b=3)
    return root / "blend.yaml"


class Saved(NamedTuple):
    """A run that was saved after some batches."""

    settings: dict
    before: list
    state: dict
    after: list

    def on(self, path, state, **settings):
        """The run continued from another state."""
        start = len(self.before)
        return Run(path, (1, 0), state=state, start=start, lanes=None, **self.settings, **settings)

    @property
    def encoder(self):
        return self.settings["encoder"]

    def opened(self, blend):
        return open_saved_run(self.state, path=blend, world_size=1, may_pack=True)


def saved_run(blend, name, *, count=20):
    encoder = SkippingPacks if "pack" in name else Skipping
    settings = {**ALL_SETTINGS[name], "encoder": encoder}
    with Run(blend, (1, 0), **settings) as run:
        before = run.take(count)
        state = merge_states(json.loads(json.dumps(run.save())))
        return Saved(settings, before, state, run.take(12))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "repeating"])
def test_hooks_make_the_batches_of_the_run_again(blend, name):
    saved = saved_run(blend, name)
    encoded = EncodedRun.of(saved.opened(blend), saved.encoder)
    for step, (keys, _) in enumerate(saved.before[:3] + saved.before[-1:]):
        assert encoded.batch(step if step < 3 else len(saved.before) - 1, 0)["__key__"] == keys
    for step, (keys, _) in enumerate(saved.after[:3], len(saved.before)):
        assert encoded.batch(step, 0)["__key__"] == keys


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_continues_behind_the_steps_that_it_skips(blend, name):
    saved = saved_run(blend, name)
    encoded = EncodedRun.of(saved.opened(blend), saved.encoder)
    edited = skip_steps(saved.state, 5, world_size=1, encoded=encoded)
    with saved.on(blend, edited.state) as run:
        assert run.take(7) == saved.after[5:]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_new_weights_in_a_state_are_those_of_a_restore(blend, name):
    saved, path = saved_run(blend, name), blend.parent / "changed.yaml"
    weights = {"a/train": 1.0, "b/train": 3.0}
    edited = change_mix(saved.state, weights=weights, positions={}).state
    with (
        saved.on(path, edited) as run,
        saved.on(path, saved.state, restore={"strict": ["mix"]}) as restored,
    ):
        assert run.take(40) == restored.take(40)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_left_out_wherever_its_window_has_it(blend, name):
    saved = saved_run(blend, name)
    edited = leave_out(saved.state, saved.opened(blend), ["a30"], epochs=300).state

    def without(keys):
        kept = [without(each) if isinstance(each, list) else each for each in keys]
        return [each for each in kept if each not in ("a30", [])]

    with saved.on(blend, edited) as run:
        assert [keys for keys, _ in run.take(12)] == [without(keys) for keys, _ in saved.after]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packs", "batch_cost"])
def test_drawn_samples_of_packs_are_about_those_of_its_window(blend, name):
    saved = saved_run(blend, name, count=96)
    flat = [key for keys, _ in saved.before for key in keys]
    drawn = sum(len(key) if isinstance(key, list) else 1 for key in flat)
    # A tenth of the samples is skipped, and steps have samples of different lengths.
    assert sum(drawn_samples(saved.state).values()) == pytest.approx(drawn / 0.9, rel=0.5)


def test_steps_of_packs_need_the_hooks_and_their_functions(blend, tmp_path):
    saved = saved_run(blend, "packs")
    with pytest.raises(StateError, match="samples are packed.*pass the --task-encoder"):
        skip_steps(saved.state, 3, world_size=1)
    with pytest.raises(StateError, match="pass the --task-encoder of the run"):
        open_saved_run(saved.state, path=blend, world_size=1)
