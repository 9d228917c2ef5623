"""Several loops over training data that are not repeated: each is another pass over all of it."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon import (
    DefaultTaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon.errors import StateError
from energon.loader.relane import relane
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe
from tests.datasets import make_crude
from tests.effort import mixed

SIZES = {"a": 23, "b": 9}


class Draws(DefaultTaskEncoder):
    """Batches of keys, each with a number that was drawn for the sample."""

    decoder = None

    @stateless(restore_seeds=True)
    def encode_sample(self, sample):
        return {**sample, "drawn": int(np.random.randint(1 << 30))}

    def batch(self, samples):
        return [
            (sample["__key__"], sample["drawn"], sample["__restore_key__"]) for sample in samples
        ]


class Numbers(Draws):
    """Tells the numbers of samples, which `restore_sample` repeats."""

    def encode_sample(self, sample):
        return {**sample, "drawn": self.current_sample_index}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("passes")
    for name, size in SIZES.items():
        make_crude(root / name, [size - 5, 5], prefix=name)
    return root


def documents(folder):
    a, b = ({"path": str(folder / name)} for name in SIZES)
    return {
        "one": str(folder / "a"),
        "epochized": {"blend_epochized": [a, {**b, "repetitions": 1.5}]},
        "limited": {"blend": [{**a, "max_epochs": 1}, {**b, "max_epochs": 2}]},
    }


def loaders(
    document, *, world_size=1, num_workers=0, lanes=4, encoder=None, getter=None, **options
):
    if isinstance(document, dict):
        document = {"splits": {"train": document}}
    if getter is None:
        getter, options = get_train_dataset, {"repeat": False, **options}
    return [
        get_savable_loader(
            getter(
                document,
                worker_config=WorkerConfig(
                    rank=rank, world_size=world_size, num_workers=num_workers, lanes=lanes
                ),
                batch_size=2,
                task_encoder=encoder or Draws(),
                **options,
            )
        )
        for rank in range(world_size)
    ]


def loop(ranks):
    """What a loop on each rank yields, in the order of the run."""
    found = [list(loader) for loader in ranks]
    longest = max(map(len, found))
    return [each[n] for n in range(longest) for each in found if n < len(each)]


def parts(batches, number):
    return [sample[number] for batch in batches for sample in batch]


@pytest.mark.parametrize("kind", ["one", "epochized", "limited"])
def test_each_loop_has_all_samples_in_an_order_of_its_own(folder, kind):
    document = documents(folder)[kind]
    passes = [*map(loop, 3 * [loaders(document)])]
    keys = [parts(each, 0) for each in passes]
    counts = {"one": (23, 0), "epochized": (23, 14), "limited": (23, 18)}[kind]
    for each in keys:
        assert tuple(sum(key[0] == name for key in each) for name in SIZES) == counts
        assert len({key for key in each if key[0] == "a"}) == 23
    assert len(set(map(tuple, keys))) == 3
    # What hooks draw differs as well, and each sample of the run has a key of its own.
    assert not set(parts(passes[0], 1)) & set(parts(passes[1], 1))
    assert len({key for each in passes for key in parts(each, 2)}) == 3 * len(keys[0])


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 2), (2, 0), (4, 0)])
def test_the_order_of_every_loop_is_that_of_the_run(folder, world_size, num_workers):
    for document in documents(folder).values():
        expected = [*map(loop, 2 * [loaders(document)])]
        ranks = loaders(document, world_size=world_size, num_workers=num_workers)
        found = [loop(ranks), loop(ranks)]
        for loader in ranks:
            loader.close()
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "count"), mixed([(1, 0), (1, 1), (2, 0), (4, 0)], [0, 4, 99]))
def test_a_state_tells_which_pass_it_is(folder, topology, count):
    world_size, num_workers = topology
    for document in documents(folder).values():
        (loader,) = loaders(document)
        first = loop([loader])
        if count:
            list(islice(loader, count))
        state = json.loads(json.dumps(loader.save_state_rank()))
        assert state["fingerprint"].get("pass", 0) == min(count, 1)
        rest = [loop([loader]), loop([loader])]
        ranks = loaders(document, world_size=world_size, num_workers=num_workers)
        for each in ranks:
            each.restore_state_global(state)
        found = [loop(ranks), loop(ranks)]
        for each in ranks:
            each.close()
        assert found == rest
        assert not any(batch in first for each in found for batch in each)


def test_a_pass_keeps_its_samples_when_the_number_of_lanes_changes(folder):
    (loader,) = loaders(str(folder / "a"))
    loop([loader])
    begun = [*islice(loader, 4)]
    relaned = relane(loader.save_state_rank(), 3)
    (other,) = loaders(str(folder / "a"), lanes=None)
    other.restore_state_rank(relaned.state)
    rest = [*other]
    assert sorted(parts(begun + rest, 2)) == [(0, 1, n) for n in range(23)]
    assert {key[1] for key in parts([*other], 2)} == {2}


def test_loops_over_validation_data_are_alike(folder):
    (loader,) = loaders(str(folder / "a"), getter=get_val_dataset)
    assert loop([loader]) == loop([loader])
    assert "pass" not in loader.save_state_rank()["fingerprint"]


@pytest.mark.parametrize("kind", ["one", "epochized", "limited"])
def test_samples_of_every_pass_are_restored_with_their_numbers(folder, kind):
    (loader,) = loaders(documents(folder)[kind], encoder=Numbers())
    passes = [loop([loader]) for _ in range(3)]
    for batches in passes[::-1]:
        for _, number, key in [sample for batch in batches[::3] for sample in batch]:
            assert loader.restore_sample(key)["drawn"] == number
        numbers = parts(batches, 1)
        assert len({*numbers}) == len(numbers) > max(numbers) - 3, "lanes may end unevenly"


def test_a_damaged_number_of_a_pass_is_refused(folder):
    (loader,) = loaders(str(folder / "a"))
    state = loader.save_state_rank()
    for value in (-1, "1", 1.5, 1 << 70):
        state["fingerprint"]["pass"] = value
        with pytest.raises(StateError, match="damaged"):
            loaders(str(folder / "a"))[0].restore_state_rank(state)


@given(
    shapes=st.lists(
        st.tuples(
            st.integers(1, 40), st.sampled_from([0.5, 1, 2.5]), st.sampled_from([None, 1, 3])
        ),
        min_size=1,
        max_size=3,
    ),
    lanes=st.integers(1, 6),
    pass_number=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_rows_of_every_pass_are_found_again(shapes, lanes, pass_number):
    leaves = tuple(
        PlanLeaf(str(i), n, repetitions=r, shuffle_over_epochs=m)
        for i, (n, r, m) in enumerate(shapes)
    )
    recipe = PlanRecipe("epochized", leaves, 1, repeat=False, pass_number=pass_number)
    assert (
        PlanRecipe.from_json(
            {
                **recipe.to_json(),
                "batch_size": 1,
                "leaves": {
                    leaf.uid: {
                        "samples": leaf.num_samples,
                        "repetitions": leaf.repetitions,
                        "slice": [leaf.slice_samples, leaf.parallel_slices],
                        "shuffle_over_epochs": leaf.shuffle_over_epochs,
                    }
                    for leaf in leaves
                },
            }
        )
        == recipe
    )
    plan, seen = recipe(lanes), set()
    for lane in range(lanes):
        rows = plan.rows(lane, 0, 1000)
        for row, sample in enumerate(zip(*(column.tolist() for column in rows), strict=True)):
            assert plan.find(*sample) == (lane, row)
            seen.add(sample)
    assert len(seen) == sum(max(1, round(n * r)) for n, r, _ in shapes)
    others = PlanRecipe("epochized", leaves, 1, repeat=False, pass_number=pass_number + 1)(lanes)
    for lane in range(lanes):
        columns = (column.tolist() for column in others.rows(lane, 0, 1000))
        assert not seen & set(zip(*columns, strict=True))
