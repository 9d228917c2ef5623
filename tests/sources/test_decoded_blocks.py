"""All sources of a process keep decoded blocks within one budget."""

from __future__ import annotations

import gc
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon import WorkerConfig, get_loader, get_train_dataset
from energon.sources import decoded_blocks
from energon.sources.decoded_blocks import (
    BUDGET_BYTES,
    MAX_SOURCE_BYTES,
    DecodedBlocks,
    SliceCost,
    open_slices,
)


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """What this process keeps, with nothing of other tests in it."""
    fresh = decoded_blocks._Kept()
    monkeypatch.setattr(decoded_blocks, "_kept", fresh)
    return fresh


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "get", "drop", "end"]),
            st.integers(0, 3),
            st.integers(0, 9),
            st.integers(1, BUDGET_BYTES // 2),
        ),
        max_size=80,
    )
)
def test_what_was_used_longest_ago_makes_room(steps):
    kept = decoded_blocks._kept = decoded_blocks._Kept()
    sources = [DecodedBlocks() for _ in range(4)]
    latest = {}
    for what, source, key, size in steps:
        blocks = sources[source]
        if what == "keep":
            blocks.keep(key, (key, size), size)
            latest[source, key] = (key, size)
            assert blocks.get(key) == (key, size)
        elif what == "get":
            assert blocks.get(key) in (None, latest.get((source, key)))
        elif what == "drop":
            blocks.drop(key)
            assert blocks.get(key) is None
        else:
            sources[source] = DecodedBlocks()
            latest = {place: block for place, block in latest.items() if place[0] != source}
            del blocks
            gc.collect()
        sizes = [[size for _, size in each._blocks.values()] for each in sources]
        assert kept.num_bytes == sum(map(sum, sizes)) == sum(kept.sizes.values())
        assert kept.num_bytes <= BUDGET_BYTES or all(len(each) <= 2 for each in sizes)


def test_the_least_recently_used_goes_first_wherever_it_is(kept):
    first, second = DecodedBlocks(), DecodedBlocks()
    for key in range(4):
        first.keep(key, key, BUDGET_BYTES // 8)
        second.keep(key, key, BUDGET_BYTES // 8)
    assert first.get(0) == 0
    second.keep("new", "new", BUDGET_BYTES // 4)
    assert (second.get(0), first.get(1)) == (None, None)
    assert (first.get(0), second.get(1), second.get("new")) == (0, 1, "new")


@given(st.lists(st.integers(1, 4 * BUDGET_BYTES), max_size=200))
def test_slices_that_are_open_fit_into_the_budget(sizes):
    numbers = open_slices([SliceCost(1, size) for size in sizes])
    assert all(1 <= number <= 16 for number in numbers)
    assert open_slices([*(SliceCost(1, size) for size in sizes), None]) == [*numbers, 16]
    taken = [n * size for n, size in zip(numbers, sizes, strict=True)]
    assert all(n == 1 or total <= MAX_SOURCE_BYTES for n, total in zip(numbers, taken, strict=True))
    assert sum(t for n, t in zip(numbers, taken, strict=True) if n > 1) <= BUDGET_BYTES


def test_a_blend_of_many_parquet_datasets_takes_no_more_than_one(tmp_path, monkeypatch, kept):
    group = 50 * 10_000
    monkeypatch.setattr(decoded_blocks, "BUDGET_BYTES", 100 * group)
    monkeypatch.setattr(decoded_blocks, "MAX_SOURCE_BYTES", 50 * group)
    table = pa.table({"txt": ["x" * 10_000] * 1000})
    for number in range(25):
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=50)
    entries = [{"path": str(tmp_path / f"{n}.parquet")} for n in range(25)]
    blend = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": entries}},
    }
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    most = 0
    with get_loader(get_train_dataset(blend, worker_config=config, batch_size=10)) as loader:
        for _ in islice(loader, 300):
            most = max(most, kept.num_bytes)
    assert 25 * group <= most <= 100 * group
