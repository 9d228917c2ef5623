"""Whole runs in the patterns of public trainers: saved, and continued in a fresh process.

Each pattern is a function of the package, a folder and a number of workers. It returns a loader,
the batches of the training loop, and a function that returns two things about a batch: what all
batches have in common, and its content. A check runs the pattern in-line and with two workers,
saves a state in the way of trainers, and continues in a fork of a new interpreter, which reads the
names and folders of patterns as lines of JSON:

    python tests/compat/programs/energon/runs.py
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
import subprocess
import sys
import tarfile
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import torch
from common import config, describe, document, prepare

# Programs that have `sample_loader.py` or pickled parts are told to allow them.
os.environ["ENERGON_ALLOW"] = "code,pickle"
WORKERS = (0, 2)
LENGTH = 24
ARGUMENTS = None
"""What a program has set up in its module when hooks run."""


def whole_run(pattern):
    """Return a check of a pattern: whether it continues, and what its batches have in common."""

    def check(energon, folder):
        common, expected = set(), []
        for workers in WORKERS:
            running, batches, shown = pattern(energon, folder, workers)
            common |= {str(shown(batch)[0]) for batch in islice(batches, 3)}
            path = state_file(pattern, folder, workers)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"dataloader_state_dict": running.save_state_rank()}, path)
            expected.append([shown(batch) for batch in islice(batches, 4)])
        other = new_interpreter(sys.modules[pattern.__module__].__file__)
        print(json.dumps([pattern.__name__, str(folder)]), file=other.stdin, flush=True)
        continued = json.loads(other.stdout.readline())
        same = [a == b for a, b in zip(json.loads(json.dumps(expected)), continued, strict=True)]
        return same, sorted(common)

    check.__module__ = pattern.__module__
    return check


def state_file(pattern, folder, workers):
    return Path(folder) / f"{pattern.__name__}-{workers}" / "train_dataloader_dprank000.pt"


@functools.cache
def new_interpreter(script):
    command = [sys.executable, "-W", "ignore", script]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go_on_in_forks(patterns):
    """Continue the patterns that are asked for, each in a fork, and print what they show."""
    output, sys.stdout = sys.stdout, sys.stderr  # where the package may print
    energon = import_module("megatron.energon")
    for line in sys.stdin:
        name, folder = json.loads(line)
        if not os.fork():
            print(json.dumps(go_on(energon, patterns[name], folder)), file=output, flush=True)
            return
        if os.wait()[1]:
            print("failed", file=output, flush=True)


def go_on(energon, pattern, folder):
    """Return what a pattern shows of the next batches, continued with its states."""
    continued = []
    for workers in WORKERS:
        state = torch.load(state_file(pattern, folder, workers), weights_only=False)
        _, batches, shown = pattern(energon, folder, workers, state["dataloader_state_dict"])
        continued.append([shown(batch) for batch in islice(batches, 4)])
    return continued


def opened(energon, dataset, state=None):
    """Return a loader, at the position of a state."""
    loader = energon.get_savable_loader(dataset)
    if state is not None:
        loader.restore_state_rank(state)
    return loader


def cyclic_iter(loader):
    while True:
        yield from loader


class EnergonDataloader:
    """What training loops take: an iterator with a state."""

    def __init__(self, loader):
        self._dataloader = loader
        self._iter = iter(cyclic_iter(loader))

    def __next__(self):
        return next(self._iter)

    def __iter__(self):
        return iter(self._iter)

    def save_state_rank(self):
        return self._dataloader.save_state_rank()


def words(energon, sample):
    return energon.TextSample(**energon.basic_sample_keys(sample), text=sample["txt"])


def text_cookers(energon):
    return [energon.Cooker(energon.stateless(lambda sample: words(energon, sample)))]


def number(text):
    return int(text.split()[-1])


def settings(energon, workers, **more):
    return {
        "worker_config": config(energon, workers),
        "shuffle_buffer_size": 10,
        "max_samples_per_sequence": 4,
        **more,
    }


def in_packs(sizes, samples, room):
    """Fill packs one by one with the largest samples that still fit."""
    left = sorted(zip(sizes, range(len(samples)), strict=True), reverse=True)
    packs = []
    while left:
        free, pack = room, []
        for size, which in list(left):
            if size <= free:
                free -= size
                pack.append(samples[which])
                left.remove((size, which))
        packs.append(pack)
    return packs


def module_arguments(energon, folder, workers, state=None):
    """Hooks ask a module for the arguments of the program and for its tokenizer."""
    global ARGUMENTS
    ARGUMENTS = SimpleNamespace(
        micro_batch_size=2, length=LENGTH, tokenize=lambda text: [*map(ord, text)]
    )

    class Encoder(energon.DefaultTaskEncoder):
        cookers = text_cookers(energon)

        @energon.stateless(restore_seeds=True)
        def encode_sample(self, sample):
            tokens = torch.tensor(ARGUMENTS.tokenize(sample.text)[: ARGUMENTS.length])
            yield {
                "__key__": sample.__key__,
                "__restore_key__": sample.__restore_key__,
                "n": number(sample.text),
                "tokens": tokens,
            }

        def batch(self, samples):
            padded = [
                torch.nn.functional.pad(s["tokens"], (0, ARGUMENTS.length - len(s["tokens"])))
                for s in samples
            ]
            return {"tokens": torch.stack(padded), "numbers": [s["n"] for s in samples]}

    dataset = energon.get_train_dataset(
        Path(folder) / "texts",
        batch_size=ARGUMENTS.micro_batch_size,
        virtual_epoch_length=1000,
        task_encoder=Encoder(),
        **settings(energon, workers),
    )
    loader = opened(energon, dataset, state)
    return loader, iter(loader), lambda b: (list(b["tokens"].shape), b["numbers"])


def data_module(energon, folder, workers, state=None):
    """A data module of Lightning, whose state is that of its loader."""

    class Encoder(energon.DefaultTaskEncoder):
        cookers = text_cookers(energon)

    class DataModule:
        def __init__(self, path, task_encoder):
            self.path, self.task_encoder, self.loader = path, task_encoder, None

        def datasets_provider(self, worker_config, split):
            get = energon.get_train_dataset if split == "train" else energon.get_val_dataset
            more = (
                {"shuffle_buffer_size": 10, "max_samples_per_sequence": 4}
                if split == "train"
                else {}
            )
            return get(
                self.path,
                batch_size=3,
                task_encoder=self.task_encoder,
                worker_config=worker_config,
                split_part=split,
                **more,
            )

        def train_dataloader(self):
            if self.loader is None:
                where = config(energon, workers)
                dataset = self.datasets_provider(where, "train")
                self.loader = energon.get_savable_loader(dataset, worker_config=where)
            return self.loader

        def val_dataloader(self):
            where = config(energon, workers)
            return energon.get_loader(self.datasets_provider(where, "val"), worker_config=where)

        def state_dict(self):
            return {
                "dataloader_state": self.train_dataloader().save_state_global(global_dst_rank=0)
            }

        def load_state_dict(self, saved):
            self.train_dataloader().restore_state_global(saved["dataloader_state"])

        def save_state_rank(self):
            return self.state_dict()

    data = DataModule(Path(folder) / "texts", Encoder())
    validated = sum(len(batch.text) for batch in data.val_dataloader())
    if state is not None:
        data.load_state_dict(state)
    batches = iter(data.train_dataloader())
    return data, batches, lambda b: ([type(b).__name__, len(b.text), validated], list(b.text))


def provider(energon, folder, workers, state=None):
    """A provider with a blend, packing, virtual epochs and a cyclic iterator."""

    @dataclasses.dataclass
    class Task(energon.Sample):
        tokens: torch.Tensor

    @dataclasses.dataclass
    class Pack(energon.Sample):
        tokens: torch.Tensor
        cu_lengths: list
        max_length: int

    class Encoder(energon.DefaultTaskEncoder):
        cookers = text_cookers(energon)

        @energon.stateless(restore_seeds=True)
        def encode_sample(self, sample):
            tokens = torch.full((number(sample.text) % 9 + 3,), number(sample.text))
            return Task.derive_from(sample, tokens=tokens)

        def select_samples_to_pack(self, samples):
            return in_packs([len(sample.tokens) for sample in samples], samples, LENGTH)

        @energon.stateless
        def pack_selected_samples(self, samples):
            ends = torch.tensor([len(sample.tokens) for sample in samples]).cumsum(0).tolist()
            tokens = torch.cat([sample.tokens for sample in samples])
            return Pack(
                __key__=",".join(sample.__key__ for sample in samples),
                __restore_key__=(),
                __subflavors__=samples[0].__subflavors__,
                tokens=torch.nn.functional.pad(tokens, (0, LENGTH - len(tokens))),
                cu_lengths=[0, *ends],
                max_length=max(len(sample.tokens) for sample in samples),
            )

        def batch(self, packs):
            return {
                "tokens": torch.stack([pack.tokens for pack in packs]),
                "cu": [pack.cu_lengths for pack in packs],
            }

    parts = [{"weight": 3, "path": "./texts"}, {"weight": 1, "path": "./more"}]
    path = document(
        folder, "provided", __class__="MetadatasetV2", splits={"train": {"blend": parts}}
    )
    dataset = energon.get_train_dataset(
        path,
        batch_size=2,
        packing_buffer_size=8,
        virtual_epoch_length=2,
        task_encoder=Encoder(),
        **settings(energon, workers),
    )
    running = EnergonDataloader(opened(energon, dataset, state))
    return running, running, lambda b: (list(b["tokens"].shape), [b["tokens"].tolist(), b["cu"]])


def slow_import(energon, folder, workers, state=None):
    """An encoder that imports a large package when it is first used."""
    package = Path(folder) / "libraries" / "slow_transformers"
    if not package.exists():
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            "import time\ntime.sleep(0.3)\n\n"
            "class AutoTokenizer:\n"
            "    def __call__(self, text):\n        return [len(w) for w in text.split()]\n"
        )
    if str(package.parent) not in sys.path:
        sys.path.insert(0, str(package.parent))

    class Encoder(energon.DefaultTaskEncoder):
        cookers = text_cookers(energon)
        tokenizer = None

        def encode_sample(self, sample):
            if self.tokenizer is None:
                self.tokenizer = import_module("slow_transformers").AutoTokenizer()
            lengths = torch.tensor(self.tokenizer(sample.text))
            return {
                "__key__": sample.__key__,
                "__restore_key__": sample.__restore_key__,
                "lengths": lengths,
                "text": sample.text,
            }

        def batch(self, samples):
            return {
                "lengths": torch.stack([s["lengths"] for s in samples]),
                "text": [s["text"] for s in samples],
            }

    dataset = energon.get_train_dataset(
        Path(folder) / "texts", batch_size=2, task_encoder=Encoder(), **settings(energon, workers)
    )
    loader = opened(energon, dataset, state)
    return loader, iter(loader), lambda b: (list(b["lengths"].shape), b["text"])


def write_members(path, samples):
    path.mkdir(parents=True)
    with tarfile.open(path / "shard-0.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, parts in samples:
            for part, content in parts.items():
                info = tarfile.TarInfo(f"{key}.{part}")
                info.size = len(content)
                tar.addfile(info, BytesIO(content))


LOADER = """
def part_filter(part):
    return part in ("json", "txt")


def sample_loader(raw):
    question, answers = raw["json"]["q"], [raw["txt"]]
    return {"__key__": raw["__key__"], "image": None, "context": question, "answers": answers}
"""


def own_loaders(energon, folder, workers, state=None):
    """Datasets with `sample_loader.py`, blended, and packed by a simple rule."""
    for name in ("loaded", "loaded_more"):
        path = Path(folder) / name
        if not path.exists():
            parts = [
                (
                    f"{n:03}",
                    {
                        "json": json.dumps({"q": f"how many {n}"}).encode(),
                        "txt": f"{name} {n}".encode(),
                        "bin": b"?",
                    },
                )
                for n in range(12)
            ]
            write_members(path, parts)
            prepare(energon, path, split_parts_patterns=[("train", "shard-0.tar")])
            (path / ".nv-meta" / "sample_loader.py").write_text(LOADER)
            describe(
                path,
                {
                    "sample_type": {"__module__": "megatron.energon", "__class__": "VQASample"},
                    "sample_loader": "sample_loader.py:sample_loader",
                    "part_filter": "sample_loader.py:part_filter",
                },
            )

    class Encoder(energon.DefaultTaskEncoder):
        def select_samples_to_pack(self, samples):
            return [samples[n : n + 3] for n in range(0, len(samples), 3)]

        @energon.stateless
        def pack_selected_samples(self, samples):
            return dataclasses.replace(
                samples[0],
                context="|".join(s.context for s in samples),
                answers=[s.answers[0] for s in samples],
            )

        def batch(self, packs):
            return {
                "context": [pack.context for pack in packs],
                "answers": [pack.answers for pack in packs],
            }

    parts = [{"weight": 1, "path": "./loaded"}, {"weight": 1, "path": "./loaded_more"}]
    path = document(
        folder, "own_loaders", __class__="MetadatasetV2", splits={"train": {"blend": parts}}
    )
    dataset = energon.get_train_dataset(
        path,
        batch_size=2,
        packing_buffer_size=6,
        task_encoder=Encoder(),
        **settings(energon, workers),
    )
    loader = opened(energon, dataset, state)
    return loader, iter(loader), lambda b: ([len(a) for a in b["answers"]], b)


def endless(energon):
    """Return an epoch that never ends: Megatron-Energon takes 40 GB of memory for 10**9 batches."""
    is_ours = find_spec("energon") is not None
    return 1_000_000_000 if is_ours else 1_000_000


def diffusion(energon, folder, workers, state=None):
    """Latents and embeddings as pickled parts, endless virtual epochs, seeded noise."""
    path = Path(folder) / "latents"
    if not path.exists():
        samples = []
        for n in range(12):
            latent = BytesIO()
            torch.save(torch.full((2, 3), float(n)), latent)
            embedding = pickle.dumps([n, n + 1])
            size = json.dumps({"height": 16, "n": n}).encode()
            parts = {"pth": latent.getvalue(), "pickle": embedding, "json": size}
            samples.append((f"{n:03}", parts))
        write_members(path, samples)
        prepare(energon, path, split_parts_patterns=[("train", "shard-0.tar")])
        describe(path, {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"})

    @energon.stateless
    def cook(sample):
        return dict(
            **energon.basic_sample_keys(sample),
            json=sample["json"],
            pickle=sample["pickle"],
            pth=sample["pth"],
        )

    class Encoder(energon.DefaultTaskEncoder):
        cookers = [energon.Cooker(cook)]  # noqa: RUF012

        @energon.stateless(restore_seeds=True)
        def encode_sample(self, sample):
            noise = torch.randn(sample["pth"].shape)
            return {
                "__key__": sample["__key__"],
                "__restore_key__": sample["__restore_key__"],
                "latents": sample["pth"],
                "noise": noise,
                "embeddings": torch.tensor(sample["pickle"]),
                "height": torch.tensor(sample["json"]["height"]),
            }

        def batch(self, samples):
            names = ("latents", "noise", "embeddings", "height")
            return {name: torch.stack([s[name] for s in samples]) for name in names}

    dataset = energon.get_train_dataset(
        path,
        batch_size=2,
        batch_drop_last=True,
        virtual_epoch_length=endless(energon),
        task_encoder=Encoder(),
        **settings(energon, workers),
    )
    loader = opened(energon, dataset, state)
    return (
        loader,
        iter(loader),
        lambda b: (
            {name: list(each.shape) for name, each in b.items()},
            [each.tolist() for each in b.values()],
        ),
    )


def own_pipeline(energon, folder, workers, state=None):
    """JSON Lines, mapped, filtered and batched by wrappers."""
    where, path = config(energon, workers), Path(folder) / "run.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(20)))
        epath = import_module("megatron.energon.epathlib").EPath
        energon.CrudeJsonlDatasetFactory.prepare_dataset(epath(path))
    loaded = energon.load_dataset(path)
    dataset = loaded.get_dataset(training=True, split_part="train", worker_config=where)
    samples = energon.RepeatDataset(dataset.build(), worker_config=where)
    numbers = energon.MapDataset(samples, lambda sample: sample["json"]["n"], worker_config=where)
    even = energon.FilterDataset(numbers, filter_fn=lambda n: n % 2 == 0, worker_config=where)
    batches = energon.BatchDataset(even, 3, batcher=list, worker_config=where)
    loader = opened(energon, batches, state)
    return loader, iter(loader), lambda b: (len(b), list(b))


check_a_run_whose_hooks_read_arguments_of_a_module = whole_run(module_arguments)
check_a_run_with_a_data_module = whole_run(data_module)
check_a_run_with_a_provider_and_files_of_ranks = whole_run(provider)
check_a_run_whose_encoder_imports_a_large_package = whole_run(slow_import)
check_a_run_over_datasets_with_sample_loaders = whole_run(own_loaders)
check_a_run_over_latents_without_end = whole_run(diffusion)
check_a_run_with_a_pipeline_of_its_own = whole_run(own_pipeline)


if __name__ == "__main__":
    go_on_in_forks(globals())
