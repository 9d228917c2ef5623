"""webdataset: shards and samples shuffled, endlessly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import webdataset

from adapters import streams

VERSION = webdataset.__version__


def batches(
    path: str, num_workers: int, batch_size: int, shuffle: int, program: str = "cooker"
) -> Iterator[Any]:
    yield from streams.batches(webdataset, path, num_workers, batch_size, shuffle, program)
