"""One global order, whoever loads, and after any restore."""

from __future__ import annotations

import json
import random

import pytest
import torch

from energon import (
    CaptioningSample,
    DefaultTaskEncoder,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from tests.datasets import make_captions
from tests.effort import some
from tests.source_modules import source_modules

LANES = 8
BATCH_SIZE = 3
TOPOLOGIES = [(1, 0), (1, 2), (1, 3), (2, 1), (4, 2), (8, 0)]
NUM_BATCHES = 96


class Encoder(DefaultTaskEncoder):
    """Skips some samples and augments the others at random, one hook with restored seeds."""

    @stateless(restore_seeds=True)
    def encode_sample(self, sample):
        if sample.caption.endswith("7"):
            raise SkipSample
        noise = torch.rand(sample.image.shape)
        return CaptioningSample.derive_from(
            sample, image=sample.image + noise, caption=f"{sample.caption} {random.random()}"
        )

    def encode_batch(self, batch):
        # Not marked at all, and still the same everywhere.
        batch.image = batch.image * random.random()
        return batch


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    root = tmp_path_factory.mktemp("blend")
    make_captions(root / "large", [40, 25, 60], prefix="l")
    make_captions(root / "small", [20, 17], prefix="m")
    make_captions(root / "tiny", [5], prefix="t")
    path = root / "blend.yaml"
    path.write_text(
        "__module__: megatron.energon\n"
        "__class__: MetadatasetV2\n"
        "splits:\n"
        "  train:\n"
        "    blend:\n"
        "      - {path: large, weight: 5, subflavors: {kind: large}}\n"
        "      - {path: small, weight: 2}\n"
        "      - {path: tiny, weight: 1}\n"
    )
    return path


def open_rank(path, rank, world_size, num_workers, lanes=LANES):
    config = WorkerConfig(
        rank=rank, world_size=world_size, num_workers=num_workers, lanes=lanes, seed_offset=11
    )
    dataset = get_train_dataset(
        path,
        worker_config=config,
        batch_size=BATCH_SIZE,
        shuffle_buffer_size=10,
        max_samples_per_sequence=4,
        task_encoder=Encoder(),
    )
    return get_savable_loader(dataset)


class Run:
    """All ranks of a job, from the global batch `start` on."""

    def __init__(self, path, topology, *, start=0, state=None, lanes=LANES):
        world_size, num_workers = topology
        self.loaders = [
            open_rank(path, rank, world_size, num_workers, lanes) for rank in range(world_size)
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        self.ranks = [iter(loader) for loader in self.loaders]
        self.at = start

    def take(self, count):
        batches = []
        for _ in range(count):
            batch = next(self.ranks[self.at % len(self.ranks)])
            pixels = batch.image.numpy().tobytes()
            batches.append((batch.__key__, batch.caption, batch.__subflavors__, pixels))
            self.at += 1
        return batches

    def save(self):
        return [loader.save_state_rank() for loader in self.loaders]

    def close(self):
        for loader in self.loaders:
            loader.close()


@pytest.fixture(scope="module")
def expected(blend):
    run = Run(blend, (1, 0))
    batches = run.take(NUM_BATCHES)
    run.close()
    return batches


def test_all_leaves_and_augmentations_are_there(expected):
    keys = [key for batch in expected for key in batch[0]]
    assert {key[0] for key in keys} == {"l", "m", "t"}
    assert not [key for key in keys if key.endswith("7")]
    assert len({batch[3] for batch in expected}) == NUM_BATCHES


@pytest.mark.slow
@pytest.mark.parametrize("topology", some(TOPOLOGIES[1:], 2))
def test_a_fresh_run_has_the_same_global_batches_on_any_topology(blend, expected, topology):
    run = Run(blend, topology)
    try:
        assert run.take(NUM_BATCHES) == expected
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_saving_anywhere_and_resuming_elsewhere_goes_on_exactly(blend, expected):
    """Many saves at random steps, each resumed on another topology; some a single step apart."""
    choose = random.Random(4)
    state, at, topology = None, 0, (1, 0)
    times = 6
    for number in range(times):
        run = Run(blend, topology, start=at, state=state)
        try:
            step = 1 if number % 5 == 4 else choose.randint(1, NUM_BATCHES // times)
            assert run.take(step) == expected[at : at + step], (number, topology, at)
            at += step
            state = run.save()
        finally:
            run.close()
        assert len(json.dumps(state)) < 10_000
        topology = choose.choice([other for other in TOPOLOGIES if other != topology])


def test_saving_right_after_a_restore_saves_the_same_position(blend):
    run = Run(blend, (1, 2))
    run.take(13)
    saved = run.save()
    run.close()
    again = Run(blend, (1, 3), start=13, state=saved)
    try:
        assert [s["positions"] for s in again.save()] == [s["positions"] for s in saved]
    finally:
        again.close()


def test_lanes_are_taken_from_the_state_where_none_are_asked_for(blend, expected):
    run = Run(blend, (2, 0))
    run.take(6)
    state = run.save()
    run.close()
    resumed = Run(blend, (4, 0), start=6, state=state, lanes=None)
    try:
        assert resumed.take(20) == expected[6:26]
    finally:
        resumed.close()


SHUFFLES = {"permutation", "permute", "permuted", "shuffle", "shuffled", "unpermute", "unpermuted"}
"""Functions, of ours and of others, that put things into a random order."""
NOT_OF_A_RUN = {
    "decode/images.py": "Tensor.permute swaps dimensions",
    "cli/tar_commands.py": "writes samples in another order",
    "prepare/splits.py": "divides shards into splits",
    "prepare/writers/pack.py": "writes samples in another order",
}
ASKED_FOR = ("webdataset/", "compat/megatron/")
"""Shuffle buffers of streams, and those that a program for Megatron-Energon builds itself."""


def test_no_other_place_than_the_plan_decides_an_order():
    allowed = tuple(f"energon/{path}" for path in ("plan/", *ASKED_FOR))
    found = {
        module.path.removeprefix("energon/")
        for module in source_modules()
        if module.called & SHUFFLES and not module.path.startswith(allowed)
    }
    assert found == set(NOT_OF_A_RUN)
