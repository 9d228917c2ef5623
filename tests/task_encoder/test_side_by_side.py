"""Loaders and datasets in one process know nothing of one another."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from energon import (
    Cooker,
    DefaultTaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon.samples.sample_types import TextSample
from megatron.energon import EpochizeDataset, get_val_dataset
from tests.task_encoder.runs import config, train, val


class Drawing(DefaultTaskEncoder):
    @stateless(restore_seeds=True)
    def encode_sample(self, sample):
        return sample["__restore_key__"], random.random()

    def batch(self, samples):
        return samples


def drawn(root, **settings):
    dataset = train(root, Drawing(), worker_config=config(**settings))
    with get_savable_loader(dataset) as loader:
        return dict(pair for batch in islice(loader, 10) for pair in batch)


def test_random_numbers_are_those_of_the_own_seed(root):
    one, two, again = (drawn(root, seed_offset=seed) for seed in (1, 2, 1))
    assert one == again
    assert one.keys() & two.keys()
    assert all(one[key] != two[key] for key in one.keys() & two.keys())


def test_ranks_in_one_process_draw_different_numbers_and_have_different_keys(root):
    first, second = (drawn(root, rank=rank, world_size=2) for rank in (0, 1))
    assert first.keys().isdisjoint(second)
    assert set(first.values()).isdisjoint(second.values())


def test_settings_of_the_decoder_are_for_one_dataset(root):
    arguments = {"worker_config": config(), "batch_size": None}
    with pytest.warns(FutureWarning):
        raw = get_val_dataset(root, auto_decode=False, **arguments)
    assert next(iter(get_loader(raw)))["txt"] == b"text 0"
    assert next(iter(get_loader(get_val_dataset(root, **arguments))))["txt"] == "text 0"


def test_configurations_are_equal_to_their_like_only():
    one = WorkerConfig(rank=0, world_size=1, num_workers=0)
    assert one == WorkerConfig(rank=0, world_size=1, num_workers=0)
    assert one != WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=1)
    assert one != 3


def test_epochs_over_data_that_end_are_never_empty_for_ever(root):
    dataset = EpochizeDataset(val(root, Drawing()), 3, config())
    with get_savable_loader(dataset) as loader:
        lengths = [len(list(loader)) for _ in range(4)]
    assert sum(lengths[:2]) == 5
    assert lengths[2:] == lengths[:2]


@cooker(need_cache=True)
def cook(sample, cache):
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


class Cooking(DefaultTaskEncoder):
    cookers = (Cooker(cook),)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_cookers_with_a_cache_are_made_again(root, num_workers):
    dataset = get_train_dataset(
        root,
        worker_config=config(num_workers=num_workers),
        batch_size=None,
        task_encoder=Cooking(),
    )
    with get_savable_loader(dataset) as loader:
        for sample in islice(loader, 3):
            assert loader.restore_sample(sample.__restore_key__) == sample
