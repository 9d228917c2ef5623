from __future__ import annotations

from energon import Selection, homogeneous_concat_mix
from energon.stages.lane import Lane
from megatron.energon import (
    BatchDataset,
    GroupBatchDataset,
    MapDataset,
    MixBatchDataset,
    PackingDataset,
)
from tests.compat.megatron.wrappers.streams import CONFIG, ids, items, numbers


def test_batches_of_consecutive_items():
    batches = BatchDataset(numbers(7), 3, ids, worker_config=CONFIG)
    assert items(batches) == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(batches) == 3
    dropping = BatchDataset(numbers(7), 3, ids, drop_last=True, worker_config=CONFIG)
    assert items(dropping) == [[0, 1, 2], [3, 4, 5]]


def test_batches_of_groups():
    batches = GroupBatchDataset(
        numbers(8), None, lambda s: (s["n"] % 2, 2 + s["n"] % 2), ids, worker_config=CONFIG
    )
    assert items(batches) == [[0, 2], [1, 3, 5], [4, 6], [7]]


def test_packs():
    packs = PackingDataset(
        numbers(10),
        4,
        lambda samples: Selection([samples[:-1]], carry=samples[-1:]),
        ids,
        sample_encoder=lambda sample: {**sample, "n": -sample["n"]},
        worker_config=CONFIG,
    )
    assert [n for pack in items(packs) for n in pack] == [-n for n in range(9)]


def test_batches_of_several_datasets():
    def lists(dataset):
        return MapDataset(dataset, lambda sample: [sample["n"]], worker_config=CONFIG)

    mixed = MixBatchDataset(
        (lists(numbers(None)), 3),
        (MapDataset(numbers(None), lambda sample: [-1], worker_config=CONFIG), 1),
        batch_size=4,
        batch_mix_fn=homogeneous_concat_mix,
        worker_config=CONFIG,
    )
    batch = next(mixed.open_lane(Lane(0, 1)))
    assert sorted(batch) == [-1, 0, 1, 2]
