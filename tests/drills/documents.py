"""What the drill of documents and states does with each of them, in a process with bounds."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import energon.webdataset as wds
from energon import (
    DefaultTaskEncoder,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon.errors import EnergonError
from energon.loader.state_files import read_states

NUM_SAMPLES = 20
PLACES = {
    "metadataset": "mix.yaml",
    "description": "ds/.nv-meta/dataset.yaml",
    "split": "ds/.nv-meta/split.yaml",
    "counts": "ds/.nv-meta/.info.json",
    "web": "web.yaml",
}


class Raw(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Leaves samples as they are."""

    decoder = None

    def batch(self, samples: list[Any]) -> Any:
        return samples


class Yields(Raw):
    """Yields two outputs for every sample and every batch."""

    def encode_sample(self, sample: Any) -> Any:
        yield sample
        yield sample

    def batch(self, samples: list[Any]) -> Any:
        yield samples
        yield samples


class Packs(Raw):
    """Packs samples by threes, and then batches them."""

    def select_samples_to_pack(self, samples: list[Any]) -> Any:
        return [samples[at : at + 3] for at in range(0, len(samples), 3)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples


class Groups(Raw):
    """Makes batches of samples whose keys have the same end."""

    def batch_group_criterion(self, sample: Any) -> Any:
        return sample.__key__[-1] > "4", 2


def read_document(folder: str, case: list[str]) -> str:
    """Read a document of some kind; return how that ended."""
    kind, text = case
    path = Path(folder, PLACES[kind])
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        return _outcome(lambda: _samples(kind, folder))
    finally:
        if before is not None:
            path.write_bytes(before)


def _samples(kind: str, folder: str) -> Any:
    if kind == "web":
        return wds.WebDataset(f"{folder}/web.yaml").slice(NUM_SAMPLES)
    path = f"{folder}/{'mix.yaml' if kind == 'metadataset' else 'ds'}"
    return get_loader(open_dataset(path, "raw"))


def open_dataset(path: str, kind: str) -> Any:
    """Return a pipeline of some kind over a dataset."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=2)
    common: dict[str, Any] = {"worker_config": config, "batch_size": 2}
    match kind:
        case "raw":
            return get_train_dataset(
                path, worker_config=config, batch_size=None, task_encoder=Raw()
            )
        case "yields":
            return get_train_dataset(path, task_encoder=Yields(), **common)
        case "packs":
            return get_train_dataset(path, task_encoder=Packs(), packing_buffer_size=7, **common)
        case "groups":
            return get_train_dataset(path, task_encoder=Groups(), **common)
        case _:
            return get_val_dataset(path, split_part="train", task_encoder=Raw(), **common)


def restore_state(folder: str, case: list[str]) -> str:
    """Continue from a state; return how that ended."""
    kind, text = case
    file = Path(folder, "state.json")
    file.write_text(text)

    def batches() -> Any:
        state = read_states([file])
        loader = get_savable_loader(open_dataset(f"{folder}/ds", kind))
        loader.load_state_dict(state)
        return loader

    return _outcome(batches)


def _outcome(make: Any) -> str:
    """Return how many samples there are, all of them right, or which error of ours there is."""
    number = 0
    try:
        for item in islice(make(), NUM_SAMPLES):
            for sample in _flat(item):
                number += 1
                _check(sample)
    except EnergonError as error:
        return f"refused: {type(error).__name__}" if str(error) else "an error without a message"
    return f"read: {number}"


def _flat(item: Any) -> Any:
    if isinstance(item, list):
        for each in item:
            yield from _flat(each)
    else:
        yield item


def _check(sample: Any) -> None:
    """Compare a sample with its key, which says what it has to be."""
    is_typed = not isinstance(sample, dict)
    key = sample.__key__ if is_typed else sample["__key__"]
    text = sample.text if is_typed else sample.get("txt")
    if text is not None and text not in (f"text {key}", f"text {key}".encode(), key):
        raise AssertionError(f"{key} has {text!r}: {json.dumps(str(sample))[:300]}")
