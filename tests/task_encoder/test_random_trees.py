"""Random metadatasets, from YAML to delivered samples, against a slow and obvious reference."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from energon.inspect.planned_run import open_run
from energon.task_encoder.train_plan import TrainSettings
from tests.datasets import make_crude

SIZES = {"a": 12, "b": 7, "c": 20}
SAMPLES = 4000


class Leaves(DefaultTaskEncoder):
    decoder = None

    def encode_sample(self, sample):
        return sample["__subflavors__"]["leaf"], sample["__key__"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("trees")
    for name, size in SIZES.items():
        make_crude(root / name, [size // 2, size - size // 2], prefix=name)
    return root


# A node: ("leaf", dataset, subset) or (kind, [(number, node)]), each in place or in its own file.
SUBSETS = st.sampled_from([None, (0, 50), (50, 100), (25, 75)])
LEAF = st.tuples(st.just("leaf"), st.sampled_from([*SIZES]), SUBSETS)


def inside(kind, numbers, below):
    entries = st.lists(st.tuples(numbers, below, st.booleans()), min_size=1, max_size=3)
    return st.tuples(st.just(kind), entries, SUBSETS)


REPETITIONS = st.sampled_from([1, 2, 3])
LINES = st.recursive(
    LEAF,
    lambda below: (
        inside("blend_epochized", REPETITIONS, below) | inside("concat", st.just(1), below)
    ),
    max_leaves=4,
)
WEIGHTS = st.integers(1, 5)
BLENDS = st.recursive(LINES, lambda below: inside("blend", WEIGHTS, below), max_leaves=6)
KEYS = {"blend": "weight", "blend_epochized": "repetitions"}


def write(node, folder, name):
    """Return a node as it is written; leaves are told apart by their address in the tree."""
    kind, content, subset = node
    found = {}
    if kind == "leaf":
        found = {"path": str(folder / content), "subflavors": {"leaf": name}}
    else:
        found[kind] = []
        for number, (value, below, own_file) in enumerate(content):
            entry = write(below, folder, f"{name}.{number}")
            if own_file:
                path = folder / f"{name}.{number}.yaml"
                path.write_text(yaml.safe_dump({"splits": {"train": entry}}))
                entry = {"path": path.name}
            found[kind].append({**entry, **({KEYS[kind]: value} if kind in KEYS else {})})
    if subset is not None:
        found["subset"] = {"range": [f"{subset[0]}%", f"{subset[1]}%"]}
    return found


def expand(node, name="t", subsets=()):
    """Yield (share, lines), where lines are lists of (leaf, key) in one pass over a source."""
    kind, content, subset = node
    subsets = (*subsets, subset) if subset else subsets
    if kind == "blend":
        total = sum(weight for weight, _, _ in content)
        for number, (weight, below, _) in enumerate(content):
            for share, line in expand(below, f"{name}.{number}", subsets):
                yield share * Fraction(weight, total), line
    else:
        yield Fraction(1), [*pass_over(node, name, subsets[:-1] if subset else subsets)]


def pass_over(node, name, subsets):
    """Yield all samples of one pass over a leaf or a line, each as often as it comes."""
    kind, content, subset = node
    subsets = (*subsets, subset) if subset else subsets
    if kind == "leaf":
        low, high = Fraction(0), Fraction(1)
        for start, stop in reversed(subsets):
            width = high - low
            low, high = low + width * start / 100, low + width * stop / 100
        size = SIZES[content]
        for number in range(int(size * low), int(size * high)):
            yield name, f"{content}{number}"
    else:
        for number, (times, below, _) in enumerate(content):
            for _ in range(times if kind == "blend_epochized" else 1):
                yield from pass_over(below, f"{name}.{number}", subsets)


def deliver(document, **arguments):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=2)
    dataset = get_train_dataset(
        document, worker_config=config, batch_size=None, task_encoder=Leaves(), **arguments
    )
    return iter(get_loader(dataset))


def is_empty(node):
    return any(not line for _, line in expand(node)) or any(
        not [*pass_over(leaf, "t", subsets)] for leaf, subsets in leaves_of(node)
    )


def leaves_of(node, subsets=()):
    kind, content, subset = node
    if kind == "leaf":
        yield node, subsets
        return
    for _, below, _ in content:
        yield from leaves_of(below, (*subsets, subset) if subset else subsets)


SETTINGS = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)


@given(LINES.filter(lambda node: node[0] != "leaf" and not is_empty(node)))
@SETTINGS
def test_a_line_gives_each_sample_as_often_as_its_levels_say(folder, tree):
    path = folder / "tree.yaml"
    path.write_text(yaml.safe_dump({"splits": {"train": write(tree, folder, "t")}}))
    ((_, line),) = expand(tree)
    assert Counter(deliver(path, repeat=False)) == Counter(line)


@pytest.mark.slow
@given(
    BLENDS.filter(lambda node: node[0] == "blend" and not is_empty(node)),
)
@SETTINGS
def test_a_blend_gives_shares_and_epochs_of_its_sources(folder, tree):
    path = folder / "tree.yaml"
    path.write_text(yaml.safe_dump({"splits": {"train": write(tree, folder, "t")}}))
    samples = deliver(path)
    found = Counter(next(samples) for _ in range(SAMPLES))
    for share, line in expand(tree):
        once = Counter(line)
        drawn = sum(found[sample] for sample in once)
        # Shares of the pattern are within a hundredth; and a pass may have begun.
        assert abs(drawn - float(share) * SAMPLES) <= 0.01 * SAMPLES
        passes = drawn / len(line)
        for sample, times in once.items():
            assert int(passes - 1) * times <= found[sample] <= (int(passes) + 2) * times
    assert sum(found.values()) == SAMPLES


@given(BLENDS.filter(lambda node: node[0] == "blend" and not is_empty(node)))
@SETTINGS
def test_any_moment_of_any_tree_is_found_again(folder, tree):
    document = {"splits": {"train": write(tree, folder, "t")}}
    path = folder / "tree.yaml"
    path.write_text(yaml.safe_dump(document))
    workers = WorkerConfig(rank=0, world_size=2, num_workers=1)
    run = open_run(path, TrainSettings(batch_size=4), workers)
    for start in (0, 10**9):
        rows = run.plan.rows(1, start, 20)
        triples = zip(*(column.tolist() for column in rows), strict=True)
        for row, triple in enumerate(triples, start):
            assert run.plan.find(*triple) == (1, row)
