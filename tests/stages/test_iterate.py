from __future__ import annotations

import collections.abc

import pytest
import torch

from energon import (
    ConfigError,
    DefaultTaskEncoder,
    get_savable_loader,
)
from energon.compat.megatron.datasets.webdataset import CrudeWebdataset
from megatron.energon import (
    BatchDataset,
)
from tests.datasets import make_crude
from tests.task_encoder.runs import config, train, val


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("crude") / "ds", [5, 8, 7])


class Keys(DefaultTaskEncoder):
    def batch(self, samples):
        return self.current_batch_index, [sample["__key__"] for sample in samples]


@pytest.mark.parametrize(("world_size", "lanes"), [(1, 1), (1, 3), (2, 4)])
def test_iterating_yields_what_a_loader_delivers(root, world_size, lanes):
    for rank in range(world_size):
        worker_config = config(rank=rank, world_size=world_size, lanes=lanes)
        dataset = val(root, Keys(), batch_size=3, worker_config=worker_config)
        with get_savable_loader(dataset) as loader:
            expected = list(loader)
        assert list(dataset) == list(dataset) == expected


def test_a_virtual_epoch_ends_the_iteration(root):
    dataset = train(root, Keys(), virtual_epoch_length=7, worker_config=config(lanes=3))
    assert len(dataset) == len(list(dataset)) == 7


def test_wrappers_are_iterable_too(root):
    dataset = CrudeWebdataset(root, split_part="val", training=False, worker_config=config())
    batches = BatchDataset(dataset.build(), 6, len, worker_config=config())
    assert list(batches) == [6, 6, 6, 2]


def test_torch_sees_iterable_datasets(root):
    for dataset in (val(root, Keys()), BatchDataset(val(root), 2, list, worker_config=config())):
        assert isinstance(dataset, torch.utils.data.IterableDataset)
        assert isinstance(dataset, collections.abc.Iterable)
        with pytest.raises(TypeError, match="iterate over it"):
            dataset[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_of_torch_divide_the_lanes_among_their_workers(root, num_workers):
    dataset = val(root, Keys(), batch_size=3, worker_config=config(lanes=2))
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=num_workers)
    assert [tuple(batch) for batch in loader] == list(dataset)


@pytest.mark.slow  # torch waits 5 s for each worker that failed at its start
def test_more_workers_than_lanes_are_refused(root):
    dataset = val(root, Keys(), worker_config=config(lanes=1))
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    with pytest.raises(ConfigError, match="2 workers of a torch DataLoader for 1 lane "):
        list(loader)


def test_a_loader_of_torch_that_would_batch_batches_is_refused(root):
    def load(dataset, **settings):
        return next(iter(torch.utils.data.DataLoader(dataset, **settings)))

    batches = val(root, batch_size=3)
    with pytest.raises(ConfigError, match="pass it batch_size=None"):
        load(batches)
    # It may make batches of samples, and whatever its own function makes of batches.
    assert len(load(val(root, batch_size=None), batch_size=2)["txt"]) == 2
    assert load(batches, collate_fn=len) == 1
