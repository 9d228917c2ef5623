"""Fetch the files that samples are to hold, if these are in stores: some samples ahead."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from energon.io.epath import EPath
from energon.io.files import file_size, read_bytes
from energon.io.registry import open_store
from energon.io.threads import WaitingThreads

SAMPLES_AHEAD = 32
MAX_THREADS = 16
MAX_IN_MEMORY_BYTES = 4 << 20
"""Larger files are copied to disk, and only when it is their turn."""


def fetched(samples: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the samples with the contents of remote files in place of their paths.

    Contents that are on disk are there until the next sample is asked for.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If it cannot be read.
    """
    with closing(WaitingThreads(MAX_THREADS, "energon-pack")) as threads:
        waiting: deque[dict[str, Any]] = deque()
        for sample in samples:
            if not waiting and not any(isinstance(value, EPath) for value in sample.values()):
                yield sample
                continue
            waiting.append(_begun(sample, threads))
            if len(waiting) > SAMPLES_AHEAD:
                yield from _arrived(waiting.popleft())
        while waiting:
            yield from _arrived(waiting.popleft())


def _begun(sample: Mapping[str, Any], threads: WaitingThreads) -> dict[str, Any]:
    return {
        name: threads.submit(_fetch, value) if isinstance(value, EPath) else value
        for name, value in sample.items()
    }


def _arrived(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a sample when all that was asked for is there."""
    with ExitStack() as stack:
        for name, value in sample.items():
            content = value.result() if isinstance(value, Future) else value
            if isinstance(content, EPath):
                file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="energon-pack-"))
                content = _copy(content, Path(file.name))
            sample[name] = content
        yield sample


def _fetch(path: EPath) -> bytes | EPath:
    """Return a file's content, or the path again if that is large."""
    return path if file_size(path) > MAX_IN_MEMORY_BYTES else read_bytes(path)


def _copy(path: EPath, target: Path) -> Path:
    store, key = open_store(path)
    with open(target, "wb") as file:
        file.writelines(store.stream(key))
    return target
