"""Random blends with schedules and limits, against a reference that goes from sample to sample.

The reference knows nothing of lanes, patterns or stages: at each position of the run it divides the
next sample among the sources by the weights of that moment, and looks who is used up.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, pairwise

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon.testing import check_resume
from tests.datasets import make_crude

SIZES = {"a": 12, "b": 7, "c": 20}
LANES = 4
BATCH = 3
ROUNDS = 15
SAMPLES = 900
MARKS = (60, 300, 900)


class Places(DefaultTaskEncoder):
    """Delivers the leaf, the epoch of it and the number of the sample."""

    decoder = None

    def batch(self, samples):
        return [
            (sample["__subflavors__"]["leaf"], *sample["__restore_key__"][1:]) for sample in samples
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixes")
    for name, size in SIZES.items():
        make_crude(root / name, [size // 2, size - size // 2], prefix=name)
    return root


# A node: ("leaf", dataset), ("line", [(repetitions, dataset)]) or
# ("blend", [(weight, max_epochs, node)], settings); a weight is a number or a list of points.
DATASETS = st.sampled_from([*SIZES])
LEAVES = st.tuples(st.just("leaf"), DATASETS)
LINES = st.tuples(
    st.just("line"),
    st.lists(
        st.tuples(st.sampled_from([0.5, 1, 1.5, 2]), DATASETS),
        min_size=1,
        max_size=2,
        unique_by=lambda entry: entry[1],
    ),
)
POINTS = st.lists(
    st.tuples(st.integers(1, SAMPLES), st.integers(0, 4), st.booleans()),
    max_size=2,
    unique_by=lambda point: point[0],
)
SCHEDULES = st.tuples(st.integers(0, 4), POINTS).map(
    lambda drawn: [(0, drawn[0], False), *sorted(drawn[1])]
)
WEIGHTS = st.integers(0, 5) | SCHEDULES.filter(lambda points: any(value for _, value, _ in points))
LIMITS = st.sampled_from([None, None, 1, 1.5, 4])


def blends(limits, weights=WEIGHTS, strategies=("all_exhausted", "first_exhausted")):
    settings_ = st.fixed_dictionaries(
        {},
        optional={
            "stopping_strategy": st.sampled_from(strategies),
            "schedule_unit": st.sampled_from(["samples", "batches", "rows"]),
        },
    )

    def blend(below):
        # The first weight is above 0 all the time, so that there is always something to draw.
        first = st.tuples(st.integers(1, 5), limits, below)
        others = st.lists(st.tuples(weights, limits, below), max_size=2)
        entries = st.tuples(first, others).map(lambda drawn: [drawn[0], *drawn[1]])
        return st.tuples(st.just("blend"), entries, settings_)

    return blend(st.recursive(LEAVES | LINES, blend, max_leaves=4))


def write(node, folder, name="t"):
    """Return a node as it is written; leaves are told apart by their address in the tree."""
    kind, content, *settings_ = node
    if kind == "leaf":
        return {"path": str(folder / content), "subflavors": {"leaf": name}}
    if kind == "line":
        return {
            "blend_epochized": [
                {**write(("leaf", dataset), folder, f"{name}.{n}"), "repetitions": times}
                for n, (times, dataset) in enumerate(content)
            ]
        }
    entries = []
    for number, (weight, limit, below) in enumerate(content):
        entry = write(below, folder, f"{name}.{number}")
        entry["weight"] = weight if isinstance(weight, int) else dict(map(written, weight))
        entries.append(entry | ({"max_epochs": limit} if limit else {}))
    return {"blend": entries, **settings_[0]}


def written(point):
    position, value, ramp = point
    return position, f"ramp to {value}" if ramp else value


def value_at(weight, position):
    """Return a weight at some position of its schedule."""
    if isinstance(weight, int):
        return weight
    found = weight[0][1]
    for (start, before, _), (stop, after, ramp) in pairwise(weight):
        if position >= stop:
            found = after
        elif ramp and position >= start:
            return before + (after - before) * (position - start) / (stop - start)
    return found


def sources(node, name="t", limit=None):
    """Yield the address, the samples of a pass and the limit of each source."""
    kind, content, *_ = node
    if kind == "blend":
        for number, (_, own, below) in enumerate(content):
            limits = [each for each in (limit, own) if each is not None]
            yield from sources(below, f"{name}.{number}", min(limits, default=None))
    else:
        yield name, pass_of(node), limit


def pass_of(node):
    kind, content = node
    if kind == "leaf":
        return SIZES[content]
    return sum(max(1, round(SIZES[dataset] * times)) for times, dataset in content)


def is_used_up(node, name, gone):
    kind, content, *settings_ = node
    if kind != "blend":
        return name in gone
    entries = [is_used_up(below, f"{name}.{n}", gone) for n, (*_, below) in enumerate(content)]
    first = settings_[0].get("stopping_strategy") == "first_exhausted"
    return any(entries) if first else all(entries)


def divide(node, name, whole, position, gone):
    """Return how a sample is divided among the sources below a node; nothing if there are none."""
    kind, content, *settings_ = node
    if is_used_up(node, name, gone):
        return {}
    if kind != "blend":
        return {name: whole}
    unit = settings_[0].get("schedule_unit", "samples")
    at = position / {"samples": 1, "batches": BATCH, "rows": LANES}[unit]
    weights = {n: value_at(weight, at) for n, (weight, _, _) in enumerate(content)}
    parts = {
        n: divide(below, f"{name}.{n}", 1.0, position, gone)
        for n, (_, _, below) in enumerate(content)
    }
    total = sum(weight for n, weight in weights.items() if parts[n])
    if not total:
        return {}
    return {
        source: whole * share * weights[n] / total
        for n, part in parts.items()
        for source, share in part.items()
    }


def reference(tree):
    """Yield what was drawn of each source before each position, until the run ends."""
    passes = {name: (size, limit) for name, size, limit in sources(tree)}
    quotas = {name: max(1, round(limit * size)) for name, (size, limit) in passes.items() if limit}
    drawn = dict.fromkeys(passes, 0.0)
    for position in range(SAMPLES + 1):
        yield dict(drawn)
        gone = {name for name, quota in quotas.items() if drawn[name] >= quota - 1e-6}
        shares = divide(tree, "t", 1, position, gone)
        if not shares:
            return
        for name, share in shares.items():
            drawn[name] += share


def train(document, *, rank=0, world_size=1, lanes=LANES):
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0, lanes=lanes)
    return get_train_dataset(
        document, worker_config=config, batch_size=BATCH, task_encoder=Places()
    )


def source_of(leaf, tree):
    return next(name for name, *_ in sources(tree) if leaf == name or leaf.startswith(f"{name}."))


SETTINGS = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# With first_exhausted, each lane ends for itself, which is much of so short a run.
@pytest.mark.slow
@given(blends(LIMITS, strategies=("all_exhausted",)))
@settings(SETTINGS, derandomize=True, max_examples=50)
def test_any_mix_draws_what_the_reference_draws(folder, tree):
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump({"splits": {"train": write(tree, folder)}}))
    wanted = [*reference(tree)]
    batches = islice(iter(get_savable_loader(train(path))), SAMPLES // BATCH)
    places = [place for batch in batches for place in batch]
    # No sample of an epoch comes twice, whatever happened.
    assert len(set(places)) == len(places)
    assert abs(len(places) - min(SAMPLES, len(wanted) - 1)) <= 0.02 * len(places) + 8 * LANES
    for mark in MARKS:
        found = Counter(source_of(leaf, tree) for leaf, *_ in places[:mark])
        expected = wanted[min(mark, len(wanted) - 1)]
        for name, count in expected.items():
            assert abs(found[name] - count) <= 0.02 * mark + 2 * LANES, (mark, found, expected)


@given(
    blends(
        st.sampled_from([0.5, 1, 2, 2.5]),
        st.integers(1, 5) | SCHEDULES.filter(lambda points: all(value for _, value, _ in points)),
        strategies=("all_exhausted",),
    )
)
@SETTINGS
def test_a_run_of_limits_draws_each_epoch_exactly(folder, tree):
    document = {"splits": {"train": write(tree, folder)}}
    places = [place for batch in get_savable_loader(train(document)) for place in batch]
    assert len(set(places)) == len(places)
    found = Counter(source_of(leaf, tree) for leaf, *_ in places)
    assert found == {name: max(1, round(limit * size)) for name, size, limit in sources(tree)}
    for name, size, limit in sources(tree):
        if name in {leaf for leaf, *_ in places}:  # a single dataset
            whole = Counter(epoch for leaf, epoch, _ in places if leaf == name)
            assert all(whole[epoch] == size for epoch in range(int(limit)))


@pytest.mark.slow
@given(blends(LIMITS), st.integers(0, 60))
@SETTINGS
def test_any_mix_resumes_on_any_topology(folder, tree, stop):
    document = {"splits": {"train": write(tree, folder)}}
    dataset = train(document)
    uninterrupted = get_savable_loader(dataset)
    whole = [*islice(iter(uninterrupted), ROUNDS * LANES)]
    loader = get_savable_loader(dataset)
    assert [*islice(iter(loader), stop)] == whole[:stop]
    state = json.loads(json.dumps(loader.save_state_rank()))
    next_pass = [*islice(iter(uninterrupted), ROUNDS * LANES)]
    # Ranks take turns until the first lane ends; behind that, some are through before others.
    ends = [dataset.num_batches(lane, LANES) for lane in range(LANES)]
    turns = LANES * min([ROUNDS, *(end for end in ends if end is not None)])
    for world_size in (1, 2, 4):
        found, rest = {}, []
        for rank in range(world_size):
            loader = get_savable_loader(train(document, rank=rank, world_size=world_size))
            loader.restore_state_global(state)
            batches = [*islice(iter(loader), ROUNDS * LANES)]
            numbers = (number for number in range(stop, turns) if number % world_size == rank)
            found |= dict(zip(numbers, batches, strict=False))
            rest += batches
        assert [found[number] for number in range(stop, turns)] == whole[stop:turns]
        if len(whole) < ROUNDS * LANES:
            # Once the last batch of a pass is delivered, the next loop is another pass.
            assert sorted(rest) == sorted(whole[stop:] if stop < len(whole) else next_pass)


@pytest.mark.slow
@given(blends(LIMITS))
@settings(SETTINGS, max_examples=10)
def test_any_mix_passes_the_check_that_all_stages_pass(folder, tree):
    check_resume(train({"splits": {"train": write(tree, folder)}}), limit=12)
