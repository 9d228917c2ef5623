"""A whole run in the pattern of trainers that were written for Megatron-Energon 5."""

from __future__ import annotations

import dataclasses
from itertools import islice

import torch
from common import config, document
from runs import go_on_in_forks, number, opened, whole_run


def subflavor_run(energon, folder, workers, state=None):
    """Samples with a subflavor, a blend built of pairs, batches whose fields are taken apart."""

    @dataclasses.dataclass
    class Task(energon.Sample):
        __key__: str
        __restore_key__: tuple
        __subflavor__: str
        __subflavors__: dict
        tokens: torch.Tensor

    @dataclasses.dataclass
    class TaskBatch(energon.Batch):
        __keys__: list
        __subflavors__: list
        tokens: torch.Tensor

    @energon.stateless
    def cook(sample):
        return energon.TextSample(**energon.basic_sample_keys(sample), text=sample["txt"])

    class Encoder(energon.DefaultTaskEncoder):
        cookers = [  # noqa: RUF012
            energon.Cooker(cook, has_subflavors={"of": "texts"}),
            energon.Cooker(cook, has_subflavors={"of": "more"}),
        ]

        def __init__(self):
            super().__init__(batch_type=TaskBatch)

        def build_cook_crude_sample(self, dataset, *, worker_config):
            return super().build_cook_crude_sample(dataset, worker_config=worker_config)

        def build_train_datasets(self, *, datasets, worker_config, batch_size, **settings):
            branches = [
                (energon.RepeatDataset(dataset.build(), worker_config=worker_config), weight)
                for dataset, weight in datasets
            ]
            samples = energon.BlendDataset(*branches, worker_config=worker_config)
            samples = self.build_cook_crude_sample(samples, worker_config=worker_config)
            samples = self.build_encode_sample(samples, worker_config=worker_config)
            return self.build_batch(
                samples, batch_size=batch_size, batch_drop_last=True, worker_config=worker_config
            )

        @energon.stateless(restore_seeds=True)
        def encode_sample(self, sample):
            return Task(
                __key__=sample.__key__,
                __restore_key__=sample.__restore_key__,
                __subflavor__=None,
                __subflavors__=sample.__subflavors__,
                tokens=torch.full((3,), number(sample.text)),
            )

        def batch(self, samples):
            return TaskBatch(
                __keys__=[sample.__key__ for sample in samples],
                __subflavors__=[sample.__subflavors__["of"] for sample in samples],
                tokens=torch.stack([sample.tokens for sample in samples]),
            )

        def encode_batch(self, batch):
            raw = dict(vars(batch))
            del raw["__subflavors__"]
            return {**raw, "of": batch.__subflavors__}

    parts = [
        {"weight": 1, "path": "./texts", "subflavors": {"of": "texts"}},
        {"weight": 1, "path": "./more", "subflavors": {"of": "more"}},
    ]
    path = document(folder, "older", __class__="Metadataset", splits={"train": {"datasets": parts}})
    dataset = energon.get_train_dataset(
        path,
        worker_config=config(energon, workers),
        batch_size=4,
        shuffle_buffer_size=None,
        max_samples_per_sequence=4,
        task_encoder=Encoder(),
    )
    loader = opened(energon, dataset, state)
    return loader, iter(loader), shown


def shown(batch):
    return list(batch["tokens"].shape), [batch["tokens"].tolist(), batch["of"]]


def check_a_run_written_for_version_5(energon, folder):
    """Also which samples of the two datasets come."""
    continued = whole_run(subflavor_run)(energon, folder)
    _, batches, _ = subflavor_run(energon, folder, 0)
    samples = set()
    for batch in islice(batches, 40):
        samples.update(zip(batch["of"], batch["tokens"][:, 0].tolist(), strict=True))
    return continued, sorted(samples)


if __name__ == "__main__":
    go_on_in_forks(globals())
