"""energon itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# The getters as well, which are imported when they are asked for: it is timed.
from energon import __version__, get_savable_loader, get_train_dataset  # noqa: F401

VERSION = f"{__version__}{' with msgspec' if find_spec('msgspec') else ''}"
"""The extra `fast-json` decodes JSON."""


def loader(path: str, num_workers: int, batch_size: int, shuffle: int, program: str) -> Any:
    """Return the loader of a program with a task encoder."""
    os.environ["BENCHMARKED_ENERGON"] = "energon"
    from adapters import task_encoders

    return task_encoders.loader(path, num_workers, batch_size, shuffle, program)


def batches(
    path: str, num_workers: int, batch_size: int, shuffle: int, program: str = "cooker"
) -> Iterator[Any]:
    if program == "stream":
        from adapters import streams

        wds = import_module("energon.webdataset")
        yield from streams.batches(wds, path, num_workers, batch_size, shuffle, program)
    else:
        yield from loader(path, num_workers, batch_size, shuffle, program)
