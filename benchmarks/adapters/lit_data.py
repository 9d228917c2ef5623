"""LitData: reads its own format, into which the dataset is converted first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import litdata

from adapters.programs import SAMPLE_HOOKS

Hook = Callable[[Any], Any]
VERSION = litdata.__version__


def as_bytes(samples: list[Any]) -> list[Any]:
    """Return samples that can go to another process, which the views that LitData gives cannot."""
    for sample in samples:
        for name, value in sample.items():
            if type(value) is memoryview:
                sample[name] = bytes(value)
    return samples


def _read(shard: str) -> Iterator[dict[str, Any]]:
    import tarfile

    sample: dict[str, Any] = {}
    with tarfile.open(shard) as tar:
        for member in tar:
            key, _, part = member.name.partition(".")
            if sample.get("__key__", key) != key:
                yield sample
                sample = {}
            sample["__key__"] = key
            sample[part] = tar.extractfile(member).read()
    yield sample


def convert(path: str) -> str:
    target = f"{path}-litdata"
    if not os.path.exists(f"{target}/index.json"):
        shards = sorted(str(shard) for shard in Path(path).glob("*.tar"))
        litdata.optimize(_read, shards, target, chunk_bytes="64MB", num_workers=2)
    return target


def hooked(hook: Hook) -> type[litdata.StreamingDataset]:
    """Return a dataset that calls `hook` with each sample."""

    class Hooked(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return hook(super().__getitem__(index))

    return Hooked


def batches(
    path: str, num_workers: int, batch_size: int, shuffle: int, program: str = "cooker"
) -> Iterator[list[Any]]:
    hook = SAMPLE_HOOKS[program]
    kind = litdata.StreamingDataset if hook is None else hooked(hook)
    dataset = kind(convert(path), shuffle=True, drop_last=True)
    loader = litdata.StreamingDataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=num_workers,
        collate_fn=as_bytes,
        persistent_workers=num_workers > 0,
    )
    while True:
        yield from loader


if __name__ == "__main__":
    convert(sys.argv[1])
