"""Hooks that draw, skip and yield at random, in blends of any kind: resumed at every batch."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon import (
    DefaultTaskEncoder,
    Sample,
    SkipSample,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon.decode.sample_decoder import SampleDecoder
from energon.stages.hooks import random_state
from tests.datasets import make_captions, make_crude
from tests.task_encoder.runs import config, resumable, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blend")
    for name, count in (("a", 7), ("b", 5), ("c", 3)):
        make_crude(folder / name, [count], prefix=name)
    return folder


class Drawing(DefaultTaskEncoder):
    skips = False

    def preencode_sample(self, sample):
        if self.skips and random.random() < 0.4:
            raise SkipSample
        return {**sample, "draw": random.random()}

    def batch(self, samples):
        return [(sample["__key__"], sample["draw"]) for sample in samples], random.random()


class Skipping(Drawing):
    skips = True


class YieldingSamples(Drawing):
    def preencode_sample(self, sample):
        for _ in range(random.randrange(3)):
            yield {**sample, "draw": random.random()}


class YieldingBatches(Skipping):
    def encode_batch(self, batch):
        yield batch
        yield batch, random.random()


class YieldingBoth(YieldingSamples, YieldingBatches):
    pass


ENCODERS = [Drawing, Skipping, YieldingSamples, YieldingBatches, YieldingBoth]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    encoder=st.sampled_from(ENCODERS),
    blend=st.sampled_from(["samples", "batches", "repetitions", "repetitions once"]),
    batch_size=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_blends_with_random_hooks_resume_at_every_batch(
    folder, encoder, blend, batch_size, drop_last
):
    by_weight = blend in ("samples", "batches")
    kind, share = ("blend", "weight") if by_weight else ("blend_epochized", "repetitions")
    entries = [{"path": str(folder / name), share: 1 + (name == "a")} for name in "abc"]
    dataset = train(
        {"splits": {"train": {kind: entries}}},
        encoder(),
        batch_size=batch_size,
        batch_drop_last=drop_last,
        blend_unit="batch" if blend == "batches" else "sample",
        repeat=blend != "repetitions once",
    )
    resumable(dataset, limit=12)


GENERATORS = {
    "random": lambda encoder: random.random(),
    "numpy": lambda encoder: np.random.rand(),
    "torch": lambda encoder: float(torch.rand(1)),
    "current_rng": lambda encoder: encoder.current_rng.random(),
}


class DrawingNowAndThen(DefaultTaskEncoder):
    """Draws for few samples, so that most batches are made without seeding anything."""

    def __init__(self, *generators):
        super().__init__()
        self.generators = generators

    def encode_sample(self, sample):
        draws = int(sample["__key__"][1:]) % 6 == 5
        drawn = {name: GENERATORS[name](self) for name in self.generators} if draws else None
        return sample["__key__"], drawn

    def batch(self, samples):
        return samples


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_hooks_draw_the_same_numbers_on_any_number_of_ranks_and_after_any_restore(
    folder, generator
):
    def rank(number, world_size):
        worker_config = config(rank=number, world_size=world_size, lanes=4)
        return get_savable_loader(
            get_train_dataset(
                folder / "a",
                worker_config=worker_config,
                batch_size=2,
                task_encoder=DrawingNowAndThen(generator),
            )
        )

    found = {}
    for world_size in (1, 2, 4):
        ranks = [iter(rank(number, world_size)) for number in range(world_size)]
        found[world_size] = [next(ranks[batch % world_size]) for batch in range(40)]
    assert found[2] == found[4] == found[1]
    drawn = [draw[generator] for batch in found[1] for _, draw in batch if draw is not None]
    assert len(drawn) == len(set(drawn)) > 5
    state = None
    for batches in zip(found[1][::2], found[1][1::2], strict=True):
        with rank(0, 1) as loader:
            if state is not None:
                loader.restore_state_rank(state)
            assert [next(iter(loader)), next(iter(loader))] == list(batches)
            state = loader.save_state_rank()


@pytest.mark.parametrize(
    ("workers", "num_workers", "generators"),
    [
        ("process", 2, tuple(GENERATORS)),
        ("thread", 1, tuple(GENERATORS)),
        # Threads share the global generators, so several of them draw from `current_rng`.
        ("thread", 2, ("current_rng",)),
    ],
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_hooks_draw_the_same_numbers_from_each_generator_in_workers(
    folder, workers, num_workers, generators
):
    def taken(num_workers):
        dataset = get_train_dataset(
            folder / "a",
            worker_config=config(lanes=4, num_workers=num_workers),
            batch_size=2,
            task_encoder=DrawingNowAndThen(*generators),
        )
        with get_savable_loader(dataset, workers=workers, start_method="fork") as loader:
            return list(islice(loader, 40))

    expected = taken(0)
    assert taken(num_workers) == expected
    draws = [draw for batch in expected for _, draw in batch if draw is not None]
    for name in generators:
        assert len({draw[name] for draw in draws}) == len(draws) > 5


CODE = """
import random

def sample_loader(raw):
    return {"__key__": raw["__key__"], "text": random.random()}

def part_filter(part):
    return part == "txt"
"""


@edataclass
class Joined(Sample):
    text: float

    @classmethod
    def from_joined(cls, captions):
        return cls.derive_from(captions, text=random.random())


@pytest.mark.parametrize("code", ["decoder", "sample loader", "joiner"])
def test_what_makes_samples_draws_the_same_numbers_with_any_number_of_workers(
    tmp_path, folder, code
):
    encoder, path = DefaultTaskEncoder(), folder / "a"
    if code == "decoder":
        encoder.decoder = SampleDecoder(decoders={"txt": lambda data: random.random()})
    elif code == "sample loader":
        path = make_captions(
            tmp_path / "ds", [7], sample_type="TextSample", field_map=None, sample_loader=CODE
        )
    else:
        members = [{"path": str(make_captions(tmp_path / "ds", [7]))}]
        joiner = {"__module__": __name__, "__class__": "Joined"}
        path = {"splits": {"train": {"join": members, "joiner": joiner}}}

    def drawn(num_workers, seed):
        random.seed(seed)
        dataset = get_train_dataset(
            path,
            worker_config=config(lanes=4, num_workers=num_workers),
            batch_size=None,
            task_encoder=encoder,
            allow=("code",),
        )
        with get_savable_loader(dataset) as loader:
            return [each["txt"] if code == "decoder" else each.text for each in islice(loader, 20)]

    assert len(set(drawn(0, 0))) == 20
    assert drawn(0, 1) == drawn(2, 2) == drawn(0, 3)


class DrawingFromItsOwn(DefaultTaskEncoder):
    seeds_global_generators = False

    @stateless(restore_seeds=True)
    def encode_sample(self, sample):
        return sample["__key__"], self.current_rng.random()

    def batch(self, samples):
        return samples


@pytest.mark.parametrize("packs", [False, True])
def test_an_encoder_may_leave_the_global_generators_alone(folder, packs, monkeypatch):
    def drawn(encoder):
        sizes = {"packing_buffer_size": 4} if packs else {}
        return list(
            islice(get_savable_loader(train(folder / "a", encoder, batch_size=2, **sizes)), 9)
        )

    class Packing(DrawingFromItsOwn):
        def select_samples_to_pack(self, samples):
            return [samples]

        def pack_selected_samples(self, samples):
            yield samples, self.current_rng.random()

    encoder = (Packing if packs else DrawingFromItsOwn)()
    encoder.seeds_global_generators = True
    expected = drawn(encoder)
    monkeypatch.setattr(random_state, "_seed", lambda seed: pytest.fail("seeded"))
    encoder.seeds_global_generators = False
    assert drawn(encoder) == expected
