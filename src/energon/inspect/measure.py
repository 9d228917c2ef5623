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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, EmptyDatasetError, FormatError, SampleError, reason_of
from energon.formats.meta.info import META
from energon.formats.tables.measure_table import (
    SUFFIX,
    MeasuredFile,
    MeasureHeader,
    MeasureTable,
    as_floats,
    write_measures,
)
from energon.formats.text import parse_json
from energon.inspect.info import find_leaves
from energon.io.address import is_remote, redact
from energon.io.atomic import atomic_path, locked
from energon.io.disk_cache import disk_cache
from energon.io.files import write_bytes
from energon.limits import allowed_by_environment
from energon.metadataset.leaf import Leaf
from energon.plan.leaves.leaf import choose_slice_samples
from energon.prepare.engines import Engine, run_batches
from energon.prepare.files import dataset_lock, reporting
from energon.samples.crude import UnreadableSample
from energon.sources.kinds import kind_named
from energon.sources.measures import (
    NumbersFiles,
    beside_index,
    check_measure_name,
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


class SampleRange(NamedTuple):
    """Consecutive samples of a file of a dataset."""

    file: str
    stamp: str
    start: int
    stop: int


class _Job(NamedTuple):
    """A piece that is measured."""

    dataset: MeasuredDataset
    piece: SampleRange
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
        progress: Called with the number of finished samples, and the total.

    Raises:
        DatasetNotFoundError: If there is no dataset.
        ConfigError: If the name is invalid, or a dataset cannot be measured.
        DatasetBusyError: If another process writes the dataset.
        SampleError: If the function fails, or returns no number.
    """
    check_measure_name(name)
    # Clusters have environments of their own.
    decoder = SampleDecoder("pil", allow=sorted(allowed_by_environment())) if decode else None
    return run_measure(
        path,
        f"{name}{SUFFIX}",
        lambda dataset, file: _NumberStore(dataset, file, name, function_name, again=again),
        _Numbers(function, decoder),
        engine=engine,
        wait=wait,
        progress=progress,
    )


class Results(Protocol):
    """Where the results for the samples of a dataset are kept, so that a run can be continued."""

    def is_measured(self, piece: SampleRange) -> bool:
        """Return whether consecutive samples have results, also if their file has changed."""

    def add(self, piece: SampleRange, results: Any) -> None:
        """Keep the results of a piece."""

    def write(self) -> None:
        """Store all of them beside the index, unless nothing has changed."""

    def close(self) -> None:
        """Leave what is not stored to the next run."""


def run_measure(
    path: str | os.PathLike[str],
    file: str,
    store: Callable[[MeasuredDataset, Path], Results],
    function: Callable[[Any, str, Ints], Any],
    *,
    engine: Engine | None,
    wait: bool,
    progress: Progress,
) -> list[MeasureReport]:
    """Call a function with all samples of a dataset, or of each dataset of a metadataset.

    Args:
        path: Where it is.
        file: The end of the name of the file that results are stored in.
        store: Returns where the results of a dataset are kept, in a file at a path.
        function: Returns the results of samples, from their source, its kind and their numbers.
        engine: Where to run; None for processes of this machine.
        wait: Whether to wait for another process that writes the dataset.
        progress: Called with the number of finished samples, and the total.
    """
    contents = find_leaves(path)
    if problems := contents.problems:
        raise ConfigError("; ".join(f"split {split!r}: {line}" for split, line in problems))
    leaves: dict[str, list[Leaf]] = {}
    for leaf in (leaf for split in contents.splits.values() for leaf in split):
        whole = replace(leaf, subsets=(), weight=None, origin=leaf.path)
        if whole not in leaves.setdefault(leaf.path, []):
            leaves[leaf.path].append(whole)
    with ExitStack() as stack:
        datasets = [
            stack.enter_context(MeasuredDataset(address, own, file).open(store, wait=wait))
            for address, own in leaves.items()
        ]
        jobs = [job for each in datasets for job in each.jobs(function)]
        total = sum(each.num_samples for each in datasets)
        done = total - sum(job.piece.stop - job.piece.start for job in jobs)
        progress(done, total)
        run, folder = secrets.token_hex(8), os.getcwd()
        calls = [
            (run, folder, job.packed, job.ordinal, job.piece.stop - job.piece.start) for job in jobs
        ]
        for number, results in run_batches(engine or Engine(), measure_batch, calls):
            jobs[number].dataset.add(jobs[number].piece, results)
            done += len(results)
            progress(done, total)
        return [each.write() for each in datasets]


class MeasuredDataset:
    """A dataset that is measured.

    Args:
        address: Where it is.
        leaves: Its splits.
        file: The end of the name of the file that results are stored in.

    Attributes:
        target: Where that file is.
        files: The files of the dataset, as far as its jobs have been made.
        index: Changes with its index; None if only the stamps of files tell.
    """

    def __init__(self, address: str, leaves: Sequence[Leaf], file: str) -> None:
        self.address, self.file = address, file
        self.target = beside_index(address, file)
        self.num_samples = self.measured = 0
        self.files: dict[str, MeasuredFile] = {}
        self.index: str | None = None
        self._leaves = leaves
        self._pieces: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def open(
        self, store: Callable[[MeasuredDataset, Path], Results], *, wait: bool
    ) -> Iterator[Self]:
        """Hold the right to write the file, and open the results of earlier runs."""
        folder = Path(self.address, META)
        lock: AbstractContextManager[Any]
        if not is_remote(self.address) and self.target.startswith(f"{folder}/"):
            lock = dataset_lock(folder.parent, wait=wait)
            path = folder / f"{self.file}.partial"
        else:
            path = disk_cache().folder / "measures"
            path.mkdir(parents=True, exist_ok=True)
            path /= blake2b(self.target.encode(), digest_size=12).hexdigest()
            lock = locked(path.with_suffix(".lock"))
        with lock, closing(store(self, path)) as self._results:
            yield self

    def jobs(self, function: Callable[..., Any]) -> Iterator[_Job]:
        """Yield the pieces without results."""
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
            self.index = whole.index_stamp()
            yield from self._jobs_of(whole, cloudpickle.dumps((whole, leaf.kind, function)))

    def _jobs_of(self, source: Any, packed: bytes) -> Iterator[_Job]:
        fitting = int(BYTES_MEASURED_TOGETHER / max(1, source.mean_sample_bytes))
        size = max(1, min(MEASURED_TOGETHER, fitting))
        ordinal = 0
        for number, (name, count, first, stop) in enumerate(source.file_samples()):
            if first == stop:
                continue
            stamp = source.file_stamp(number)
            self.files[name] = MeasuredFile(count, stamp)
            pieces = self._pieces.setdefault(name, [])
            if (first, stop) not in pieces:
                pieces.append((first, stop))
                self.num_samples += stop - first
                for start in range(first, stop, size):
                    piece = SampleRange(name, stamp, start, min(stop, start + size))
                    if not self._results.is_measured(piece):
                        yield _Job(self, piece, packed, ordinal + start - first)
            ordinal += stop - first

    def add(self, piece: SampleRange, results: Any) -> None:
        """Keep the results of a piece."""
        self._results.add(piece, results)
        self.measured += len(results)

    def write(self) -> MeasureReport:
        """Store all results, unless nothing has changed."""
        self._results.write()
        return MeasureReport(
            redact(self.address), self.num_samples, self.measured, redact(self.target)
        )

    def upload(self, file: Path) -> None:
        """Move a file that is complete to where it belongs, if that is in a store."""
        write_bytes(self.target, file)
        file.unlink()


class _NumberStore:
    """The numbers of the samples of a dataset, from earlier runs and this one.

    Args:
        dataset: The dataset.
        path: Where its journal is.
        name: Name of the measure.
        function: The function that computes it, as `module:function`.
        again: Whether to measure again the samples that have a value.
    """

    def __init__(
        self, dataset: MeasuredDataset, path: Path, name: str, function: str, *, again: bool
    ) -> None:
        self._dataset, self._name, self._function = dataset, name, function
        self._old = None if again else self._read_old()
        self._journal = _Journal(path, [name, function, again])
        self._checked: tuple[str, NDArray[np.float64] | None] = "", None
        """The last file for which earlier values were asked, and its values."""

    def _read_old(self) -> MeasureTable | None:
        try:
            table = read_measure(self._dataset.address, self._name)
        except FormatError:
            return None  # it is replaced
        if table is None or table.header.function != self._function:
            return None
        return table

    def is_measured(self, piece: SampleRange) -> bool:
        """Return whether all samples of a piece have a value."""
        if piece in self._journal.pieces.get(piece.file, ()):
            return True
        if self._checked[0] != piece.file:
            self._checked = piece.file, self._old_values(piece.file)
        values = self._checked[1]
        return values is not None and not np.isnan(values[piece.start : piece.stop]).any()

    def _old_values(self, name: str) -> NDArray[np.float64] | None:
        """Return the values of a file that has not changed; None if there are none."""
        old, file = self._old, self._dataset.files[name]
        if old is None or old.header.files.get(name) != file:
            return None
        try:
            return as_floats(old.of_file(old.numbers[name]))
        except FormatError:
            return None  # damaged values are replaced

    def add(self, piece: SampleRange, results: NDArray[np.float64]) -> None:
        """Keep the values of a piece."""
        self._journal.add(piece, results)

    def write(self) -> None:
        """Write all values, unless nothing has changed."""
        dataset = self._dataset
        header = MeasureHeader(self._name, self._function, "float32", dataset.index, dataset.files)
        if self._journal.is_whole and (self._old is None or self._old.header.dtype == "int32"):
            header = replace(header, dtype="int32")
        if self._old is None or self._journal.pieces or self._old.header != header:
            self._write(header)
        self._journal.path.unlink(missing_ok=True)

    def _write(self, header: MeasureHeader) -> None:
        target = self._dataset.target
        local = self._journal.path.with_suffix(".new") if is_remote(target) else target
        with reporting(local), atomic_path(local) as temporary, open(temporary, "wb") as file:
            write_measures(file, header, self._values_of)
        if is_remote(target):
            self._dataset.upload(Path(local))

    def _values_of(self, name: str) -> Iterator[tuple[int, NDArray[np.float64]]]:
        old = self._old_values(name)
        if old is not None:
            yield 0, old
        for piece in self._journal.pieces_of(name, self._dataset.files[name].stamp):
            yield piece.start, self._journal.read(piece)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


class _Journal:
    """The values of the pieces that a run has measured so far, in a file.

    Each record is a line of JSON, and the values. A record that a killed run has not completed is
    dropped.

    Args:
        path: The file; created if missing.
        identity: Of the measure; the records of other ones are dropped.
    """

    def __init__(self, path: Path, identity: list[Any]) -> None:
        self.path = path
        self.is_whole = True
        """Whether all values are whole numbers of 32 bits."""
        self.pieces: defaultdict[str, dict[SampleRange, int]] = defaultdict(dict)
        """By file, the offset of the values of each piece."""
        with reporting(path):
            # `close` closes it.
            self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        head = json.dumps(identity).encode() + b"\n"
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

    def _record(self) -> tuple[SampleRange, NDArray[np.float64], int] | None:
        """Return the next record; None if there is none, or it is not complete."""
        try:
            *piece, checksum = parse_json(self._file.readline(), origin=str(self.path))
            key = SampleRange(*piece)
        except (FormatError, TypeError, ValueError):
            return None
        at = self._file.tell()
        data = self._file.read(8 * (key.stop - key.start))
        if len(data) != 8 * (key.stop - key.start) or zlib.crc32(data) != checksum:
            return None
        return key, np.frombuffer(data, "<f8"), at

    def _note(self, piece: SampleRange, values: NDArray[np.float64], at: int) -> None:
        self.pieces[piece.file][piece] = at
        whole = (values == np.round(values)) & (np.abs(values) <= LARGEST_INT)
        self.is_whole &= bool(whole.all())

    def add(self, piece: SampleRange, values: NDArray[np.float64]) -> None:
        """Append a record."""
        data = values.astype("<f8").tobytes()
        with reporting(self.path):
            self._file.write(json.dumps([*piece, zlib.crc32(data)]).encode() + b"\n")
            at = self._file.tell()
            self._file.write(data)
            self._file.flush()
        self._note(piece, values, at)

    def pieces_of(self, file: str, stamp: str) -> list[SampleRange]:
        """Return the pieces of a file that has not changed since they were measured."""
        return [piece for piece in self.pieces.get(file, ()) if piece.stamp == stamp]

    def read(self, piece: SampleRange) -> NDArray[np.float64]:
        """Return the values of a piece."""
        self._file.seek(self.pieces[piece.file][piece])
        return np.frombuffer(self._file.read(8 * (piece.stop - piece.start)), "<f8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def measure_batch(run: str, folder: str, packed: bytes, ordinal: int, count: int) -> Any:
    """Return the results of consecutive samples.

    Args:
        run: The run it belongs to: sources are unpacked once for each.
        folder: The working directory of the command, where the function may be.
        packed: The source, its kind and the function, pickled.
        ordinal: The number of the first sample.
        count: How many.

    Raises:
        SampleError: If a sample cannot be read, or the function fails.
    """
    source, kind, function = _unpacked(run, folder, packed)
    return function(source, kind, np.arange(ordinal, ordinal + count))


@dataclass(frozen=True)
class _Numbers:
    """Calls a function of the user with each sample."""

    function: Callable[[Any], Any]
    decoder: SampleDecoder | None

    def __call__(self, source: Any, kind: str, ordinals: Ints) -> NDArray[np.float64]:
        """Return the numbers of samples."""
        values: list[float] = []
        together = min(READ_TOGETHER, choose_slice_samples(source.mean_sample_bytes))
        for start in range(0, len(ordinals), together):
            own = ordinals[start : start + together]
            samples = source.read(own).samples(0, len(own))
            values += [self._of(source, sample) for sample in samples]
        return np.array(values)

    def _of(self, source: Source, sample: Any) -> float:
        try:
            if isinstance(sample, UnreadableSample):
                raise sample.error
            value = float(self.function(self.decoder(sample) if self.decoder else sample))
            if not np.isfinite(value):
                raise ValueError(f"the function returned {value}, expected a finite number")
            return value
        except Exception as error:
            shard, key = sample["__shard__"], sample["__key__"]
            raise measure_failed(source, shard, key, "the measure", error) from error


def measure_failed(
    source: Source, shard: str, key: str, noun: str, error: Exception
) -> SampleError:
    """Return the error for a sample that cannot be measured or read; `noun` names the attempt."""
    path = redact(os.fspath(source.path))
    return SampleError(f"{path}: {shard}: {noun} of sample {key!r} failed: {reason_of(error)}")


@lru_cache(maxsize=8)
def _unpacked(run: str, folder: str, packed: bytes) -> tuple[Any, str, Any]:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    source, kind, function = pickle.loads(packed)
    return source, kind, function
