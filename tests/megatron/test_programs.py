"""Programs as they are written for Megatron-Energon, under its import path."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import pytest
import torch

from megatron.energon import (
    Batch,
    Cooker,
    DefaultTaskEncoder,
    Sample,
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
from megatron.energon.errors import FatalSampleError
from megatron.energon.task_encoder.base import TaskEncoder
from tests.datasets import make_crude


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
    assert about.paths == [str(root)]
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
