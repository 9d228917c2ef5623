"""Datasets that programs write themselves."""

from __future__ import annotations

from itertools import islice

import pytest

from megatron.energon import (
    BatchDataset,
    ConfigError,
    DefaultTaskEncoder,
    MapDataset,
    SavableDataset,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
)
from megatron.energon.wrappers.base import BaseWrapperDataset
from tests.datasets import make_crude


class LengthPoolSort(SavableDataset[dict]):
    """Sorts pools of samples by length, as trainers do."""

    def __init__(self, dataset, pool_size: int, *, worker_config: WorkerConfig):
        super().__init__(worker_config=worker_config)
        self.dataset_to_sort = dataset
        self.pool_size = pool_size

    def __iter__(self):
        pool = []
        for sample in self.dataset_to_sort:
            pool.append(sample)
            if len(pool) == self.pool_size:
                yield from sorted(pool, key=number)
                pool = []
        yield from sorted(pool, key=number)

    def len_worker(self, worker_idx=None):
        return self.dataset_to_sort.len_worker(worker_idx)

    def worker_has_samples(self):
        return self.dataset_to_sort.worker_has_samples()

    def reset_state_own(self):
        pass

    def config(self):
        return {"type": type(self).__qualname__, "pool_size": self.pool_size}


class Doubled(BaseWrapperDataset[dict, dict]):
    def __iter__(self):
        for sample in self.dataset:
            yield sample
            yield {**sample, "again": True}

    def reset_state_own(self):
        pass

    def len_worker(self, worker_idx=None):
        return 2 * self.dataset.len_worker(worker_idx)


class Alternating(BaseWrapperDataset[dict, dict]):
    def __init__(self, *datasets, worker_config):
        super().__init__(datasets, worker_config=worker_config)

    def __iter__(self):
        for pair in zip(*self.datasets, strict=False):
            yield from pair


class Counting(SavableDataset[int]):
    def __init__(self, worker_config, stop):
        super().__init__(worker_config)
        self.stop = stop

    def __iter__(self):
        yield from range(self.stop)


class Pooled(DefaultTaskEncoder):
    def build_encode_sample(self, dataset, *, worker_config):
        sorted_ = LengthPoolSort(dataset, 4, worker_config=worker_config)
        return super().build_encode_sample(sorted_, worker_config=worker_config)

    def batch(self, samples):
        return [number(sample) for sample in samples]


def number(sample):
    return int(sample["__key__"].strip("s"))


def config(num_workers=0):
    return WorkerConfig(rank=0, world_size=1, num_workers=num_workers, lanes=2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("texts") / "ds", [13, 12])


def train(root, encoder, num_workers=0):
    return get_train_dataset(
        root,
        worker_config=config(num_workers),
        batch_size=4,
        max_samples_per_sequence=1,
        task_encoder=encoder,
    )


def test_a_pool_that_sorts_runs_in_each_lane_and_goes_on_after_a_restore(root):
    dataset = train(root, Pooled())
    with get_savable_loader(dataset) as loader:
        whole = list(islice(loader, 12))
    assert all(batch == sorted(batch) for batch in whole)
    assert sorted(n for batch in whole[:6] for n in batch) != [*range(24)]
    with get_savable_loader(train(root, Pooled(), 2)) as loader:
        assert list(islice(loader, 5)) == whole[:5]
        state = loader.save_state_rank()
    with get_savable_loader(train(root, Pooled())) as loader:
        loader.restore_state_rank(state)
        assert list(islice(loader, 7)) == whole[5:]


def samples(root):
    return train(root, None)


def test_own_datasets_are_wrapped_and_looped_over(root):
    counting = Counting(config(), 5)
    doubled = MapDataset(counting, str, worker_config=config())
    batches = BatchDataset(doubled, 2, list, worker_config=config())
    assert sorted(map(tuple, get_loader(batches))) == sorted(
        [("0", "1"), ("0", "1"), ("2", "3"), ("2", "3"), ("4",), ("4",)]
    )
    alternating = Alternating(counting, Counting(config(), 3), worker_config=config())
    found = list(get_loader(alternating))
    assert sorted(found) == sorted(2 * [0, 0, 1, 1, 2, 2])
    with pytest.raises(ConfigError, match="wraps 2 datasets"):
        alternating.dataset.len_rank()


def test_lengths_are_those_that_the_program_gives(root):
    counting = Counting(config(), 5)
    with pytest.raises(TypeError, match="no end"):
        len(counting)

    class Sized(Counting):
        def len_worker(self, worker_idx=None):
            return self.stop

    assert len(Sized(config(), 5)) == 10
    assert len(Doubled(Sized(config(), 5), worker_config=config())) == 20


def test_all_pipelines_are_savable_datasets(root):
    dataset = train(root, DefaultTaskEncoder())
    wrapped = MapDataset(dataset, id, worker_config=config())
    assert isinstance(dataset, SavableDataset)
    assert isinstance(wrapped, SavableDataset)
    assert isinstance(wrapped, BaseWrapperDataset)
    assert not isinstance(dataset, BaseWrapperDataset)
    assert not isinstance(dataset, LengthPoolSort)
    assert not isinstance(3, SavableDataset)
