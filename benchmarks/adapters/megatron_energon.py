"""Megatron-Energon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from megatron.energon import __version__

os.environ["BENCHMARKED_ENERGON"] = "megatron.energon"
from adapters import task_encoders

VERSION = __version__


def batches(
    path: str, num_workers: int, batch_size: int, shuffle: int, program: str = "cooker"
) -> Iterator[Any]:
    if program == "plain":
        raise KeyError("crude samples need a cooker")
    yield from task_encoders.loader(path, num_workers, batch_size, shuffle, program)
