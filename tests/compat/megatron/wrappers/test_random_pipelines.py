"""Wrappers around wrappers, in any order: resumed at every item, and made again by keys."""

from __future__ import annotations

import random
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from energon import SkipSample
from energon.packing import Packer
from energon.samples.crude import key_of
from energon.stages.lane import Lane
from energon.testing import check_resume
from megatron.energon import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    FilterDataset,
    GroupBatchDataset,
    IterMapDataset,
    LimitDataset,
    MapDataset,
    MixBatchDataset,
    PackingDataset,
    RepeatDataset,
    ShuffleBufferDataset,
)
from tests.compat.megatron.wrappers.streams import CONFIG, numbers


def draw(item):
    """Return an item with a random number; some are skipped."""
    if random.random() < 0.2:
        raise SkipSample
    return {**item, "drawn": random.random()}


def several(item):
    """Yield an item some times."""
    for _ in range(item["n"] % 3):
        yield {**item, "drawn": random.random()}


def join(items):
    """Return one item of several."""
    return {
        "n": sum(item["n"] for item in items),
        "drawn": sum(item.get("drawn", 0) for item in items) + random.random(),
        "__restore_key__": (),
    }


def join_twice(items):
    """Yield two items of several."""
    yield join(items)
    yield join(items)


PACKER = Packer(40, lambda item: min(40, item["n"]))

WRAPPERS = {
    "draw": lambda inner: MapDataset(inner, draw, worker_config=CONFIG),
    "several": lambda inner: MapDataset(inner, several, worker_config=CONFIG),
    "filter": lambda inner: FilterDataset(
        inner, filter_fn=lambda item: item["n"] % 5, worker_config=CONFIG
    ),
    "batch": lambda inner: BatchDataset(inner, 3, join, worker_config=CONFIG),
    "batch twice": lambda inner: BatchDataset(inner, 2, join_twice, worker_config=CONFIG),
    "group": lambda inner: GroupBatchDataset(
        inner, 2, lambda item: (item["n"] % 3, None), join, worker_config=CONFIG
    ),
    "pack": lambda inner: PackingDataset(
        inner, 6, PACKER, join, sample_encoder=draw, worker_config=CONFIG
    ),
    "pack twice": lambda inner: PackingDataset(inner, 5, PACKER, join_twice, worker_config=CONFIG),
    "shuffle": lambda inner: ShuffleBufferDataset(inner, 4, worker_config=CONFIG),
    "limit": lambda inner: LimitDataset(inner, 7, worker_config=CONFIG),
    "repeat": lambda inner: RepeatDataset(inner, repeats=1.5, worker_config=CONFIG),
}


def twice(items):
    """Yield each item twice."""
    for item in items:
        yield item
        yield {**item, "n": item["n"] + 1}


def where_sum_is_odd(items):
    """Yield items after which the sum of all so far is odd."""
    total = 0
    for item in items:
        total += item["n"]
        if total % 2:
            yield item


STREAMS = {
    "twice": lambda inner: IterMapDataset(
        inner, twice, len_map_fn=lambda n: 2 * n, stateless_iter_fn=True, worker_config=CONFIG
    ),
    "sums": lambda inner: IterMapDataset(inner, where_sum_is_odd, worker_config=CONFIG),
}
JOINTS = {
    "blend": lambda one, two: BlendDataset((one, 2), (two, 1), worker_config=CONFIG),
    "concat": lambda one, two: ConcatDataset(one, two, worker_config=CONFIG),
    "mix": lambda one, two: MixBatchDataset(
        (one, 1), (two, 3), batch_size=2, batch_mix_fn=join, worker_config=CONFIG
    ),
}


def pipelines(wrappers):
    """Trees of wrappers, with the number of items of each dataset at the end of branches."""
    return st.recursive(
        st.integers(1, 20),
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(sorted(wrappers)), inner),
            st.tuples(st.sampled_from(sorted(JOINTS)), inner, inner),
        ),
        max_leaves=3,
    )


def build(pipeline, leaves=None):
    leaves = count() if leaves is None else leaves
    if isinstance(pipeline, int):
        return numbers(pipeline, leaf=next(leaves))
    name, *inner = pipeline
    return {**WRAPPERS, **STREAMS, **JOINTS}[name](*(build(each, leaves) for each in inner))


@settings(max_examples=60, deadline=None)
@given(pipelines({**WRAPPERS, **STREAMS}))
def test_any_pipeline_of_wrappers_resumes_at_every_item(pipeline):
    check_resume(build(pipeline), limit=15)


@settings(max_examples=40, deadline=None)
@given(pipelines(WRAPPERS))
def test_items_of_any_pipeline_are_made_again_by_their_keys(pipeline):
    dataset = build(pipeline)
    for item in check_resume(dataset, limit=10, lanes=1):
        if key_of(item):
            assert dataset.restore(Lane(0, 1), key_of(item))[0] == item
