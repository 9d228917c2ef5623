"""Sort any number of samples: stable, with bounded memory."""

from __future__ import annotations

import heapq
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import IO, Any, Literal

from energon.errors import ConfigError, FieldAccessError
from energon.formats.tar.sample_parser import StreamSample
from energon.plan.randomness import derive_seed

SortKind = Literal["text", "int", "float"]
Record = tuple[Any, int, StreamSample]
"""Sort value, number in the input, sample."""

MAX_RUNS = 64
"""Maximum number of files merged at a time."""
MEMORY_BYTES = 1 << 30


def sort_value(field: str, kind: SortKind) -> Callable[[StreamSample], Any]:
    """Return a function that returns the sort key of a sample.

    Args:
        field: A field, `__key__`, or `__random__` for a random order.
        kind: How values are compared.

    Raises:
        ConfigError: If there is no such kind.
    """
    if field == "__key__":
        return lambda sample: sample["__key__"].encode("utf-8", "surrogateescape")
    convert: dict[str, Callable[[bytes], Any]] = {"text": bytes, "int": int, "float": float}
    if kind not in convert:
        raise ConfigError(f"sort by {kind!r}: expected one of {', '.join(convert)}")

    def value(sample: StreamSample) -> Any:
        if field not in sample:
            raise FieldAccessError(f"sample {sample['__key__']!r} has no {field!r} to sort by")
        try:
            return convert[kind](sample[field])
        except ValueError as error:
            raise FieldAccessError(
                f"sample {sample['__key__']!r}: {field} is {sample[field][:40]!r}, expected {kind}"
            ) from error

    return value


def random_value(seed: int) -> Callable[[StreamSample], int]:
    """Return a function that returns a new random number at each call."""
    numbers = count()
    return lambda sample: derive_seed(seed, "sort", next(numbers))


def sorted_samples(
    samples: Iterable[StreamSample],
    value: Callable[[StreamSample], Any],
    *,
    reverse: bool = False,
    memory_bytes: int = MEMORY_BYTES,
    folder: str | None = None,
) -> Iterator[StreamSample]:
    """Yield all samples in order; those with equal values keep their order.

    Args:
        samples: The samples.
        value: Returns the value to sort by.
        reverse: Whether to sort in descending order.
        memory_bytes: Maximum amount of content in memory; the rest is kept in temporary files.
        folder: The folder of these; None for the system's temporary folder.
    """
    with ExitStack() as files:
        runs = _Runs(files, folder, reverse)
        held: list[Record] = []
        size = 0
        for number, sample in enumerate(samples):
            held.append((value(sample), -number if reverse else number, sample))
            size += _size(sample)
            if size > memory_bytes:
                runs.add(_ordered(held, reverse))
                held, size = [], 0
        for _, _, sample in runs.merged(_ordered(held, reverse)):
            yield sample


class _Runs:
    """Sorted records in unnamed files, which disappear even if the process is killed."""

    def __init__(self, stack: ExitStack, folder: str | None, reverse: bool) -> None:
        self._stack = stack
        self._folder = folder
        self._reverse = reverse
        self._files: list[IO[bytes]] = []

    def add(self, records: Iterable[Record]) -> None:
        self._files.append(self._written(records))
        if len(self._files) >= MAX_RUNS:
            merged = self._written(self._merge(self._files, []))
            for file in self._files:
                file.close()
            self._files = [merged]

    def merged(self, held: list[Record]) -> Iterator[Record]:
        return self._merge(self._files, held)

    def _merge(self, files: list[IO[bytes]], held: list[Record]) -> Iterator[Record]:
        runs: list[Iterable[Record]] = [*map(_records, files), held]
        return heapq.merge(*runs, key=_order, reverse=self._reverse)

    def _written(self, records: Iterable[Record]) -> IO[bytes]:
        file: IO[bytes] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - the stack closes it
        self._stack.callback(file.close)
        for record in records:
            pickle.dump(record, file, protocol=5)
        return file


def _ordered(records: list[Record], reverse: bool) -> list[Record]:
    return sorted(records, key=_order, reverse=reverse)


def _order(record: Record) -> tuple[Any, int]:
    # Numbers are unique, so samples are never compared.
    return record[0], record[1]


def _records(file: IO[bytes]) -> Iterator[Record]:
    """Yield the records of a file that this process has written, and that no other can open."""
    file.seek(0)
    while True:
        try:
            yield pickle.load(file)
        except EOFError:
            return


def _size(sample: StreamSample) -> int:
    return sum(map(sys.getsizeof, sample.values())) + 500
