"""Trainers of vision language models, as they are written for Megatron-LM."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import islice
from pathlib import Path

import torch
from common import config, cooked, document, flat, loader, train

LENGTH = 40


def packing(energon):
    """Return a task encoder with types of its own for samples, packs and batches."""

    @dataclasses.dataclass
    class Task(energon.Sample):
        tokens: torch.Tensor
        source: str

    @dataclasses.dataclass
    class Packed(energon.Sample):
        tokens: torch.Tensor
        lengths: list
        sources: list

    @dataclasses.dataclass
    class PackedBatch(energon.Batch):
        tokens: torch.Tensor
        lengths: list
        sources: list

    @energon.stateless
    def cook(sample):
        return cooked(energon, sample)

    class Encoder(energon.DefaultTaskEncoder[energon.TextSample, Packed, PackedBatch, dict]):
        cookers = (
            energon.Cooker(cook, has_subflavors={"of": "texts"}),
            energon.Cooker(cook, has_subflavors={"of": "more"}),
        )

        @energon.stateless(restore_seeds=True)
        def encode_sample(self, sample):
            number = int(sample.text.split()[1])
            if number % 5 == 4:
                raise energon.SkipSample
            tokens = torch.full((number % 9 + 5,), number)
            return Task.derive_from(sample, tokens=tokens, source=sample.text)

        def select_samples_to_pack(self, samples):
            groups, group, size = [], [], 0
            for sample in sorted(samples, key=lambda sample: -len(sample.tokens)):
                if size + len(sample.tokens) > LENGTH:
                    groups.append(group)
                    group, size = [], 0
                group.append(sample)
                size += len(sample.tokens)
            return [*groups, group]

        @energon.stateless
        def pack_selected_samples(self, samples):
            return Packed(
                __key__=",".join(sample.__key__ for sample in samples),
                __restore_key__=(),
                tokens=torch.cat([sample.tokens for sample in samples]),
                lengths=[len(sample.tokens) for sample in samples],
                sources=[sample.source for sample in samples],
            )

        @energon.stateless
        def batch(self, packs):
            pad = torch.nn.functional.pad
            return PackedBatch(
                __key__=[pack.__key__ for pack in packs],
                __restore_key__=[pack.__restore_key__ for pack in packs],
                tokens=torch.stack([pad(p.tokens, (0, LENGTH - len(p.tokens))) for p in packs]),
                lengths=[pack.lengths for pack in packs],
                sources=[pack.sources for pack in packs],
            )

        @energon.stateless
        def encode_batch(self, batch):
            fields = dataclasses.asdict(batch)
            return {name: fields[name] for name in ("__key__", "tokens", "lengths", "sources")}

    return Encoder()


def blend(folder):
    parts = [{"weight": 3, "path": "./texts"}, {"weight": 1, "path": "./more"}]
    splits = {
        split: {"blend": [{**part, "split_part": split} for part in parts]}
        for split in ("train", "val")
    }
    return document(folder, "trainer", __class__="MetadatasetV2", splits=splits)


def endless(batches):
    while True:
        yield from batches


def check_a_trainer_that_packs_and_resumes(energon, folder):
    def make():
        dataset = train(
            energon,
            blend(folder),
            workers=1,
            epoch=False,
            batch_size=2,
            packing_buffer_size=8,
            virtual_epoch_length=2,
            task_encoder=packing(energon),
        )
        return loader(energon, dataset)

    running = make()
    batches = endless(running)
    first = list(islice(batches, 3))
    path = Path(folder) / "train_dataloader_dprank000.pt"
    torch.save({"dataloader_state_dict": running.save_state_rank()}, path)
    expected = list(islice(batches, 3))
    resumed = make()
    resumed.restore_state_rank(torch.load(path, weights_only=False)["dataloader_state_dict"])
    found = list(islice(endless(resumed), 3))
    same = [
        (a["__key__"], a["sources"]) == (b["__key__"], b["sources"])
        for a, b in zip(expected, found, strict=True)
    ]
    every = first + expected
    fits = all(sum(lengths) <= LENGTH for batch in every for lengths in batch["lengths"])
    return same, fits, sorted(first[0]), {tuple(b["tokens"].shape) for b in every} == {(2, LENGTH)}


def check_a_trainer_that_validates_each_dataset_for_some_batches(energon, folder):
    where = config(energon, 2)
    found = []
    for dataset, source in energon.get_val_datasets(
        blend(folder),
        batch_size=1,
        packing_buffer_size=4,
        worker_config=where,
        task_encoder=packing(energon),
    ):
        repeated = energon.RepeatDataset(dataset, worker_config=where)
        limited = energon.LimitDataset(
            repeated, length=5, worker_config=where, reset_after_epoch=True
        )
        with_limit = energon.get_loader(limited, watchdog_timeout_seconds=None)
        counts = [len(list(with_limit)) for _ in range(2)]
        texts = flat(flat(batch["sources"] for batch in with_limit))
        found.append((source.path.name, source.paths[0].name, counts))
        found.append(sorted(Counter(text.split()[0] for text in texts)))
    return found
