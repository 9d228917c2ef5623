"""What type checkers make of programs: mypy reads this file as well, see pyproject.toml."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, assert_type

from torch.utils.data import DataLoader

from energon import (
    Batch,
    CachePool,
    CrudeSample,
    DefaultTaskEncoder,
    FileStore,
    Lazy,
    Sample,
    SavableDataLoader,
    SavableDataset,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    edataclass,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
)
from energon.compat.megatron import encoder as compatible
from energon.compat.megatron import getters
from energon.compat.megatron.loaders import get_savable_loader as get_compatible_loader
from energon.webdataset import WebDataset
from tests.datasets import make_crude


@edataclass
class Line(Sample):
    text: str


@edataclass
class Lines(Batch):
    texts: list[str]


class TypedEncoder(DefaultTaskEncoder[dict[str, Any], Line, Lines, Lines]):
    def encode_sample(self, sample: dict[str, Any]) -> Line:
        return Line(**basic_sample_keys(sample), text=sample["txt"])

    def batch(self, samples: list[Line]) -> Lines:
        return Lines.from_samples(samples, texts=[sample.text for sample in samples])


class SingleEncoder(DefaultTaskEncoder[dict[str, Any], Line, Line, Line]):
    def encode_sample(self, sample: dict[str, Any]) -> Line:
        return Line(**basic_sample_keys(sample), text=sample["txt"])


class PlainEncoder(DefaultTaskEncoder):
    def encode_sample(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


class PlainCompatibleEncoder(compatible.DefaultTaskEncoder):
    def encode_sample(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


class DividingEncoder(DefaultTaskEncoder[dict[str, Any], Line, list[Line], list[str]]):
    def encode_sample(self, sample: dict[str, Any]) -> Iterator[Line]:
        for word in sample["txt"].split():
            yield Line(**basic_sample_keys(sample), text=word)

    def batch(self, samples: list[Line]) -> list[Line]:
        return samples

    def encode_batch(self, batch: list[Line]) -> list[str]:
        return [line.text for line in batch]


@edataclass
class Later(Sample):
    image: Lazy


@edataclass
class Pack(Sample):
    texts: list[str]


class PackingEncoder(DefaultTaskEncoder[CrudeSample, Line, Lines, Lines]):
    """Names the types that its hooks get: samples, packs of them, and batches of packs."""

    def encode_sample(self, sample: CrudeSample) -> Line:
        return Line(**basic_sample_keys(sample), text=sample["txt"])

    def select_samples_to_pack(self, samples: list[Line]) -> list[list[Line]]:
        return [samples]

    def pack_selected_samples(self, samples: list[Line]) -> Pack:
        return Pack.derive_from(samples[0], texts=[sample.text for sample in samples])

    def batch(self, samples: list[Pack]) -> Lines:
        return Lines.from_samples(samples, texts=[pack.texts[0] for pack in samples])


@cooker(need_cache=True)
def cook_later(sample: CrudeSample, media: FileStore, cache: CachePool) -> Later:
    return Later(**basic_sample_keys(sample), image=cache.get_lazy(media, sample["txt"]))


class Stateful(Protocol):
    """The protocol of torch.distributed.checkpoint, whose parameters have names."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


def test_batches_have_the_type_of_the_encoder(tmp_path: Path) -> None:
    root = make_crude(tmp_path / "ds", [6])
    encoder = TypedEncoder()
    train = get_train_dataset(root, worker_config=CONFIG, batch_size=2, task_encoder=encoder)
    assert_type(train, SavableDataset[Lines])
    with get_savable_loader(train) as loader:
        assert_type(loader, SavableDataLoader[Lines])
        batch = next(iter(loader))
        assert_type(batch, Lines)
        assert len(batch.texts) == 2
        state = loader.state_dict()
    resumed: Stateful = get_savable_loader(train)
    resumed.load_state_dict(state_dict=state)
    val = get_val_dataset(
        root, split_part="train", worker_config=CONFIG, batch_size=4, task_encoder=encoder
    )
    for batch in get_loader(val):
        assert_type(batch, Lines)
    for dataset, _ in get_val_datasets(
        root, split_part="train", worker_config=CONFIG, batch_size=4, task_encoder=encoder
    ):
        assert_type(dataset, SavableDataset[Lines])


def test_without_batches_the_last_type_is_that_of_samples(tmp_path: Path) -> None:
    root = make_crude(tmp_path / "ds", [6])
    encoder = SingleEncoder()
    single = get_train_dataset(root, worker_config=CONFIG, batch_size=None, task_encoder=encoder)
    assert_type(single, SavableDataset[Line])
    assert isinstance(next(iter(single)), Line)


def test_encoders_need_not_name_types(tmp_path: Path) -> None:
    root = make_crude(tmp_path / "ds", [6])
    plain = get_train_dataset(root, worker_config=CONFIG, batch_size=2, task_encoder=PlainEncoder())
    assert_type(plain, SavableDataset[Any])
    compatible_encoder = PlainCompatibleEncoder()
    old = getters.get_train_dataset(
        root, worker_config=CONFIG, batch_size=2, task_encoder=compatible_encoder
    )
    assert_type(old, SavableDataset[Any])
    default = get_train_dataset(root, worker_config=CONFIG, batch_size=2)
    loader: SavableDataLoader = get_savable_loader(default)
    assert_type(next(iter(loader)), Any)


def test_encoders_may_make_several_samples_of_one(tmp_path: Path) -> None:
    root = make_crude(tmp_path / "ds", [6])
    divided = get_train_dataset(
        root,
        worker_config=CONFIG,
        batch_size=2,
        task_encoder=DividingEncoder(),
        shuffle_over_epochs_multiplier=None,
    )
    assert_type(divided, SavableDataset[list[str]])
    assert next(iter(divided)) == ["text", "0"]


def test_packs_have_a_type_of_their_own(tmp_path: Path) -> None:
    root = make_crude(tmp_path / "ds", [6])
    encoder = PackingEncoder()
    packed = get_train_dataset(
        root, worker_config=CONFIG, batch_size=2, packing_buffer_size=2, task_encoder=encoder
    )
    assert_type(next(iter(packed)), Lines)
    assert len(next(iter(packed)).texts) == 2


def test_programs_for_megatron_energon_have_the_same_types(tmp_path: Path) -> None:
    root = make_crude(tmp_path / "ds", [6])
    encoder = TypedEncoder()
    train = getters.get_train_dataset(
        root, worker_config=CONFIG, batch_size=2, task_encoder=encoder
    )
    assert_type(train, SavableDataset[Lines])
    with get_compatible_loader(train) as loader:
        batch = next(iter(loader))
    assert_type(batch, Lines)
    assert len(batch.texts) == 2


def test_streams_are_datasets_to_torch(tmp_path: Path) -> None:
    make_crude(tmp_path / "ds", [2])
    stream = WebDataset([str(file) for file in tmp_path.rglob("*.tar")])
    loader = DataLoader(stream, batch_size=None)
    assert len(list(loader)) == 2
