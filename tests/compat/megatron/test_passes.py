"""Several loops over pipelines that a program builds from wrappers, as over those of the recipe."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from energon import stateless
from energon.compat.megatron.encoder import DefaultTaskEncoder
from energon.compat.megatron.getters import get_train_dataset, get_val_dataset
from energon.compat.megatron.loaders import get_savable_loader
from energon.compat.megatron.worker import WorkerConfig
from energon.compat.megatron.wrappers.own import BaseWrapperDataset
from energon.errors import StateError
from megatron.energon import LimitDataset, MapDataset, ShuffleBufferDataset
from tests.datasets import make_crude
from tests.effort import mixed

SIZES = {"a": 23, "b": 9}


class Keys(DefaultTaskEncoder):
    """Yields the key of each sample, what a hook drew for it, and its restore key."""

    decoder = None

    @stateless(restore_seeds=True)
    def encode_sample(self, sample):
        import random

        return {**sample, "drawn": random.getrandbits(30)}

    def batch(self, samples):
        return [(each["__key__"], each["drawn"], each["__restore_key__"]) for each in samples]


def unchanged(batch):
    return batch


class MapsBatches(Keys):
    def build_train_datasets(self, *, worker_config, **arguments):
        batches = super().build_train_datasets(worker_config=worker_config, **arguments)
        return MapDataset(batches, unchanged, worker_config=worker_config)

    def build_val_datasets(self, *, worker_config, **arguments):
        batches = super().build_val_datasets(worker_config=worker_config, **arguments)
        return MapDataset(batches, unchanged, worker_config=worker_config)


class ShufflesSamples(Keys):
    def _load_dataset(self, dataset, worker_rotation_offset=0, worker_config=None):
        samples = super()._load_dataset(dataset, worker_rotation_offset, worker_config)
        return ShuffleBufferDataset(samples, 5, worker_config=samples.worker_config)


class InPairs(BaseWrapperDataset):
    """Swaps neighbors, as a program's own wrapper may."""

    def __init__(self, dataset, *, worker_config):
        super().__init__(dataset, worker_config=worker_config)
        self.dataset = dataset

    def __iter__(self):
        items = iter(self.dataset)
        while pair := [*islice(items, 2)]:
            yield from reversed(pair)


class WrapsBatches(Keys):
    def build_train_datasets(self, *, worker_config, **arguments):
        batches = super().build_train_datasets(worker_config=worker_config, **arguments)
        return InPairs(batches, worker_config=worker_config)


class Limits(Keys):
    def build_train_datasets(self, *, worker_config, **arguments):
        batches = super().build_train_datasets(worker_config=worker_config, **arguments)
        return LimitDataset(batches, 3, worker_config=worker_config)


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    root = tmp_path_factory.mktemp("passes")
    for name, size in SIZES.items():
        make_crude(root / name, [size - 5, 5], prefix=name)
    return {
        "splits": {
            "train": {"blend_epochized": [{"path": str(root / name)} for name in SIZES]},
            "val": {"path": str(root / "a"), "split_part": "train"},
        }
    }


def loader(document, encoder, *, num_workers=0, getter=get_train_dataset, **arguments):
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, lanes=2)
    dataset = getter(
        document, worker_config=config, batch_size=2, task_encoder=encoder, **arguments
    )
    return get_savable_loader(dataset)


def parts(batches, number):
    return [sample[number] for batch in batches for sample in batch]


BUILDERS = [MapsBatches, ShufflesSamples, WrapsBatches]


@pytest.mark.parametrize("kind", BUILDERS)
def test_each_loop_has_all_samples_in_an_order_of_its_own(document, kind):
    batches = loader(document, kind(), repeat=False)
    passes = [[*batches] for _ in range(3)]
    keys = [parts(each, 0) for each in passes]
    assert [sorted(each) for each in keys] == 3 * [sorted(keys[0])]
    assert len({*keys[0]}) == sum(SIZES.values())
    assert len({*map(tuple, keys)}) == 3
    drawn = [{*parts(each, 1)} for each in passes]
    assert not drawn[0] & drawn[1], "hooks draw other numbers, too"
    for each in passes:
        for key, number, restore_key in [sample for batch in each for sample in batch]:
            restored = batches.restore_sample(restore_key)
            assert (restored["__key__"], restored["drawn"]) == (key, number)


@pytest.mark.parametrize(("kind", "stop"), mixed(BUILDERS, [0, 5, None]))
def test_a_later_loop_is_resumed_in_its_order(document, kind, stop):
    batches = loader(document, kind(), repeat=False)
    whole = [[*batches] for _ in range(3)]
    batches = loader(document, kind(), repeat=False)
    assert [*batches] == whole[0]
    begun = [*batches] if stop is None else [*islice(batches, stop)]
    state = json.loads(json.dumps(batches.save_state_rank()))
    other = loader(document, kind(), repeat=False)
    other.restore_state_rank(state)
    if stop is not None:
        assert [*begun, *other] == whole[1]
    assert [*other] == whole[2]


def test_loops_over_validation_data_and_limited_data_are_alike(document):
    batches = loader(document, MapsBatches(), getter=get_val_dataset)
    assert [*batches] == [*batches]
    assert "pass" not in batches.save_state_rank()["fingerprint"]
    batches = loader(document, Limits(), repeat=False)
    assert [*batches] == [*batches]


def test_a_damaged_number_of_a_pass_is_refused(document):
    state = loader(document, MapsBatches(), repeat=False).save_state_rank()
    for value in (-1, "1", 1.5, True, 1 << 70):
        state["fingerprint"]["pass"] = value
        with pytest.raises(StateError, match="damaged"):
            loader(document, MapsBatches(), repeat=False).restore_state_rank(state)
