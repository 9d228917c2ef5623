"""Task encoders and loops of training recipes, in the way in which projects write them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path

import torch
from common import (
    config,
    cooked,
    copy,
    describe,
    document,
    encoder,
    flat,
    loader,
    raised,
    texts,
    train,
    val,
)


def tasks(energon):
    """Return a task encoder as the example of Megatron-LM has it, with one method per type."""

    @dataclass
    class Task(energon.Sample):
        __key__: str
        __restore_key__: tuple
        __subflavor__: dict
        __subflavors__: dict
        tokens: torch.Tensor
        total_len: int
        labels: torch.Tensor = None

    @dataclass
    class TaskBatch(energon.Batch):
        __keys__: list
        tokens: torch.Tensor
        total_len: list

    class Encoder(energon.DefaultTaskEncoder[object, object, TaskBatch, dict]):
        def __init__(self):
            super().__init__()
            self.seq_len = 12

        @energon.stateless(restore_seeds=True)
        def encode_sample(self, sample):
            if isinstance(sample, energon.CaptioningSample):
                yield self.captioning(sample)
            elif isinstance(sample, energon.TextSample):
                yield self.text(sample)
            else:
                raise NotImplementedError(f"Sample format {type(sample)} not supported")

        def captioning(self, sample):
            return self.task(sample, [0, sample.image["n"]])

        def text(self, sample):
            return self.task(sample, [1, *map(len, sample.text.split())])

        def task(self, sample, tokens):
            return Task(
                __key__=sample.__key__,
                __restore_key__=sample.__restore_key__,
                __subflavor__=None,
                __subflavors__=sample.__subflavors__,
                tokens=torch.tensor(tokens),
                total_len=len(tokens),
            )

        def batch(self, samples):
            tokens = torch.zeros((len(samples), self.seq_len), dtype=torch.int64)
            for row, sample in zip(tokens, samples, strict=True):
                row[: sample.total_len] = sample.tokens
            return TaskBatch(
                __key__=[sample.__key__ for sample in samples],
                __restore_key__=[sample.__restore_key__ for sample in samples],
                __subflavors__=samples[0].__subflavors__,
                __keys__=[sample.__key__ for sample in samples],
                tokens=tokens,
                total_len=[sample.total_len for sample in samples],
            )

        def encode_batch(self, batch):
            raw = dataclasses.asdict(batch)
            del raw["__subflavors__"]
            return raw

    return Encoder()


def check_task_samples_as_megatron_lm_has_them(energon, folder):
    dataset = val(energon, Path(folder) / "captions", batch_size=3, task_encoder=tasks(energon))
    found = list(loader(energon, dataset))
    return [
        [
            sorted(name for name in batch if name != "__sources__"),
            batch["__keys__"],
            batch["tokens"].tolist(),
            batch["total_len"],
        ]
        for batch in found
    ]


def check_a_data_module_that_saves_and_loads_states(energon, folder):
    """A module that opens loaders late, and exchanges states with a trainer, as in NeMo."""

    class Module:
        def __init__(self, path):
            self.path, self.loader, self.sequence = path, None, 0

        def train_dataloader(self):
            if self.loader is None:
                where = config(energon, 1)
                dataset = energon.get_train_dataset(
                    self.path,
                    batch_size=2,
                    task_encoder=encoder(energon),
                    worker_config=where,
                    packing_buffer_size=None,
                    split_part="train",
                    shuffle_buffer_size=10,
                    max_samples_per_sequence=5,
                )
                self.loader = energon.get_savable_loader(
                    dataset, worker_config=where, watchdog_timeout_seconds=None
                )
            return self.loader

        def state_dict(self):
            state = self.train_dataloader().save_state_global(global_dst_rank=0)
            return {"dataloader_state": state, "sequence": self.sequence}

        def load_state_dict(self, state):
            if not state or "dataloader_state" not in state:
                return
            self.train_dataloader().restore_state_global(state["dataloader_state"], src_rank=None)
            self.sequence = state["sequence"]

    path = Path(folder) / "texts"
    first = Module(path)
    running = iter(first.train_dataloader())
    texts(running, 3)
    first.sequence = 3
    state = first.state_dict()
    expected = texts(running, 4)
    second = Module(path)
    second.load_state_dict({})
    second.load_state_dict(state)
    found = texts(second.train_dataloader(), 4)
    return found == expected, second.sequence, len(state["dataloader_state"]), len(flat(found))


def check_a_cooker_that_reads_two_stores(energon, folder):
    """Images from auxiliary data and from the dataset itself, as Megatron-Bridge cooks them."""

    @energon.stateless
    @energon.cooker(need_primary=True)
    def cook(sample, primary, media):
        name = f"{sample['__key__']}.txt"
        own = primary[f"{sample['__key__']}.json"]
        own = own[0] if isinstance(own, tuple) else own
        text = media.get(name, sample)
        number = json.loads(own)["n"] if isinstance(own, bytes) else own["n"]
        return energon.TextSample(
            **energon.basic_sample_keys(sample),
            text=f"{number}: {text if isinstance(text, str) else text.decode()}",
        )

    class Encoder(energon.DefaultTaskEncoder):
        cookers = (energon.Cooker(cook, has_subflavors={"of": "texts"}),)

    path = document(
        folder,
        "two-stores",
        __class__="MetadatasetV2",
        splits={"val": {"path": "texts", "aux": {"media": "filesystem://media"}}},
    )
    found = val(energon, path, batch_size=2, task_encoder=Encoder())
    return texts(loader(energon, found))


def check_packed_samples_that_were_packed_before(energon, folder):
    """A sample type of the program with lists from JSON, as LLaVA-OneVision trains on."""
    path = copy(folder, "texts", "packed-before")
    kind = {"__module__": "own_datasets", "__class__": "PackedSample"}
    describe(path, {"sample_type": kind, "field_map": {"numbers": "json", "caption": "txt"}})
    import_module("own_datasets")

    class Encoder(energon.DefaultTaskEncoder):
        @energon.stateless
        def encode_sample(self, sample):
            ids = torch.tensor([sample.numbers["n"]] * (sample.numbers["n"] % 3 + 1))
            return dataclasses.replace(sample, numbers=ids)

        def batch(self, samples):
            longest = max(len(sample.numbers) for sample in samples)
            pad = torch.nn.functional.pad
            rows = [pad(s.numbers, (0, longest - len(s.numbers)), value=-1) for s in samples]
            return [sample.caption for sample in samples], torch.stack(rows).tolist()

    return list(loader(energon, val(energon, path, batch_size=3, task_encoder=Encoder())))


def check_batches_of_datasets_by_their_flavor(energon, folder):
    """Samples of a blend that are batched with their own kind only, and counted by it."""

    class Encoder(encoder(energon).__class__):
        def batch_group_criterion(self, sample):
            return sample.__subflavors__["of"], 3

        def batch(self, samples):
            return [(sample.__subflavors__["of"], sample.text) for sample in samples]

    parts = [{"path": "texts", "weight": 2}, {"path": "more", "weight": 1}]
    splits = {"train": {"blend": parts}}
    path = document(folder, "by-flavor", __class__="MetadatasetV2", splits=splits)
    dataset = train(energon, path, epoch=False, batch_size=None, task_encoder=Encoder())
    found = list(islice(loader(energon, dataset), 12))
    kinds = [{kind for kind, _ in batch} for batch in found]
    return {len(kind) for kind in kinds}, {len(batch) for batch in found}


def check_a_loop_over_epochs_with_an_evaluation(energon, folder):
    """Epochs of a fixed length, with validation in between, until all steps are done."""
    path = Path(folder) / "texts"
    training = train(energon, path, epoch=False, batch_size=2, virtual_epoch_length=4, workers=1)
    batches = loader(energon, training)
    validation = loader(energon, val(energon, path, batch_size=4))
    steps, evaluated = 0, []
    seen = Counter()
    while steps < 10:
        for batch in batches:
            steps += 1
            seen.update(batch.text)
            if steps == 10:
                break
        evaluated.append(texts(validation))
    return steps, len(evaluated), evaluated[0] == evaluated[-1], max(seen.values()), len(batches)


def check_the_watchdog_of_a_slow_hook(energon, folder):
    """What a loader in the training process says of a hook that takes long."""
    import contextlib
    import io
    import logging
    import time

    def encode_sample(self, sample):
        time.sleep(0.6 if sample.__key__.endswith("025") else 0)
        return sample

    task_encoder = encoder(energon, encode_sample=energon.stateless(encode_sample))
    dataset = val(energon, Path(folder) / "texts", batch_size=1, task_encoder=task_encoder)
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            found = texts(energon.get_loader(dataset, watchdog_timeout_seconds=0.2))
    finally:
        logging.getLogger().removeHandler(handler)
    said = printed.getvalue()
    return len(found), "Watchdog triggered" in said, "encode_sample" in said


def check_flavors_of_old_documents_in_order(energon, folder):
    refs = [
        {"path": "texts", "subflavor": "a", "subflavors": {"z": 1, "__subflavor__": "own"}},
        {"path": "more", "subflavor": "b", "subflavors": {"z": 2}},
    ]
    splits = {"train": {"datasets": refs}, "val": {"datasets": refs}}
    path = document(folder, "flavors-in-order", __class__="Metadataset", splits=splits)
    found = loader(energon, val(energon, path, batch_size=None))
    return sorted({json.dumps(sample.__subflavors__, sort_keys=True) for sample in found})


def check_what_is_refused_of_subsets(energon, folder):
    inner = {"val": {"path": "texts", "subset": {"range": [0, 3]}}}
    document(folder, "sub-leaf", __class__="MetadatasetV2", splits=inner)
    found = []
    for name, subset in (("half", ["0%", "50%"]), ("numbers", [0, 3])):
        splits = {"val": {"path": "sub-leaf.yaml", "subset": {"range": subset}}}
        path = document(folder, f"sub-{name}", __class__="MetadatasetV2", splits=splits)
        error = raised(lambda path=path: len(texts(loader(energon, val(energon, path)))))
        found.append(error is not None)
    return found


def check_cooked_samples_keep_what_they_came_with(energon, folder):
    @energon.stateless
    def cook(sample):
        made = cooked(energon, sample)
        made.__subflavors__ = {**made.__subflavors__, "cooked": True}
        return made

    kind = type("Encoder", (energon.DefaultTaskEncoder,), {"cookers": [energon.Cooker(cook)]})
    dataset = val(energon, Path(folder) / "texts", batch_size=None, task_encoder=kind())
    found = list(loader(energon, dataset))
    return [(s.__key__, s.__subflavors__, type(s.__sources__).__name__) for s in found[:2]]
