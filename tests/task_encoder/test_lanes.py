"""Runs without a thought about lanes: they continue anywhere, and cost what one lane costs."""

from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon import (
    ConfigError,
    SavableDataLoader,
    SkipSample,
    StateError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon.loader.hosting import LaneHost
from energon.loader.state import LanePosition
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe
from energon.stages.base import DatasetIterator
from energon.stages.batch import BatchDataset
from energon.stages.lane import MAX_BLOCK_BYTES, MAX_PLANNED_ROWS
from energon.stages.read import ReadDataset
from energon.task_encoder.dataset import SavableDataset
from tests.datasets import make_crude
from tests.effort import mixed, some
from tests.encoders import Keys, Packs
from tests.stages.numbers import NumberReader

SIZES = {"a": 130, "b": 37, "c": 11}
BATCH = 4


class Skips(Keys):
    """Leaves out a fifth of the samples, so that lanes do not keep step."""

    @stateless
    def encode_sample(self, sample):
        if int(sample["__key__"][1:]) % 5 == 3:
            raise SkipSample
        return sample


class Groups(Keys):
    def batch_group_criterion(self, sample):
        return len(sample["__key__"]), None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("lanes")
    for name, size in SIZES.items():
        make_crude(root / name, [size // 2, size - size // 2], prefix=name)
    return root


def blend(folder, *names, **weights):
    entries = [{"path": str(folder / name), "weight": weights.get(name, 1)} for name in names]
    return {"splits": {"train": {"blend": entries}}}


def config(rank=0, world_size=1, num_workers=0, lanes=None):
    return WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers, lanes=lanes)


class Job:
    """All ranks of a job over a training set."""

    def __init__(self, path, *, world_size=1, num_workers=0, lanes=None, encoder=None, **settings):
        self.loaders = [
            get_savable_loader(
                get_train_dataset(
                    path,
                    worker_config=config(rank, world_size, num_workers, lanes),
                    batch_size=settings.get("batch_size", BATCH),
                    task_encoder=encoder or Keys(),
                    **{name: value for name, value in settings.items() if name != "batch_size"},
                ),
                workers="thread",
            )
            for rank in range(world_size)
        ]

    def restored(self, state, **arguments):
        for loader in self.loaders:
            loader.load_state_dict(json.loads(json.dumps(state)), **arguments)
        return self

    def take(self, steps, *, first=0):
        """What all ranks get in some steps, in the order of the run."""
        ranks = [islice(iter(loader), steps) for loader in self.loaders]
        batches = [list(batches) for batches in ranks]
        order = [
            (step, (rank + first) % len(ranks))
            for step in range(steps)
            for rank in range(len(ranks))
        ]
        found = [batches[rank][step] for step, rank in order if step < len(batches[rank])]
        return found

    def save(self):
        return [loader.save_state_rank() for loader in self.loaders]

    def close(self):
        for loader in self.loaders:
            loader.close()


@pytest.mark.parametrize(
    ("world_size", "num_workers", "lanes"),
    [(1, 0, 24), (1, 3, 24), (2, 4, 24), (1, 5, 120), (4, 3, 24), (8, 4, 96), (48, 1, 48)],
)
def test_a_new_run_has_a_multiple_of_24_lanes_and_of_its_workers(
    folder, world_size, num_workers, lanes
):
    job = Job(folder / "a", world_size=world_size, num_workers=num_workers)
    assert {loader.config()["lanes"] for loader in job.loaders} == {lanes}


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (1, 2), (2, 1), (3, 2)])
def test_the_batches_are_those_of_one_lane_for_each_worker(folder, world_size, num_workers):
    path = blend(folder, "a", "b", "c", a=4, b=2)
    topology = {"world_size": world_size, "num_workers": num_workers}
    settings = {"shuffle_buffer_size": 10, "max_samples_per_sequence": 5}
    workers = world_size * max(1, num_workers)
    shared, alone = Job(path, **topology, **settings), Job(path, lanes=workers, **settings)
    steps = 120 // world_size
    assert shared.take(steps) == alone.take(steps * world_size)
    shared.close()


@pytest.mark.slow
@given(
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    topologies=st.lists(
        st.sampled_from([(1, 0), (1, 3), (2, 2), (3, 0), (4, 0), (8, 0), (12, 0), (24, 0)]),
        min_size=4,
        max_size=4,
    ),
    first=st.sampled_from([(1, 0), (1, 2), (2, 2), (3, 1), (4, 2)]),
    encoder=st.sampled_from([Keys(), Skips()]),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_saving_anywhere_and_going_on_elsewhere_is_exact(folder, steps, topologies, first, encoder):
    path = blend(folder, "a", "b", "c", a=4, b=2)
    world_size, num_workers = first
    job = Job(path, world_size=world_size, num_workers=num_workers, encoder=encoder)
    seen = job.take(3)
    state, lanes = job.save(), job.loaders[0].config()["lanes"]
    job.close()
    for count, (ranks, workers) in zip(steps, topologies, strict=False):
        if lanes % ranks:
            continue
        job = Job(path, world_size=ranks, num_workers=workers, encoder=encoder).restored(state)
        seen += job.take(count, first=len(seen))
        state = job.save()
        job.close()
    fresh = Job(path, world_size=world_size, num_workers=num_workers, encoder=encoder)
    assert seen == fresh.take(-(-len(seen) // world_size))[: len(seen)]
    fresh.close()


@pytest.mark.parametrize("size", ["a", "c"])
def test_an_epoch_of_small_data_is_drawn_to_its_end_before_the_next_begins(folder, size):
    number = SIZES[size]
    loader = Job(folder / size, batch_size=1).loaders[0]
    for _ in range(3):
        keys = [key for batch in islice(iter(loader), number) for key in batch]
        assert sorted(keys) == sorted(f"{size}{n}" for n in range(number))


def test_a_virtual_epoch_of_all_samples_has_each_of_them(folder):
    job = Job(folder / "a", batch_size=10, virtual_epoch_length=13)
    for _ in range(3):
        keys = [key for batch in job.loaders[0] for key in batch]
        assert sorted(keys) == sorted(f"a{n}" for n in range(130))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_small_validation_sets_do_not_come_in_crumbs(folder, world_size, drop_last):
    sizes, keys = Counter(), []
    for rank in range(world_size):
        dataset = get_val_dataset(
            folder / "a",
            split_part="train",
            worker_config=config(rank, world_size),
            batch_size=8,
            batch_drop_last=drop_last,
            task_encoder=Keys(),
        )
        batches = list(get_savable_loader(dataset))
        assert len(batches) == len(get_savable_loader(dataset))
        sizes.update(map(len, batches))
        keys += [key for batch in batches for key in batch]
    assert sizes == ({8: 16} if drop_last else {8: 16, 2: 1})
    assert len(set(keys)) == len(keys) == (128 if drop_last else 130)


def test_hooks_that_skip_make_no_more_small_batches_of_small_data_than_before(folder):
    sizes = [len(batch) for batch in Job(folder / "a", encoder=Skips(), repeat=False).take(99)]
    assert sizes == [4] * 26
    assert Job(folder / "a", repeat=False).loaders[0].config()["lanes"] == 1


def test_finite_data_of_many_batches_have_one_smaller_batch(folder):
    job = Job(folder / "a", repeat=False, batch_size=1, world_size=2)
    assert job.loaders[0].config()["lanes"] == 2  # 130 batches are too few for 24 lanes
    path = {
        "splits": {"train": {"blend_epochized": [{"path": str(folder / "a"), "repetitions": 7}]}}
    }
    job = Job(path, repeat=False)
    assert job.loaders[0].config()["lanes"] == 24
    sizes = [len(batch) for batch in job.take(999)]
    assert sizes == [4] * 227 + [2]
    assert len(job.loaders[0]) == 228
    halves = Job(path, repeat=False, world_size=2)
    assert halves.loaders[0].config()["lanes"] == 24
    keys = Counter(key for batch in halves.take(999) for key in batch)
    assert keys == {f"a{n}": 7 for n in range(130)}


@pytest.mark.parametrize(
    ("encoder", "settings"), [(Packs(), {"packing_buffer_size": 10}), (Groups(), {})]
)
def test_pipelines_that_hold_samples_back_have_one_lane_for_each_worker(folder, encoder, settings):
    job = Job(folder / "a", world_size=2, num_workers=3, encoder=encoder, **settings)
    assert job.loaders[0].config()["lanes"] == 6
    chosen = Job(folder / "a", world_size=2, lanes=24, encoder=encoder, **settings)
    assert chosen.loaders[0].config()["lanes"] == 24


def host(lanes, streams, *, reader, leaf, batch_size=32, window=0):
    recipe = PlanRecipe(
        "blend", (leaf,), 0, stripe=batch_size, streams=streams, shuffle_window=window
    )
    pipeline = SavableDataset(
        stage=BatchDataset(ReadDataset(recipe, reader), batch_size),
        plan=recipe,
        worker_config=config(lanes=lanes),
        batch_size=batch_size,
        reader=reader,
    )
    return LaneHost(pipeline, {lane: LanePosition() for lane in range(lanes)}, lanes=lanes)


@pytest.mark.slow
@pytest.mark.parametrize("sample_bytes", some([300, 70_000, 8_000_000]))
def test_lanes_of_a_worker_are_read_in_blocks_as_large_and_as_few_as_those_of_one(sample_bytes):
    leaf = PlanLeaf("a", 200_000, slice_samples=100)
    # Blocks of large samples are small: fewer batches fill as many of them.
    count = 100 if sample_bytes > 1_000_000 else 1200
    reads, slices = {}, {}
    for lanes in (1, 24):
        reader = BlockReader(mean_sample_bytes=sample_bytes)
        batches = islice(host(lanes, 1, reader=reader, leaf=leaf, window=1000), count)
        samples = [sample["n"] for event in batches for sample in event.batch]
        reads[lanes], slices[lanes] = reader.reads, reader.spans
        assert len(samples) == count * 32
    largest = max(1, min(MAX_PLANNED_ROWS, MAX_BLOCK_BYTES // sample_bytes))
    assert max(reads[24]) <= max(largest, 1)
    # Blocks of several lanes have whole batches, so they are that much smaller. The first batch of
    # every lane is read before there is one to read it together with.
    share = largest / (largest // 32 * 32 or largest)
    assert len(reads[24]) <= share * len(reads[1]) + 8
    assert sum(slices[24]) <= 1.05 * share * sum(slices[1]) + 24 * 32


class BlockReader(NumberReader):
    """Counts the runs of neighbouring samples that each block consists of, too."""

    def __init__(self, mean_sample_bytes):
        super().__init__(mean_sample_bytes)
        object.__setattr__(self, "spans", [])

    def read(self, rows):
        ordered = np.sort(rows.ordinal)
        self.spans.append(1 + int((np.diff(ordered) > 8).sum()))
        return super().read(rows)


def test_lanes_that_skip_do_not_hold_more_and_more():
    """Lanes drift apart without end, and what waits in the worker stays within its block."""
    reader = BlockReader(mean_sample_bytes=2000)
    lanes = host(24, 1, reader=reader, leaf=PlanLeaf("a", 50_000, slice_samples=50))
    generator = np.random.default_rng(0)
    lanes.pipeline = _Skipping(lanes.pipeline, generator)
    given = 0
    for event in islice(lanes, 4000):
        given += len(event.batch)
        assert sum(reader.reads) - lanes.pipeline.seen <= MAX_PLANNED_ROWS + 64
    assert given == 4000 * 32


class _Skipping:
    """A pipeline whose batches are made of a random part of the samples that are read."""

    def __init__(self, pipeline, generator):
        self.worker_config = pipeline.worker_config
        self.pipeline, self.generator, self.seen = pipeline, generator, 0

    def open_lane(self, lane, state):
        lane.reading.plan = self.pipeline.plan(lane.lanes)
        inner = self.pipeline.stage.dataset.open(lane)
        return _SkippingLane(self, inner)


class _SkippingLane(DatasetIterator):
    def __init__(self, whole, inner):
        self.whole, self.inner = whole, inner

    def __next__(self):
        batch = []
        while len(batch) < 32:
            sample = next(self.inner)
            self.whole.seen += 1
            if self.whole.generator.random() < 0.8:
                batch.append(sample)
        return batch

    def state_dict(self):
        return {}


@pytest.mark.parametrize("world_size", [5, 7])
def test_ranks_that_do_not_divide_the_lanes_go_on_by_themselves_if_that_costs_nothing(
    folder, world_size, caplog
):
    run = Job(folder / "a")
    first = run.take(10)
    job = Job(folder / "a", world_size=world_size).restored(run.save())
    assert "no sample is repeated or missed" in caplog.text
    seen = Counter(key for batch in first + job.take(70) for key in batch)
    assert max(seen.values()) - min(seen.values()) <= 1 + world_size * BATCH // 130 + 1
    drawn = [key for batch in first for key in batch]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.slow
def test_what_other_lanes_cost_is_told_before_they_are_taken(folder, caplog):
    path = blend(folder, "a", "b", "c", a=4, b=2)
    run = Job(path, encoder=Skips())
    run.take(50)
    state = run.save()
    refused = (
        "24 lanes can't be divided evenly among 5 ranks.*relane=True to continue with 120 lanes"
    )
    with pytest.raises(ConfigError, match=f"{refused}.*repeated"):
        Job(path, encoder=Skips(), world_size=5).restored(state)
    with caplog.at_level(logging.WARNING):
        job = Job(path, encoder=Skips(), world_size=5).restored(state, relane=True)
    assert "the state of 24 lanes to 120 lanes; of the epochs in progress, up to" in caplog.text
    assert job.loaders[0].config()["lanes"] == 120
    # From now on it continues exactly, on whatever divides them.
    state = job.save()
    expected = job.take(24)
    assert Job(path, encoder=Skips(), world_size=10).restored(state).take(12) == expected


def test_lanes_that_are_asked_for_are_given_if_that_is_data_file(folder):
    run = Job(folder / "a")
    run.take(10)
    with pytest.raises(StateError, match=r"saved with 24 lanes.*lanes=36.*relane=True"):
        Job(folder / "a", lanes=36).restored(run.save())
    job = Job(folder / "a", lanes=36, world_size=9).restored(run.save(), relane=True)
    assert job.loaders[0].config()["lanes"] == 36
    # Where lanes fit, nothing changes.
    whole = Job(folder / "a").restored(run.save()).take(24)
    assert Job(folder / "a").restored(run.save(), relane=True).take(24) == whole


RESTORE = {name for name in dir(SavableDataLoader) if name.startswith(("restore_state", "load_"))}


@pytest.mark.parametrize("name", sorted(RESTORE))
def test_every_way_of_restoring_takes_other_lanes_and_differences(folder, name):
    run = Job(folder / "a")
    run.take(10)
    (loader,) = Job(folder / "a", lanes=36, batch_size=2).loaders
    getattr(loader, name)(run.save(), relane=True, strict=["batch_size"])
    assert loader.config()["lanes"] == 36


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "epochized"),
    [(Keys(), True), *mixed([Keys(), Skips(), Packs(), Groups()], [False, True])],
)
def test_epochs_are_exact_through_changes_of_lanes(folder, encoder, epochized, caplog):
    """A run that ends: all it has is seen as often as it should, but for what is announced."""
    repeats = 3
    entries = [
        {"path": str(folder / name), "repetitions" if epochized else "max_epochs": repeats}
        for name in SIZES
    ]
    kind = "blend_epochized" if epochized else "blend"
    path = {"splits": {"train": {kind: entries}}}
    packing = {"packing_buffer_size": 6} if isinstance(encoder, Packs) else {}
    settings = {"encoder": encoder, "repeat": False, **packing}
    seen, state, announced = Counter(), None, 0
    for world_size, lanes, steps in ((1, None, 5), (5, None, 2), (3, 12, 4), (1, 7, 9999)):
        job = Job(path, world_size=world_size, lanes=lanes, **settings)
        if state is not None:
            caplog.clear()
            job.restored(state, relane=True)
            announced += sum(map(int, _numbers(caplog.text)))
        seen.update(part for b in job.take(steps) for key in b for part in key.split("+"))
        state = job.save()
    skipped = {f"{s}{n}" for s, n in _all_keys() if isinstance(encoder, Skips) and n % 5 == 3}
    expected = Counter({f"{s}{n}": repeats for s, n in _all_keys() if f"{s}{n}" not in skipped})
    again, left_out = (seen - expected).total(), (expected - seen).total()
    assert again <= announced
    assert left_out <= announced
    if isinstance(encoder, Keys) and type(encoder) is Keys and epochized:
        assert (again, left_out) == (0, 0)


def _all_keys():
    return [(name, n) for name, size in SIZES.items() for n in range(size)]


def _numbers(text):
    import re

    return re.findall(r"up to (\d+)", text)


def test_validation_begins_again_with_all_samples_after_a_change_of_lanes(folder):
    def loader(rank, world_size):
        dataset = get_val_dataset(
            folder / "a",
            split_part="train",
            worker_config=config(rank, world_size),
            batch_size=8,
            task_encoder=Keys(),
        )
        return get_savable_loader(dataset)

    whole = loader(0, 1)
    first = list(islice(iter(whole), 6))
    state = whole.state_dict()
    rest, passes = [], []
    for rank in range(3):
        part = loader(rank, 3)
        part.load_state_dict(state)
        rest += [key for batch in part for key in batch]
        passes += [key for batch in part for key in batch]
    done = [key for batch in first for key in batch]
    assert sorted(done + rest) == sorted(f"a{n}" for n in range(130))
    assert sorted(passes) == sorted(f"a{n}" for n in range(130))


@pytest.mark.slow
def test_other_weights_begin_in_all_lanes_of_a_stream_together(folder):
    limit = {"max_epochs": 2}

    def document(**weights):
        entries = [
            {"path": str(folder / name), "weight": weights.get(name, 1), **limit} for name in SIZES
        ]
        return {"splits": {"train": {"blend": entries}}}

    settings = {"batch_size": 1, "shuffle_buffer_size": 7}
    seen, state = [], None
    mixes = (document(), document(a=9), document(b=5, c=2), document(c=7))
    for mix, world_size, steps in zip(mixes, (1, 3, 2, 1), (30, 11, 9, 999), strict=True):
        job = Job(mix, world_size=world_size, lanes=24 if state is None else None, **settings)
        if state is not None:
            job.restored(state, strict=["mix"])
        seen += job.take(steps)
        state = job.save()
    assert Counter(key for (key,) in seen) == {f"{s}{n}": 2 for s, n in _all_keys()}


@pytest.mark.slow
def test_other_weights_begin_in_shared_streams_on_every_topology(folder):
    first, second = blend(folder, "a", "b"), blend(folder, "b", "c", b=1, c=3)
    run = Job(first, num_workers=2, encoder=Skips())
    run.take(50)
    state = run.save()
    run.close()
    expected = Job(second, encoder=Skips()).restored(state, strict=False).take(96)
    for world_size in (2, 3, 8):
        job = Job(second, encoder=Skips(), world_size=world_size).restored(state, strict=False)
        # The first batches of the ranks are those from number 50 on.
        found = job.take(96 // world_size, first=50)
        assert sorted(map(tuple, found)) == sorted(map(tuple, expected))
    # A second change, before every lane has given a batch with the first one.
    job = Job(second, encoder=Skips(), world_size=4).restored(state, strict=False)
    job.take(1)
    third = Job(first, encoder=Skips(), world_size=2).restored(job.save(), strict=False)
    assert len(third.take(40)) == 80


def test_other_weights_need_the_lanes_of_all_ranks_that_share_a_stream(folder):
    first, second = blend(folder, "a", "b"), blend(folder, "a", "b", a=5)
    run = Job(first, encoder=Skips())
    run.take(30)
    halves = Job(first, world_size=2, encoder=Skips()).restored(run.save())
    halves.take(5)
    part = halves.save()[0]
    loader = Job(second, world_size=2, encoder=Skips()).loaders[0]
    with pytest.raises(StateError, match="another mix begins in lanes .* together"):
        loader.restore_state_rank(part, strict=False)
    loader = Job(first, world_size=2, encoder=Skips()).loaders[0]
    loader.restore_state_rank(part)


def test_states_of_a_run_with_one_lane_for_each_worker_go_on_as_before(folder):
    """What was saved before lanes shared streams has as many streams as lanes."""
    old = Job(folder / "a", lanes=3)
    expected = old.take(60)
    old = Job(folder / "a", lanes=3)
    old.take(20)
    (state,) = old.save()
    assert "streams" not in state["fingerprint"]
    assert Job(folder / "a", num_workers=0).restored([state]).take(40) == expected[20:]
    halves = Job(folder / "a", world_size=2, num_workers=2)
    halves.restored([state], relane=True)
    assert halves.loaders[0].config()["lanes"] == 24
    halves.close()
