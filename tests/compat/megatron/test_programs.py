"""Programs as they are written for Megatron-Energon, under its import path."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import pytest
import torch

from megatron.energon import (
    BaseWebdatasetFactory,
    Batch,
    BlendDataset,
    Cooker,
    DefaultTaskEncoder,
    EpochizeDataset,
    RepeatDataset,
    Sample,
    SampleDecoder,
    SkipSample,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    batch_pad_stack,
    cooker,
    edataclass,
    generic_batch,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_datasets,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError
from megatron.energon.task_encoder.base import TaskEncoder
from tests.datasets import jpeg, make_crude, write_shard


@edataclass
class EncodedText(Sample):
    tokens: torch.Tensor


@edataclass
class TextBatch(Batch):
    tokens: torch.Tensor


@dataclass
class PlainBatch:
    __key__: list[str]
    tokens: torch.Tensor


@stateless
@cooker(need_primary=True)
def cook_text(sample: dict, primary) -> TextSample:
    assert primary.get(".txt", sample) == sample["txt"]
    return TextSample(**basic_sample_keys(sample), text=f">{sample['txt']}<")


class TextEncoder(DefaultTaskEncoder[TextSample, EncodedText, TextBatch, TextBatch]):
    cookers = [Cooker(cook_text)]  # noqa: RUF012 - as programs have it

    @stateless(restore_seeds=True, failure_tolerance=200)
    def encode_sample(self, sample: TextSample) -> EncodedText:
        if sample.text.endswith("7<"):
            raise SkipSample
        noise = torch.rand(1).mul(256).long()
        tokens = torch.cat([torch.tensor(list(sample.text.encode())), noise])
        return EncodedText.derive_from(sample, tokens=tokens)

    @stateless
    def batch(self, samples: list[EncodedText]) -> TextBatch:
        return TextBatch.from_samples(samples)


class PackingTextEncoder(DefaultTaskEncoder):
    cookers = [Cooker(cook_text, has_subflavors={})]  # noqa: RUF012 - as programs have it

    def __init__(self, length: int):
        super().__init__(batch_type=PlainBatch)
        self.length = length

    @stateless
    def preencode_sample(self, sample: TextSample) -> TextSample:
        return sample

    def select_samples_to_pack(self, samples: list[TextSample]) -> list[list[TextSample]]:
        groups, room = [[]], self.length
        for sample in samples:
            if len(sample.text) > room:
                groups.append([])
                room = self.length
            groups[-1].append(sample)
            room -= len(sample.text)
        return groups

    @stateless
    def postencode_sample(self, sample: TextSample) -> EncodedText:
        return EncodedText.derive_from(sample, tokens=torch.tensor(list(sample.text.encode())))

    @stateless
    def pack_selected_samples(self, samples: list[EncodedText]) -> EncodedText:
        tokens = torch.cat([sample.tokens for sample in samples])
        return EncodedText.derive_from(samples[0], tokens=tokens)


class OwnBatches(TaskEncoder):
    def batch(self, samples):
        return self._batch(samples, actions={"txt": len}, default_action=generic_batch)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("crude") / "texts", [15, 28, 17])


def config(num_workers=0):
    return WorkerConfig(rank=0, world_size=1, num_workers=num_workers)


@pytest.mark.slow
def test_batches_and_pipelines_answer_what_programs_ask(root):
    dataset = get_train_dataset(
        root, worker_config=config(3), batch_size=7, task_encoder=OwnBatches()
    )
    assert dataset.len_rank() == len(dataset) == 9
    assert [dataset.len_worker(worker) for worker in range(3)] == [3, 3, 3]
    assert dataset.can_restore_sample()
    assert dataset.worker_has_samples()
    with get_savable_loader(dataset) as loader:
        batches = iter(loader)
        assert next(batches)["txt"] == 7
        state = loader.save_state(0)
        expected = [next(batches)["__key__"] for _ in range(4)]
    with get_savable_loader(dataset) as resumed:
        resumed.restore_state(state)
        assert [batch["__key__"] for batch in islice(resumed, 4)] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_program_that_trains_and_saves_its_loader(root, num_workers):
    def loader():
        dataset = get_train_dataset(
            root,
            worker_config=config(num_workers),
            batch_size=4,
            shuffle_buffer_size=10,
            max_samples_per_sequence=5,
            task_encoder=TextEncoder(),
        )
        return get_savable_loader(dataset, checkpoint_every_sec=0, n_checkpoints=5)

    with loader() as first:
        batches = list(islice(first, 6))
        state = first.save_state_rank()
        expected = list(islice(first, 4))
        assert first.can_restore_sample()
        again = first.restore_sample(batches[2].__restore_key__)
    assert torch.equal(again.tokens, batches[2].tokens)
    with loader() as second:
        second.restore_state_rank(state)
        for batch, wanted in zip(second, expected, strict=False):
            assert batch.__key__ == wanted.__key__
            assert torch.equal(batch.tokens, wanted.tokens)


def test_a_program_that_packs(root):
    dataset = get_train_dataset(
        root,
        worker_config=config(),
        batch_size=2,
        packing_buffer_size=20,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=PackingTextEncoder(64),
    )
    with get_loader(dataset) as loader:
        for batch in islice(loader, 10):
            assert isinstance(batch, PlainBatch)
            assert batch.tokens.shape[0] == 2
            assert 48 < batch.tokens.shape[1] <= 64


def test_a_program_that_validates_dataset_by_dataset(root):
    ((dataset, about),) = get_val_datasets(
        root, worker_config=config(), batch_size=10, task_encoder=OwnBatches()
    )
    assert about.paths == [about.path] == [EPath(root)]
    assert str(about).endswith(f"(path={root})")
    with get_loader(dataset) as loader:
        assert [batch["txt"] for batch in loader] == [10] * 6


def test_a_program_that_is_misspelled_ends_with_the_cause(root):
    class Misspelled(TextEncoder):
        def batch(self, samples):
            return batch_pad_stack([sample.token for sample in samples], paddign=1)

    dataset = get_train_dataset(
        root, worker_config=config(), batch_size=4, task_encoder=Misspelled()
    )
    with get_loader(dataset) as loader, pytest.raises(FatalSampleError, match="token"):
        next(iter(loader))


class OwnBlend(TextEncoder):
    """A pipeline as programs of older versions build it: without arguments that came later."""

    def build_train_datasets(
        self,
        *,
        datasets,
        worker_config,
        batch_size,
        batch_drop_last=False,
        packing_buffer_size=None,
        virtual_epoch_length=0,
        shuffle_buffer_size=None,
    ):
        pairs = [
            (RepeatDataset(dataset.build(), worker_config=worker_config), weight)
            for dataset, weight in datasets
        ]
        dataset = BlendDataset(*pairs, worker_config=worker_config)
        dataset = self.build_encode_sample(dataset, worker_config=worker_config)
        dataset = self.build_batch(
            dataset,
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            worker_config=worker_config,
        )
        if virtual_epoch_length > 0:
            dataset = EpochizeDataset(
                dataset, length=virtual_epoch_length, worker_config=worker_config
            )
        return dataset


def test_a_program_that_blends_by_itself(root):
    dataset = get_train_dataset(
        {"splits": {"train": {"blend": [{"weight": 3, "path": str(root)}, {"path": str(root)}]}}},
        worker_config=config(),
        batch_size=4,
        shuffle_buffer_size=10,
        max_samples_per_sequence=5,
        virtual_epoch_length=6,
        task_encoder=OwnBlend(),
    )
    with get_loader(dataset) as loader:
        assert [[len(batch.__key__) for batch in loader] for _ in range(2)] == [[4] * 6] * 2


@dataclass
class RawTexts(Batch):
    text: list[str]


@dataclass
class TokenizedTexts(Batch):
    tokens: torch.Tensor
    mask: torch.Tensor


class Tokenizing(DefaultTaskEncoder[TextSample, TextSample, RawTexts, TokenizedTexts]):
    """Batches are plain dataclasses; the hook that selects empties its list."""

    cookers = [Cooker(cook_text)]  # noqa: RUF012 - as programs have it

    def __init__(self, max_length: int = 40):
        super().__init__(batch_type=RawTexts)
        self.max_length = max_length

    def encode_sample(self, sample: TextSample) -> TextSample:
        sample.text = sample.text.upper()
        return sample

    def select_samples_to_pack(self, samples: list[TextSample]) -> list[list[TextSample]]:
        samples.sort(key=lambda sample: len(sample.text))
        groups = []
        while samples:
            group, length = [samples.pop(0)], 0
            while samples and length + len(samples[0].text) < self.max_length:
                length += len(samples[0].text)
                group.append(samples.pop(0))
            groups.append(group)
        return groups

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> TextSample:
        return TextSample(
            __key__=",".join(sample.__key__ for sample in samples),
            __restore_key__=(),
            text="".join(sample.text for sample in samples),
        )

    def batch(self, samples: list[TextSample]) -> RawTexts:
        return RawTexts.from_samples(samples)

    def encode_batch(self, batch: RawTexts) -> TokenizedTexts:
        tokens = batch_pad_stack([torch.tensor(list(text.encode())) for text in batch.text])
        return TokenizedTexts.derive_from(batch, tokens=tokens, mask=tokens > 0)


def test_a_program_that_packs_and_tokenizes_batches(root):
    dataset = get_train_dataset(
        root,
        worker_config=config(),
        batch_size=3,
        packing_buffer_size=20,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Tokenizing(),
    )
    with get_savable_loader(dataset) as loader:
        batches = list(islice(loader, 6))
        assert all(isinstance(batch, TokenizedTexts) for batch in batches)
        assert batches[0].tokens.shape == batches[0].mask.shape
        assert bytes(batches[0].tokens[0][batches[0].mask[0]].tolist()).startswith(b">TEXT ")
        again = loader.restore_sample(batches[4].__restore_key__)
    assert torch.equal(again.tokens, batches[4].tokens)


@pytest.mark.parametrize("with_rank", [True, False])
def test_a_program_that_saves_with_torch(root, tmp_path, with_rank):
    def my_loader():
        return get_savable_loader(
            get_train_dataset(
                root,
                batch_size=4,
                shuffle_buffer_size=100,
                max_samples_per_sequence=100,
                worker_config=config(1),
                task_encoder=TextEncoder(),
            )
        )

    with my_loader() as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.save_state_rank() if with_rank else loader.save_state_global(dst_rank=0)
        torch.save(state, tmp_path / "state.pth")
        expected = next(batches)
    loader = my_loader()
    state = torch.load(tmp_path / "state.pth")
    if with_rank:
        loader.restore_state_rank(state)
    else:
        loader.restore_state_global(state, src_rank=None)
    with loader:
        assert next(iter(loader)).__key__ == expected.__key__


class PortraitsAndLandscapes(DefaultTaskEncoder):
    decoder = SampleDecoder(image_decode="pilrgb")

    def batch_group_criterion(self, sample):
        width, height = sample.image.size
        return ("portrait" if width < height else "landscape"), 2

    def batch(self, samples):
        return [sample.image.size for sample in samples]


def test_a_program_that_groups_by_shape(tmp_path):
    shapes = [(8, 12), (12, 8), (16, 4)]
    samples = [(f"s{n}", {"jpg": jpeg(n, size=shapes[n % 3]), "txt": b"text"}) for n in range(12)]
    write_shard(tmp_path / "0.tar", samples)
    parts = BaseWebdatasetFactory.prepare_dataset(
        tmp_path, ["0.tar"], split_parts_ratio=[("train", 1), ("val", 0)], workers=1
    )
    assert parts == {"jpg", "txt"}
    (tmp_path / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\n"
        "field_map:\n  image: jpg\n  caption: txt\n"
    )
    dataset = get_train_dataset(
        tmp_path, worker_config=config(), batch_size=None, task_encoder=PortraitsAndLandscapes()
    )
    with get_loader(dataset) as loader:
        for batch in islice(loader, 8):
            assert len(batch) == 2
            assert len({width < height for width, height in batch}) == 1
