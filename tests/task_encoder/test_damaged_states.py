"""A state that someone has edited, or that was damaged, is refused by name or does no harm."""

from __future__ import annotations

import copy
import json
import math
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon.errors import StateError
from tests.datasets import make_crude
from tests.effort import some

ODD = [
    None,
    -1,
    0,
    1,
    1 << 40,
    (1 << 53) - 1,
    (1 << 63) - 1,
    1 << 70,
    "x",
    "",
    [],
    {},
    1.5,
    math.nan,
    True,
    [None],
    [-3],
    {"a": 1},
]


class Packs(DefaultTaskEncoder):
    """Packs, so that states have something of every kind in them."""

    decoder = None

    def select_samples_to_pack(self, samples):
        return [samples[at : at + 3] for at in range(0, len(samples), 3)]

    def pack_selected_samples(self, samples):
        return [sample["__key__"] for sample in samples]

    def batch(self, samples):
        return samples


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("damaged") / "ds", [30, 20])


def open_loader(root):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=2)
    dataset = get_train_dataset(
        root,
        worker_config=config,
        batch_size=2,
        packing_buffer_size=7,
        shuffle_buffer_size=5,
        max_samples_per_sequence=4,
        task_encoder=Packs(),
    )
    return get_savable_loader(dataset)


@pytest.fixture(scope="module")
def saved(root):
    loader = open_loader(root)
    for _ in zip(range(5), loader, strict=False):
        pass
    return loader.save_state_rank(), loader.state_dict()


def places(value, path=()):
    """Paths of all that is in a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else ()
    for name, each in items or (enumerate(value) if isinstance(value, list) else ()):
        yield from places(each, (*path, name))


def edited(draw, state):
    """`state` with one to three values deleted or replaced."""
    state = copy.deepcopy(state)
    for _ in range(draw(st.integers(1, 3))):
        present = list(places(state))
        if not present:
            break
        *path, last = draw(st.sampled_from(present))
        holder = state
        for name in path:
            holder = holder[name]
        if draw(st.booleans()):
            holder[last] = copy.deepcopy(draw(st.sampled_from(ODD)))
        else:
            del holder[last]
    return state


def go_on(root, state):
    """Continue from `state`, or refuse it."""
    loader = open_loader(root)
    with suppress(StateError):
        loader.load_state_dict(state)
        next(iter(loader))


@pytest.mark.slow
def test_any_single_edit_is_refused_or_harmless(root, saved):
    for state in saved:
        for *path, last in places(state):
            for odd in some((*ODD, ...), 8):
                changed = copy.deepcopy(state)
                holder = changed
                for name in path:
                    holder = holder[name]
                if odd is ...:
                    del holder[last]
                else:
                    holder[last] = copy.deepcopy(odd)
                go_on(root, changed)


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_edits_are_refused_or_harmless(root, saved, data):
    go_on(root, edited(data.draw, data.draw(st.sampled_from(saved))))


@given(st.data())
def test_json_that_is_no_state_is_refused(root, data):
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    )
    state = data.draw(json_values)
    with pytest.raises(StateError):
        open_loader(root).load_state_dict(state)


def inside(value, path):
    for name in path:
        value = value[name]
    return value


class Yields(DefaultTaskEncoder):
    """Yields two outputs for every sample, and two for every batch."""

    decoder = None

    def encode_sample(self, sample):
        yield sample["__key__"] + "a"
        yield sample["__key__"] + "b"

    def batch(self, samples):
        yield samples
        yield [*reversed(samples)]


@pytest.mark.parametrize("kind", ["samples", "batches"])
def test_a_number_of_outputs_that_nobody_has_waited_for_is_refused_at_once(root, kind, monkeypatch):
    monkeypatch.setenv("ENERGON_LIMIT_RESUMED_OUTPUTS", "10_000")
    encoder = Yields()
    if kind == "samples":
        encoder.batch = lambda samples: samples
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=1)

    def open_one():
        return get_savable_loader(
            get_train_dataset(root, worker_config=config, batch_size=3, task_encoder=encoder)
        )

    loader = open_one()
    whole = [next(batches) for batches in [iter(loader)] for _ in range(9)]
    loader = open_one()
    for _ in zip(range(4), loader, strict=False):
        pass
    saved = loader.save_state_rank()
    holder = next(
        holder
        for path in places(saved)
        if path[-1] == "given" and (holder := inside(saved, path[:-1]))["given"]
    )
    for many in ((1 << 53) - 1, 10_002):
        holder["given"] = many
        again = open_one()
        again.restore_state_rank(saved)
        with pytest.raises(StateError, match=r"outputs of a generator.*LIMIT_RESUMED_OUTPUTS"):
            next(iter(again))
    # More than there are is what happens if a hook has changed: it continues after them.
    holder["given"] = 10_000
    again = open_one()
    again.restore_state_rank(saved)
    assert len(next(iter(again))) == len(whole[0])


def test_flat_states_with_other_values_are_errors(root):
    flat = open_loader(root).state_dict()
    for wrong in (None, [], [1], {"batches": 1}, [{}, {}], "{}"):
        with pytest.raises(StateError, match="expected lane_0 to be a list of one dict"):
            open_loader(root).load_state_dict({**flat, "lane_0": wrong})


def test_more_lanes_than_anybody_has_are_refused_at_once(root, saved):
    state = json.loads(json.dumps(saved[0]))
    state["lanes"] = 10**15
    with pytest.raises(StateError, match="lanes"):
        open_loader(root).restore_state_global(state)
