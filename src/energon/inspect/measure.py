"""Run a function of the user on each sample of some datasets, and store the numbers it returns.

Values are collected in a journal, which a killed run leaves to the next one, and written at the end
of a dataset. Of files that have not changed since the last time, nothing is read again.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, EmptyDatasetError, EnergonError, FormatError, SampleError
from energon.formats.json_text import parse_json
from energon.formats.meta.info import META
from energon.formats.tables.measure_table import (
    SUFFIX,
    MeasuredFile,
    MeasureHeader,
    MeasureTable,
    as_floats,
    write_measures,
)
from energon.inspect.info import find_leaves
from energon.io.address import is_remote, redact
from energon.io.atomic import atomic_path
from energon.io.disk_cache import disk_cache
from energon.io.file_lock import locked
from energon.io.files import write_bytes
from energon.messages import describe_error
from energon.metadataset.leaf import Leaf
from energon.plan.leaves.leaf import choose_slice_samples
from energon.prepare.engines import Engine, run_batches
from energon.prepare.files import dataset_lock, reporting
from energon.samples.crude import UnreadableSample
from energon.sources.kinds import kind_named
from energon.sources.measures import (
    NumbersFiles,
    check_measure_name,
    measure_address,
    read_measure,
)
from energon.sources.shards import ShardPool
from energon.sources.source import OpenRequest, Source, SplitSource

MEASURED_TOGETHER = 4096
BYTES_MEASURED_TOGETHER = 64 << 20
"""The part that each process measures again after a run was killed."""
READ_TOGETHER = 64
LARGEST_INT = np.iinfo(np.int32).max

Progress = Callable[[int, int], None]


class MeasureReport(NamedTuple):
    """The result of measuring a dataset."""

    path: str
    num_samples: int
    """Samples that have the measure now."""
    measured: int
    """Those that were read in this run."""
    file: str
    """Where the measure is stored."""


class _SampleRange(NamedTuple):
    """Consecutive samples of a file of a dataset."""

    file: str
    stamp: str
    start: int
    stop: int


class _Job(NamedTuple):
    """A piece that is measured."""

    dataset: _MeasuredDataset
    piece: _SampleRange
    packed: bytes
    """The source and the function."""
    ordinal: int
    """The number of the first sample in the source."""


def measure_dataset(
    path: str | os.PathLike[str],
    function: Callable[[dict[str, Any]], float],
    *,
    name: str,
    function_name: str,
    decode: bool = False,
    again: bool = False,
    engine: Engine | None = None,
    wait: bool = False,
    allow: Collection[str] = (),
    progress: Progress = lambda done, total: None,
) -> list[MeasureReport]:
    """Store a measure of all samples of a dataset, or of each dataset of a metadataset.

    Args:
        path: Where it is.
        function: Returns the measure of a sample, a dict of its parts.
        name: Name of the measure.
        function_name: `module:function`; values of another function are replaced.
        decode: Whether the function receives decoded parts; images as Pillow images.
        again: Whether to measure again the samples that have a value.
        engine: Where to run; None for processes of this machine.
        wait: Whether to wait for another process that writes the dataset.
        allow: What datasets may do, see `energon.allow`.
        progress: Called with the number of finished samples, and the total.

    Raises:
        DatasetNotFoundError: If there is no dataset.
        ConfigError: If the name is invalid, or a dataset cannot be measured.
        DatasetBusyError: If another process writes the dataset.
        SampleError: If the function fails, or returns no number.
    """
    check_measure_name(name)
    found = find_leaves(path, allow=allow)
    if found.problems:
        raise ConfigError("; ".join(f"split {split!r}: {line}" for split, line in found.problems))
    leaves: dict[str, list[Leaf]] = {}
    for leaf in (leaf for split in found.splits.values() for leaf in split):
        whole = replace(leaf, subsets=(), weight=None, origin=leaf.path)
        if whole not in leaves.setdefault(leaf.path, []):
            leaves[leaf.path].append(whole)
    decoder = SampleDecoder("pil", allow=allow) if decode else None
    with ExitStack() as stack:
        datasets = [
            stack.enter_context(
                _MeasuredDataset(address, own, name, function_name).open(again=again, wait=wait)
            )
            for address, own in leaves.items()
        ]
        jobs = [job for each in datasets for job in each.jobs((function, decoder))]
        total = sum(each.num_samples for each in datasets)
        done = total - sum(job.piece.stop - job.piece.start for job in jobs)
        progress(done, total)
        run, folder = secrets.token_hex(8), os.getcwd()
        calls = [
            (run, folder, job.packed, job.ordinal, job.piece.stop - job.piece.start) for job in jobs
        ]
        for number, values in run_batches(engine or Engine(), measure_batch, calls):
            jobs[number].dataset.add(jobs[number].piece, values)
            done += len(values)
            progress(done, total)
        return [each.write() for each in datasets]


class _MeasuredDataset:
    """A dataset that is measured.

    Args:
        address: Where it is.
        leaves: Its splits.
        name: Name of the measure.
        function: The function that computes it, as `module:function`.
    """

    def __init__(self, address: str, leaves: Sequence[Leaf], name: str, function: str) -> None:
        self.address, self.name, self.function = address, name, function
        self.target = measure_address(address, name)
        self.num_samples = self.measured = 0
        self._leaves = leaves
        self._files: dict[str, MeasuredFile] = {}
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        self._index: str | None = None
        self._checked: tuple[str, NDArray[np.float64] | None] = "", None
        """The last file for which earlier values were asked, and its values."""

    @contextmanager
    def open(self, *, again: bool, wait: bool) -> Iterator[Self]:
        """Hold the right to write the measure, and look at earlier values."""
        folder = Path(self.address, META)
        with ExitStack() as stack:
            if not is_remote(self.address) and self.target.startswith(f"{folder}/"):
                stack.enter_context(dataset_lock(folder.parent, wait=wait))
                journal = folder / f"{self.name}{SUFFIX}.partial"
            else:
                digest = blake2b(self.target.encode(), digest_size=12).hexdigest()
                folder = disk_cache().folder / "measures"
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(folder / f"{digest}.lock"))
                journal = folder / digest
            self._old = None if again else self._read_old()
            self._journal = stack.enter_context(
                _Journal(journal, [self.name, self.function, again])
            )
            yield self

    def _read_old(self) -> MeasureTable | None:
        try:
            table = read_measure(self.address, self.name)
        except FormatError:
            return None  # it is replaced
        if table is None or table.header.function != self.function:
            return None
        return table

    def jobs(self, work: tuple[Any, ...]) -> Iterator[_Job]:
        """Yield the pieces without a value."""
        pool = ShardPool()
        for leaf in self._leaves:
            kind = kind_named(leaf.kind)
            try:
                source: Any = kind.open(OpenRequest(leaf, kind.config(leaf), pool=pool))
            except EmptyDatasetError:
                continue
            if not isinstance(source, NumbersFiles) or not isinstance(source, SplitSource):
                raise ConfigError(f"{redact(leaf.path)} is {kind.noun}, which cannot be measured")
            whole: Any = source.unexcluded[0]
            self._index = whole.index_stamp()
            yield from self._jobs_of(whole, cloudpickle.dumps((whole, *work)))

    def _jobs_of(self, source: Any, packed: bytes) -> Iterator[_Job]:
        size = max(
            1,
            min(MEASURED_TOGETHER, int(BYTES_MEASURED_TOGETHER / max(1, source.mean_sample_bytes))),
        )
        ordinal = 0
        for number, (name, count, first, stop) in enumerate(source.file_samples()):
            if first == stop:
                continue
            stamp = source.file_stamp(number)
            self._files[name] = MeasuredFile(count, stamp)
            pieces = self._pieces.setdefault(name, [])
            if (first, stop) not in pieces:
                pieces.append((first, stop))
                self.num_samples += stop - first
                for start in range(first, stop, size):
                    piece = _SampleRange(name, stamp, start, min(stop, start + size))
                    if not self._is_measured(piece):
                        yield _Job(self, piece, packed, ordinal + start - first)
            ordinal += stop - first

    def _is_measured(self, piece: _SampleRange) -> bool:
        if piece in self._journal.pieces:
            return True
        if self._checked[0] != piece.file:
            self._checked = piece.file, self._old_values(piece.file)
        values = self._checked[1]
        return values is not None and not np.isnan(values[piece.start : piece.stop]).any()

    def _old_values(self, name: str) -> NDArray[np.float64] | None:
        """Return the values of a file that has not changed; None if there are none."""
        old, file = self._old, self._files[name]
        if old is None or old.header.files.get(name) != file:
            return None
        try:
            return as_floats(old.of_file(old.numbers[name]))
        except FormatError:
            return None  # damaged values are replaced

    def add(self, piece: _SampleRange, values: NDArray[np.float64]) -> None:
        """Keep the values of a piece."""
        self._journal.add(piece, values)
        self.measured += len(values)

    def write(self) -> MeasureReport:
        """Write all values, unless nothing has changed."""
        header = MeasureHeader(self.name, self.function, "float32", self._index, self._files)
        if self._journal.is_whole and (self._old is None or self._old.header.dtype == "int32"):
            header = replace(header, dtype="int32")
        if self._old is None or self._journal.pieces or self._old.header != header:
            self._write(header)
        self._journal.delete()
        return MeasureReport(
            redact(self.address), self.num_samples, self.measured, redact(self.target)
        )

    def _write(self, header: MeasureHeader) -> None:
        local = self._journal.path.with_suffix(".new") if is_remote(self.target) else self.target
        with reporting(local), atomic_path(local) as temporary, open(temporary, "wb") as file:
            write_measures(file, header, self._values_of)
        if is_remote(self.target):
            write_bytes(self.target, Path(local))
            Path(local).unlink()

    def _values_of(self, name: str) -> Iterator[tuple[int, NDArray[np.float64]]]:
        old = self._old_values(name)
        if old is not None:
            yield 0, old
        for piece in self._journal.pieces_of(name, self._files[name].stamp):
            yield piece.start, self._journal.read(piece)


class _Journal:
    """The values of the pieces that a run has measured so far, in a file.

    Each record is a line of JSON, and the values. A record that a killed run has not completed is
    dropped.

    Args:
        path: The file; created if missing.
        about: Identifies the measure; the records of other ones are dropped.
    """

    def __init__(self, path: Path, about: list[Any]) -> None:
        self.path = path
        self.is_whole = True
        """Whether all values are whole numbers of 32 bits."""
        self.pieces: dict[_SampleRange, int] = {}
        """Where the values of each piece are."""
        self._of_file: dict[str, list[_SampleRange]] = {}
        with reporting(path):
            # `__exit__` closes it.
            self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        head = json.dumps(about).encode() + b"\n"
        if self._file.readline() != head:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(head)
            self._file.flush()
        end = self._file.tell()
        for piece, values, at in iter(self._record, None):
            self._note(piece, values, at)
            end = self._file.tell()
        self._file.truncate(end)
        self._file.seek(end)

    def _record(self) -> tuple[_SampleRange, NDArray[np.float64], int] | None:
        """Return the next record; None if there is none, or it is not complete."""
        try:
            *piece, checksum = parse_json(self._file.readline(), origin=str(self.path))
            key = _SampleRange(*piece)
        except (FormatError, TypeError, ValueError):
            return None
        at = self._file.tell()
        data = self._file.read(8 * (key.stop - key.start))
        if len(data) != 8 * (key.stop - key.start) or zlib.crc32(data) != checksum:
            return None
        return key, np.frombuffer(data, "<f8"), at

    def _note(self, piece: _SampleRange, values: NDArray[np.float64], at: int) -> None:
        self.pieces[piece] = at
        self._of_file.setdefault(piece.file, []).append(piece)
        whole = (values == np.round(values)) & (np.abs(values) <= LARGEST_INT)
        self.is_whole &= bool(whole.all())

    def add(self, piece: _SampleRange, values: NDArray[np.float64]) -> None:
        """Append a record."""
        data = values.astype("<f8").tobytes()
        with reporting(self.path):
            self._file.write(json.dumps([*piece, zlib.crc32(data)]).encode() + b"\n")
            at = self._file.tell()
            self._file.write(data)
            self._file.flush()
        self._note(piece, values, at)

    def pieces_of(self, file: str, stamp: str) -> list[_SampleRange]:
        """Return the pieces of a file that has not changed since they were measured."""
        return [piece for piece in self._of_file.get(file, []) if piece.stamp == stamp]

    def read(self, piece: _SampleRange) -> NDArray[np.float64]:
        """Return the values of a piece."""
        self._file.seek(self.pieces[piece])
        return np.frombuffer(self._file.read(8 * (piece.stop - piece.start)), "<f8")

    def delete(self) -> None:
        """Delete the file: its values are stored elsewhere."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def measure_batch(
    run: str, folder: str, packed: bytes, ordinal: int, count: int
) -> NDArray[np.float64]:
    """Return the measures of consecutive samples.

    Args:
        run: The run it belongs to: sources are unpacked once for each.
        folder: The working directory of the command, where the function may be.
        packed: The source, the function and the decoder of samples, pickled.
        ordinal: The number of the first sample.
        count: How many.

    Raises:
        SampleError: If a sample cannot be read, or the function fails.
    """
    source, function, decoder = _unpacked(run, folder, packed)
    values = np.empty(count)
    together = min(READ_TOGETHER, choose_slice_samples(source.mean_sample_bytes))
    for start in range(0, count, together):
        stop = min(count, start + together)
        samples = source.read(np.arange(ordinal + start, ordinal + stop)).samples(0, stop - start)
        for place, sample in enumerate(samples, start):
            values[place] = _measure(source, function, decoder, sample)
    return values


def _measure(
    source: Source, function: Callable[[Any], Any], decoder: SampleDecoder | None, sample: Any
) -> float:
    try:
        if isinstance(sample, UnreadableSample):
            raise sample.error
        value = float(function(sample if decoder is None else decoder(sample)))
        if not np.isfinite(value):
            raise ValueError(f"the function returned {value}, expected a finite number")
        return value
    except Exception as error:
        reason = str(error) if isinstance(error, EnergonError) else describe_error(error)
        raise SampleError(
            f"{redact(os.fspath(source.path))}: {sample['__shard__']}: the measure of sample "
            f"{sample['__key__']!r} failed: {reason}"
        ) from error


@lru_cache(maxsize=8)
def _unpacked(run: str, folder: str, packed: bytes) -> tuple[Any, Any, SampleDecoder | None]:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    source, function, decoder = pickle.loads(packed)
    return source, function, decoder
