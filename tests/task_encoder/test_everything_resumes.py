"""Pipelines with everything in them continue from any batch, on any topology.

Crude data with a generator as cooker, auxiliary and primary files, a cache; a join; a typed
dataset. Encoded by a generator, packed with carry-over, batched in groups or by number, by
hooks that skip, fail, draw random numbers and yield several.
"""

from __future__ import annotations

import json
import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon import (
    Batch,
    Cooker,
    DefaultTaskEncoder,
    FileStoreCachePool,
    Lazy,
    Sample,
    SkipSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon.packing import Packer
from energon.prepare.dataset import prepare_dataset
from tests.datasets import make_crude, write_shard
from tests.effort import some

LANES = 4
MAX_STATE_BYTES = 64 << 10


@edataclass
class Joined(Sample):
    text: str
    other: str | None


def join(texts, others):
    other = None if others is None else others["txt"]
    return Joined(**basic_sample_keys(texts), text=texts["txt"], other=other)


@edataclass
class Words(Sample):
    words: list
    media: Lazy | None = None
    draw: float = 0.0


@edataclass
class WordsBatch(Batch):
    words: list
    draw: float


@stateless(failure_tolerance=0)
@cooker(need_primary=True, need_cache=True)
def cook(sample, media, texts, primary, cache):
    """Yield as many samples as the number of the sample says: none, one or two."""
    number = int(sample["__key__"][1:])
    if number % 9 == 4:
        raise ValueError("this one fails")
    for copy in range(number % 3):
        own = primary.get(".json", sample)
        yield Words(
            **basic_sample_keys(sample),
            words=[own["text"], texts.get(own["text"], sample), copy, random.random()],
            media=cache.get_lazy(media, own["media"]),
        )


class Everything(DefaultTaskEncoder):
    cookers = (Cooker(cook, has_subflavors={"kind": "crude"}),)
    packer = Packer(10, lambda sample: len(sample.words))

    def __init__(self, *, encode=False, batches=False, packs=False, carry=True):
        super().__init__()
        self.encode_several = encode
        self.batch_several = batches
        self.pack_several = packs
        self.packer = Packer(10, lambda sample: len(sample.words), carry=carry)

    def preencode_sample(self, sample):
        if isinstance(sample, Words):
            return sample
        if random.random() < 0.1:
            raise SkipSample
        text = [sample.text, getattr(sample, "other", None), random.random()]
        found = Words.derive_from(sample, words=text)
        return self._several(found) if self.encode_several else found

    def _several(self, sample):
        for number in range(random.randrange(3)):
            yield Words.extend(sample, words=[*sample.words, number, random.random()])

    def select_samples_to_pack(self, samples):
        return self.packer(samples)

    def postencode_sample(self, sample):
        media = [] if sample.media is None else [sample.media.get(sample)]
        return Words.extend(sample, words=sample.words + media, media=None, draw=random.random())

    def pack_selected_samples(self, samples):
        if self.pack_several:
            return (self._pack(part) for part in (samples[::2], samples[1::2]) if part)
        return self._pack(samples)

    def _pack(self, samples):
        words = [word for sample in samples for word in sample.words]
        return Words.derive_from(samples[0], words=words, draw=sum(s.draw for s in samples))

    def batch(self, samples):
        draw = sum(sample.draw for sample in samples) + random.random()
        return WordsBatch.from_samples(samples, words=[s.words for s in samples], draw=draw)

    def encode_batch(self, batch):
        if self.batch_several:
            return (WordsBatch.extend(batch, draw=batch.draw + n) for n in range(2))
        return batch


class Grouped(Everything):
    def batch_group_criterion(self, sample):
        return (len(sample.words) % 3, "words"), None


@dataclass(frozen=True)
class Pipeline:
    """What is between the data and the batches."""

    split: str = "train"
    grouped: bool = False
    packed: bool = True
    carry: bool = True
    encode: bool = True
    batches: bool = True
    packs: bool = True
    batch_size: int = 2

    def dataset(self, folder, worker_config):
        encoder = (Grouped if self.grouped else Everything)(
            encode=self.encode, batches=self.batches, packs=self.packs, carry=self.carry
        )
        return get_train_dataset(
            folder / "everything.yaml",
            split_part=self.split,
            worker_config=worker_config,
            batch_size=self.batch_size,
            packing_buffer_size=9 if self.packed else None,
            shuffle_buffer_size=7,
            max_samples_per_sequence=3,
            task_encoder=encoder,
            allow=("code",),
        )


@dataclass(frozen=True)
class Topology:
    """Who loads."""

    world_size: int = 1
    num_workers: int = 0
    workers: str = "thread"


class Run:
    """All ranks of a run, from the beginning or a state on."""

    def __init__(self, folder, pipeline, topology, states=None):
        self.stack = ExitStack()
        cache = tempfile.TemporaryDirectory()
        self.stack.enter_context(cache)
        self.loaders = []
        for rank in range(topology.world_size):
            worker_config = WorkerConfig(
                rank=rank,
                world_size=topology.world_size,
                num_workers=topology.num_workers,
                lanes=LANES,
                seed_offset=5,
                global_error_handler=ignore,
            )
            pool = FileStoreCachePool(parent_cache_dir=cache.name, num_workers=1)
            self.stack.callback(pool.close)
            loader = get_savable_loader(
                pipeline.dataset(folder, worker_config), workers=topology.workers, cache_pool=pool
            )
            self.loaders.append(self.stack.enter_context(loader))
            if states is not None:
                loader.restore_state_global(json.loads(states))

    def __enter__(self):
        self.streams = [iter(loader) for loader in self.loaders]
        return self

    def __exit__(self, *error):
        self.stack.close()

    def take(self, count):
        """Batches of all ranks, in the order of the run."""
        size = len(self.streams)
        return [
            content(batch)
            for _ in range(-(-count // size))
            for batch in islice((next(stream) for stream in self.streams), size)
        ]

    def save(self):
        states = [loader.save_state_rank() for loader in self.loaders]
        assert all(len(json.dumps(state)) <= MAX_STATE_BYTES for state in states)
        return json.dumps(states)


def ignore(error, sample, sources):
    """Failures are part of the data."""


def content(batch):
    return batch.words, batch.draw, batch.__key__, batch.__restore_key__


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("everything")
    names = [
        (f"c{n}", {"json": json.dumps({"media": f"m{n % 5}.bin", "text": f"{n}.txt"}).encode()})
        for n in range(25)
    ]
    write_shard(root / "crude" / "0.tar", names[:14])
    write_shard(root / "crude" / "1.tar", names[14:])
    write_shard(root / "media" / "0.tar", [(f"m{n}", {"bin": bytes([n] * 9)}) for n in range(5)])
    write_shard(root / "typed" / "0.tar", [(f"t{n}", {"txt": b"t%d" % n}) for n in range(12)])
    for name in ("crude", "media"):
        prepare_dataset(root / name, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    field_map = {"text": "txt"}
    prepare_dataset(
        root / "typed", split_parts=["train:.*"], sample_type="TextSample", field_map=field_map
    )
    make_crude(root / "left", [8, 9])
    make_crude(root / "right", [6, 6])
    (root / "texts").mkdir()
    for n in range(25):
        (root / "texts" / f"{n}.txt").write_text(f"text {n}")
    (root / "everything.yaml").write_text(document())
    return root


def document():
    crude = {
        "path": "crude",
        "split_part": "train",
        "aux": {"media": "./media", "texts": "filesystem://./texts"},
        "subflavors": {"kind": "crude"},
    }
    joined = {
        "join": [
            {"path": "left", "split_part": "train"},
            {"path": "right", "split_part": "train", "nonmatch": "none"},
        ],
        "joiner": {"__module__": __name__, "__function__": "join"},
    }
    typed = {"path": "typed", "split_part": "train"}
    parts = (crude, joined, typed)
    splits = {
        "train": {
            "blend": [{"weight": w, **part} for w, part in zip((4, 2, 1), parts, strict=True)]
        },
        "epochs": {
            "blend_epochized": [
                {"repetitions": r, **part} for r, part in zip((1, 2, 1.5), parts, strict=True)
            ]
        },
    }
    return json.dumps(
        {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    )


KINDS = {
    "packs in batches": Pipeline(),
    "packs in groups": Pipeline(grouped=True),
    "samples in groups": Pipeline(packed=False, grouped=True, batch_size=3),
    "samples in batches": Pipeline(packed=False, batch_size=3),
    "closed windows of epochs": Pipeline(split="epochs", carry=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(list(KINDS), 2))
def test_a_run_continues_from_every_batch(folder, kind):
    pipeline, total = KINDS[kind], 12
    states, expected = [], []
    with Run(folder, pipeline, Topology()) as run:
        for _ in range(total):
            states.append(run.save())
            expected += run.take(1)
    for at, state in some([*enumerate(states)], 3):
        with Run(folder, pipeline, Topology(), state) as run:
            assert run.save() == state
            assert run.take(total - at) == expected[at:]


# One thread at most: all threads of a process share the global random generators.
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_is_made_again_by_its_key(folder, kind):
    with Run(folder, KINDS[kind], Topology()) as run:
        (loader,) = run.loaders
        for batch in islice(run.streams[0], 12):
            key = json.loads(json.dumps(batch.__restore_key__))
            assert content(loader.restore_sample(key)) == content(batch)


TOPOLOGIES = st.sampled_from([Topology(1), Topology(1, 1), Topology(2), Topology(4)])
PIPELINES = st.builds(
    Pipeline,
    split=st.sampled_from(["train", "epochs"]),
    grouped=st.booleans(),
    packed=st.booleans(),
    carry=st.booleans(),
    encode=st.booleans(),
    batches=st.booleans(),
    packs=st.booleans(),
    batch_size=st.integers(1, 3),
)
LEGS = st.lists(st.tuples(TOPOLOGIES, st.integers(0, 5)), min_size=2, max_size=4)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(pipeline=PIPELINES, legs=LEGS)
def test_a_run_goes_on_from_topology_to_topology(folder, pipeline, legs):
    travel(folder, pipeline, [(topology, LANES * steps) for topology, steps in legs])


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(["packs in groups", "samples in batches"], 2))
def test_a_run_goes_on_from_processes_to_processes(folder, kind):
    processes = Topology(num_workers=2, workers="process")
    legs = [(processes, 3), (Topology(), 1), (Topology(2, 1, "process"), 4), (Topology(), 3)]
    travel(folder, KINDS[kind], legs)


def travel(folder, pipeline, legs):
    """Check that a run that changes its topology after each leg is that of one process."""
    total = sum(count for _, count in legs)
    with Run(folder, pipeline, Topology()) as run:
        expected = run.take(total)
    done, states = 0, None
    for topology, count in legs:
        with Run(folder, pipeline, topology, states) as run:
            assert run.take(count) == expected[done : done + count]
            states = run.save()
        done += count
