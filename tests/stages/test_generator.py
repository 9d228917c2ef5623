"""Generators of random numbers that belong to single calls of hooks."""

from __future__ import annotations

import pytest

from energon import Cooker, DefaultTaskEncoder, get_savable_loader, get_train_dataset
from energon.errors import ConfigError
from tests.datasets import make_crude
from tests.task_encoder.runs import config, resumable, train


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("crude") / "ds", [5, 8, 7])


class Drawing(DefaultTaskEncoder):
    def encode_sample(self, sample):
        return (
            sample["__key__"],
            sample["__restore_key__"],
            [self.current_rng.random() for _ in "ab"],
        )

    def batch(self, samples):
        return samples

    def encode_batch(self, batch):
        return batch, self.current_rng.integers(1 << 30)


class Yielding(Drawing):
    def encode_sample(self, sample):
        for _ in range(2):
            yield super().encode_sample(sample)


def batches(root, *, encoder=Drawing, count=10, **settings):
    worker_config = config(lanes=4, **settings.pop("config", {}))
    dataset = get_train_dataset(
        root, worker_config=worker_config, batch_size=3, task_encoder=encoder()
    )
    with get_savable_loader(dataset, **settings) as loader:
        return [batch for batch, _ in zip(loader, range(count), strict=False)]


@pytest.mark.parametrize("encoder", [Drawing, Yielding])
def test_numbers_are_the_same_after_resuming(root, encoder):
    items = resumable(train(root, encoder(), batch_size=3), limit=15)
    drawn = [draw for batch, _ in items for *_, draw in batch]
    assert len({number for draw in drawn for number in draw}) == 2 * len(drawn)
    assert len({number for _, number in items}) == len(items)


def test_numbers_depend_on_the_seed_and_the_epoch(root):
    first, other = (batches(root, count=15, config={"seed_offset": seed}) for seed in (0, 1))
    by_sample = {}
    for batch, _ in first:
        for key, restore_key, draw in batch:
            by_sample.setdefault(key, {})[restore_key] = draw
    several = [list(draws.values()) for draws in by_sample.values() if len(draws) > 1]
    assert several
    assert all(one != two for one, two, *_ in several)
    drawn = {str(draw) for batch, _ in first for *_, draw in batch}
    assert drawn.isdisjoint(str(draw) for batch, _ in other for *_, draw in batch)


def test_outside_of_hooks_there_is_no_generator():
    with pytest.raises(ConfigError, match="no hook is running"):
        _ = DefaultTaskEncoder().current_rng


def test_cookers_of_an_encoder_share_its_generator(root):
    class Cooking(DefaultTaskEncoder):
        def __init__(self):
            super().__init__()
            self.cookers = (Cooker(self.cook),)

        def cook(self, sample):
            return {**sample, "txt": self.current_rng.random()}

        def batch(self, samples):
            return [sample["txt"] for sample in samples]

    one, two = (batches(root, encoder=Cooking) for _ in range(2))
    assert one == two
