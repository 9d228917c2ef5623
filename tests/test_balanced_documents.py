"""Balanced batches and planned packs of all that a metadataset says: the same order everywhere."""

from __future__ import annotations

from functools import partial
from itertools import islice

import pytest

from energon import Balance, Cooker, PlannedPacks, Sample, basic_sample_keys, edataclass
from tests.effort import mixed, some
from tests.test_balanced_order import BALANCES, Encoder, Run, make_texts, resume_often
from tests.test_packed_order import Packing

KINDS = ["schedule", "limits", "join", "aux"]
NUM_BATCHES = 64
PACKS = PlannedPacks(length="txt:bytes", context=6000)
SETTINGS = {
    **{name: {"balance": balance} for name, balance in BALANCES.items()},
    "packs": {"balance": None, "pack": PACKS, "batch_size": 1},
    "packs of pools": {"balance": BALANCES["pools"], "pack": PACKS, "batch_size": 1},
    "batch_cost": {
        "balance": Balance(cost="txt:bytes", window=4),
        "batch_cost": 6000,
        "batch_size": None,
    },
}


@edataclass
class Pair(Sample):
    """Two texts of the same key."""

    left: dict
    right: dict | None

    @classmethod
    def from_joined(cls, left, right):
        return cls.derive_from(left, left=left, right=right)


def document(folder, name):
    """A document of some kind, about datasets whose samples share keys."""
    a, b, c = ({"path": str(folder / each)} for each in "abc")
    joiner = {"__module__": __name__, "__class__": "Pair"}
    join = {"join": {"left": a, "right": {**b, "nonmatch": "none"}}, "joiner": joiner}
    return {
        "schedule": [{**a, "weight": {0: 1, 90: 3, 400: "ramp to 0.2"}}, b],
        "limits": [{**a, "max_epochs": 6.5, "weight": 2}, c],
        "join": [{**join, "weight": 2}, c],
        "aux": [{**a, "aux": {"notes": str(folder / "b")}, "subflavors": {"noted": 1}}, c],
    }[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("documents")
    for name, counts in {"a": [40, 25], "b": [50, 20], "c": [20, 17]}.items():
        make_texts(root / name, counts, "k")
    return root


def with_notes(sample, notes):
    note, _ = notes[f"{sample['__key__']}.txt"]
    return {**basic_sample_keys(sample), "txt": sample["txt"] + note}


class Whole(Encoder):
    """Takes the texts of joins, and of auxiliary data, as those of their samples."""

    cookers = (
        Cooker(with_notes, has_subflavors={"noted": 1}),
        Cooker(lambda sample: {**basic_sample_keys(sample), "txt": sample["txt"]}),
    )

    def encode_sample(self, sample):
        if isinstance(sample, Pair):
            texts = [each["txt"] for each in (sample.left, sample.right) if each]
            key = {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__}
            sample = {**key, "txt": "".join(texts)}
        return super().encode_sample(sample)


class WholePacks(Packing, Whole):
    pass


def open_run(folder, kind, name, topology=(1, 0), **settings):
    encoder = WholePacks if "pack" in name else Whole
    path = {"splits": {"train": {"blend": document(folder, kind)}}}
    return Run(path, topology, encoder=encoder, **SETTINGS[name], **settings)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "name"), some(mixed(KINDS, list(SETTINGS)), 2))
def test_a_run_resumed_elsewhere_has_the_same_batches(folder, kind, name):
    with open_run(folder, kind, name) as run:
        expected = run.take(NUM_BATCHES)
    resume_often(expected, partial(open_run, folder, kind, name), times=4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), some(mixed(KINDS, list(SETTINGS)), 2))
def test_batches_are_restored_by_their_keys(folder, kind, name):
    with open_run(folder, kind, name) as run:
        for batch in islice(run.ranks[0], 3):
            again = run.loaders[0].restore_sample(batch["__restore_key__"])
            assert (again["__key__"], list(again["size"])) == (
                batch["__key__"],
                list(batch["size"]),
            )


def check_costs(loader, costs, count):
    """Check the statistics after each of the next batches."""
    for batch in islice(loader, count):
        keys = batch["__key__"]
        samples = [key for each in keys for key in ([each] if isinstance(each, str) else each)]
        assert loader.stats()["balance"]["batch_cost"] == sum(costs[key] for key in samples)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_statistics_have_the_costs_of_later_passes_and_of_other_lanes(folder, name):
    settings = {**SETTINGS[name], "encoder": WholePacks if "pack" in name else Whole}
    with Run(folder / "a", (1, 0), None, batch_size=1, repeat=False) as run:
        power = 2 if name == "packs" else 1
        costs = {batch["__key__"][0]: batch["size"][0] ** power for batch in run.ranks[0]}
    with Run(folder / "a", (1, 0), repeat=False, **settings) as run:
        assert list(run.loaders[0])  # the first pass
        check_costs(run.loaders[0], costs, 6)
        state = run.save()
    restored = {"state": state, "restore": {"relane": True}, "lanes": 4}
    with Run(folder / "a", (2, 0), repeat=False, **settings, **restored) as run:
        for loader in run.loaders:
            check_costs(loader, costs, 2)
