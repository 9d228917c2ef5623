"""The measures of samples, and the costs that follow from them.

A measure is a number for each sample, by its number in the dataset. Sizes in the index are
measures without further work: `bytes` is the size of a sample, `jpg:bytes` that of its part `jpg`.
`energon measure` stores others beside the index.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, distinct
from energon.errors import ConfigError, FormatError
from energon.formats.meta.info import META
from energon.formats.tables.measure_table import SUFFIX, MeasureTable
from energon.io.address import is_remote, join_address, redact
from energon.io.epath import AnyPath
from energon.io.files import file_info, is_file, list_files, open_store, read_bytes
from energon.local_file import map_file
from energon.messages import shell_word
from energon.plan.balance import Measures
from energon.plan.rows import Rows
from energon.sources.join import MISSING, JoinedSource
from energon.sources.source import FileSamples, Source

CHECKED_SAMPLES = 64
"""Samples of each dataset whose costs are checked before a run begins."""
MEAN_SAMPLES = 4096
"""Samples of each dataset whose mean length decides how many samples windows of packs have."""
DESCRIBED_RUNS = 32
DESCRIBED_TOGETHER = 2048
"""Distributions are those of up to 32 runs of 2,048 samples."""
DESCRIBED_STEPS = 12
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@runtime_checkable
class HasMeasures(Protocol):
    """A source that has measures of its samples."""

    def measure(self, name: str, ordinals: Ints) -> NDArray[np.float64] | None:
        """Return a measure of samples, in the order of `ordinals`; None if there is none."""

    def measure_names(self) -> list[str]:
        """Return the names of its measures."""


@runtime_checkable
class NumbersFiles(Protocol):
    """A source that tells where samples are in the files of its dataset, for stored measures."""

    path: AnyPath

    def file_samples(self) -> list[FileSamples]:
        """Return the files of the dataset that the split is in."""

    def in_files(self, ordinals: Ints) -> tuple[Ints, Ints]:
        """Return the number of the file of each sample, and that of the sample in its file."""

    def index_stamp(self) -> str | None:
        """Return a stamp of the index of the dataset; None if the stamps of files tell."""

    def file_stamp(self, number: int) -> str:
        """Return a stamp of the content of a file."""


@dataclass(frozen=True)
class SampleCosts:
    """The costs of samples, by their rows in a plan.

    Args:
        cost: The name of a measure, or a function of measures.
        sources: The sources, one for each leaf.
    """

    cost: str | Callable[[Measures], NDArray[Any]]
    sources: Sequence[Source]

    def __call__(self, rows: Rows) -> NDArray[np.float64]:
        """Return the cost of each sample; 0 for gaps.

        Raises:
            ConfigError: If a dataset has no such measure, or the function returns no costs.
        """
        costs = np.zeros(len(rows.leaf))
        for leaf in distinct(rows.leaf).tolist():
            if leaf >= 0:
                chosen = np.flatnonzero(rows.leaf == leaf)
                costs[chosen] = self._of(self.sources[leaf], rows.ordinal[chosen])
        return costs

    def check(self) -> None:
        """Raise ConfigError if the costs of a few samples of some dataset are missing, or all 0."""
        for source in self.sources:
            # A run needs it anyway, and it asks stores for several shards at once: opening the
            # first of them takes no further request.
            _ = source.mean_sample_bytes
            # Those of the first shard have costs, as a rule, and no other has to be opened.
            if self._of(source, np.arange(min(len(source), CHECKED_SAMPLES))).any():
                continue
            ordinals = distinct(np.linspace(0, len(source) - 1, CHECKED_SAMPLES).astype(np.int64))
            if not self._of(source, ordinals).any():
                names = ", ".join(SourceMeasures(source, ordinals))
                raise ConfigError(
                    f"the costs of all {len(ordinals)} samples tried of {source.path} are 0, by "
                    f"{self.cost!r}; its measures are: {names}"
                )

    def digest(self) -> str | None:
        """Return a stamp of the stored measures that `check` has read; None without any."""
        digests = [
            (number, name, stored.table.digest)
            for number, source in enumerate(self.sources)
            for each in (source.members if isinstance(source, JoinedSource) else [source])
            for (of, name), stored in self._stored.items()
            if of == id(each) and stored is not None
        ]
        if not digests:
            return None
        return blake2b(repr(digests).encode(), digest_size=8).hexdigest()

    def _of(self, source: Source, ordinals: Ints) -> NDArray[np.float64]:
        measures = SourceMeasures(source, ordinals, self._stored)
        if isinstance(self.cost, str):
            return measures[self.cost]
        try:
            costs = np.asarray(self.cost(measures), np.float64)
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError | FormatError):
                raise
            raise ConfigError(f"the cost function {self.cost!r} failed: {error}") from error
        if costs.shape != ordinals.shape or not np.isfinite(costs).all():
            raise ConfigError(
                f"the cost function {self.cost!r} returned an array of shape {costs.shape} with "
                f"{int((~np.isfinite(costs)).sum())} infinite or missing values for "
                f"{len(ordinals)} samples of {source.path}; expected a finite number for each"
            )
        return costs

    @cached_property
    def _stored(self) -> dict[tuple[int, str], StoredMeasure | None]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclass(frozen=True)
class SampleLengths:
    """The lengths of samples in one or several dimensions, by their rows in a plan.

    Args:
        dimensions: The length in each dimension.
        context: The largest length in each dimension.
        leave_out: Whether longer samples are left out of the order; otherwise they are errors.
    """

    dimensions: tuple[SampleCosts, ...]
    context: tuple[int, ...]
    leave_out: bool = False

    def __call__(self, rows: Rows) -> Ints:
        """Return the lengths of each sample, shape (samples, dimensions); 0 for gaps.

        Raises:
            ConfigError: If a measure is missing, below 0, or beyond the context.
        """
        lengths = np.ceil(np.stack([each(rows) for each in self.dimensions], axis=1))
        wrong = lengths < 0
        if not self.leave_out:
            wrong |= lengths > np.array(self.context)
        if wrong.any():
            at, dimension = (int(each[0]) for each in np.nonzero(wrong))
            source = self.dimensions[0].sources[int(rows.leaf[at])]
            where = source.locate(int(rows.ordinal[at]))
            raise ConfigError(
                f"sample {where.key!r} of {where.shard} in {source.path} has the length "
                f"{lengths[at, dimension]:g} by {self.dimensions[dimension].cost!r}, and the "
                f"limit is {self.context[dimension]}; exclude it, or raise the context or "
                "batch_cost. PlannedPacks(too_long='leave_out') leaves longer samples out of packs"
            )
        return lengths.astype(np.int64)

    def squared(self, rows: Rows) -> NDArray[np.float64]:
        """Return the squares of the lengths in the first dimension, to which attention is due."""
        return np.ceil(self.dimensions[0](rows)) ** 2

    def check(self) -> None:
        """Raise ConfigError if a measure is missing, or all first lengths of some dataset are 0."""
        self.dimensions[0].check()
        for leaf in range(len(self.dimensions[0].sources)):
            number = np.zeros(1, np.int64)
            for each in self.dimensions[1:]:  # of which a dataset may have none, such as images
                each(Rows(np.full(1, leaf, np.int32), number, number))

    def digest(self) -> str | None:
        """Return a stamp of the stored measures that `check` has read; None without any."""
        return joint_digest(self.dimensions)

    def mean(self, shares: Sequence[float]) -> list[float]:
        """Return the mean length in each dimension of a mix of the datasets by these shares."""
        totals = np.zeros(len(self.dimensions))
        for leaf, (source, share) in enumerate(
            zip(self.dimensions[0].sources, shares, strict=True)
        ):
            count = min(len(source), MEAN_SAMPLES)
            ordinals = np.linspace(0, len(source) - 1, count).astype(np.int64)
            same = np.full(count, leaf, np.int32)
            rows = Rows(same, np.zeros(count, np.int64), ordinals)
            for number, each in enumerate(self.dimensions):
                lengths = np.minimum(np.ceil(each(rows)), self.context[number])
                totals[number] += share * float(lengths.mean())
        return [float(total) / sum(shares) for total in totals]


def joint_digest(costs: Sequence[SampleCosts]) -> str | None:
    """Return a stamp of the stored measures of several costs; None without any."""
    digests = [each.digest() or "" for each in costs]
    return ",".join(digests) if any(digests) else None


class SourceMeasures(Mapping[str, NDArray[np.float64]]):
    """The measures of some samples of a source, read when they are asked for.

    Args:
        source: The source.
        ordinals: The numbers of the samples.
        stored: The stored measures that are open, by the identity of a source and their names.
    """

    def __init__(
        self,
        source: Source,
        ordinals: Ints,
        stored: dict[tuple[int, str], StoredMeasure | None] | None = None,
    ) -> None:
        self._source, self._ordinals = source, ordinals
        self._stored = {} if stored is None else stored

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        source = self._source
        values = self._of(source, name, self._ordinals)
        if values is None:
            names = ", ".join(self) or "none"
            hint = ""
            if _NAME.fullmatch(name):
                hint = f"; to add it, run `{measure_command(source.path, name)}`"
            raise ConfigError(
                f"{source.path} has no measure {name!r}; its measures are: {names}{hint}"
            )
        return values

    def __iter__(self) -> Iterator[str]:
        source = self._source
        members = source.members if isinstance(source, JoinedSource) else [source]
        names: dict[str, None] = {}
        for member in members:
            free = member.measure_names() if isinstance(member, HasMeasures) else []
            names |= dict.fromkeys([*free, *stored_measures(member.path)])
        return iter(names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _of(self, source: Source, name: str, ordinals: Ints) -> NDArray[np.float64] | None:
        """Return a measure of samples of a source; None if there is none.

        The measure of a joined sample is the sum of those of its members that have it.
        """
        if isinstance(source, JoinedSource):
            return self._of_join(source, name, ordinals)
        values = source.measure(name, ordinals) if isinstance(source, HasMeasures) else None
        if values is not None or not isinstance(source, NumbersFiles):
            return values
        key = id(source), name
        if key not in self._stored:
            self._stored[key] = open_measure(source, name)
        stored = self._stored[key]
        return None if stored is None else stored.at(ordinals)

    def _of_join(
        self, source: JoinedSource, name: str, ordinals: Ints
    ) -> NDArray[np.float64] | None:
        total = None
        for member, own in zip(source.members, source.member_ordinals(ordinals), strict=True):
            present = np.flatnonzero(own != MISSING)
            values = self._of(member, name, own[present])
            if values is not None:
                total = np.zeros(len(ordinals)) if total is None else total
                total[present] += values
        return total


class StoredMeasure:
    """A measure of the samples of a source, from a file.

    Args:
        source: The source.
        table: The content of the file.

    Raises:
        FormatError: If it was made for another index, or lacks samples.
    """

    def __init__(self, source: NumbersFiles, table: MeasureTable) -> None:
        self._source, self.table = source, table
        index = source.index_stamp()
        if table.header.index != index:
            raise self._stale("the dataset has changed since")
        numbers = []
        for own, file in enumerate(source.file_samples()):
            number = table.numbers.get(file.name, -1)
            if file.first < file.stop:
                measured = table.header.files.get(file.name)
                if measured is None or measured.num_samples != file.num_samples:
                    raise self._stale(f"it lacks samples of {file.name!r}")
                if index is None and measured.stamp != source.file_stamp(own):
                    raise self._stale(f"{file.name!r} has changed since")
            numbers.append(number)
        self._numbers = np.array(numbers, np.int64)

    def at(self, ordinals: Ints) -> NDArray[np.float64]:
        """Return the measure of samples, in the order of `ordinals`."""
        files, samples = self._source.in_files(ordinals)
        try:
            values = self.table.at(self._numbers[files], samples)
        except FormatError as error:
            raise self._stale(str(error)) from error
        if np.isnan(values).any():
            raise self._stale("it lacks samples")
        return values

    def _stale(self, problem: str) -> FormatError:
        header = self.table.header
        command = measure_command(self._source.path, header.name, header.function)
        return FormatError(
            f"the measure {header.name!r} of {self._source.path} cannot be used: {problem}; run "
            f"`{command}` again"
        )


def check_measure_name(name: str) -> None:
    """Raise ConfigError if a measure cannot be stored under a name."""
    if not _NAME.fullmatch(name) or name == "bytes":
        raise ConfigError(
            f"a measure cannot be called {name!r}; expected letters, digits, _ and -, as in "
            "'text_tokens' ('bytes' is the size of a sample)"
        )


def measure_command(path: AnyPath | str, name: str, function: str = "MODULE:FUNCTION") -> str:
    """Return the command that stores a measure."""
    where = shell_word(redact(os.fspath(path)))
    return f"energon measure {where} --name {name} --with {function}"


def beside_index(path: AnyPath | str, name: str) -> str:
    """Return where a file of numbers for the samples of a dataset is stored: beside its index."""
    address = os.fspath(path)
    # A bucket or server is a folder; appending to its name would give that of another.
    is_root = is_remote(address) and "/" not in address.partition("://")[2].strip("/")
    if not is_root and (is_file(address) or is_file(f"{address.rstrip('/')}.idx")):
        return f"{address}.{name}"
    return join_address(address, f"{META}/{name}")


def stored_measures(path: AnyPath | str) -> list[str]:
    """Return the names of the stored measures of a dataset."""
    pattern = beside_index(path, f"*{SUFFIX}")
    folder, _, name = pattern.rpartition("/")
    before = name.partition("*")[0]
    if is_remote(pattern):
        if not open_store(folder)[0].backend.can_list:
            return []  # a web server: measures are found only by their names
        names = [each.key for each in list_files(folder)]
    else:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(
        each[len(before) : -len(SUFFIX)]
        for each in names
        if each.startswith(before)
        and each.endswith(SUFFIX)
        and _NAME.fullmatch(each[len(before) : -len(SUFFIX)])
    )


def read_measure(path: AnyPath | str, name: str) -> MeasureTable | None:
    """Return the content of the file of a measure; None if there is none.

    Raises:
        FormatError: If it is damaged.
    """
    address = beside_index(path, f"{name}{SUFFIX}")
    if not is_remote(address):
        if not os.path.isfile(address):
            return None
        return MeasureTable(map_file(address), origin=address)
    info = file_info(address)
    if info is None:
        return None
    from energon.io.disk_cache import disk_cache  # local measures need none

    shown = redact(address)
    return disk_cache().load(
        f"{shown} measure",
        f"{info.version} {info.size}",
        lambda: read_bytes(address),
        lambda data: MeasureTable(data, origin=shown),
    )


def open_measure(source: NumbersFiles, name: str) -> StoredMeasure | None:
    """Return a stored measure of the samples of a source; None if there is none.

    Raises:
        FormatError: If it is damaged, or was made for another index.
    """
    if not _NAME.fullmatch(name):
        return None
    try:
        table = read_measure(source.path, name)
    except FormatError as error:
        command = measure_command(source.path, name)
        raise FormatError(f"{error}; delete the file, and run `{command}`") from error
    return None if table is None else StoredMeasure(source, table)


def describe_measures(sources: Sequence[Source]) -> dict[str, dict[str, Any]]:
    """Return the distributions of the measures of some sources together, by name, as plain data.

    Values are those of all samples, or of `DESCRIBED_RUNS` evenly spaced runs of them.
    """
    bounds = np.cumsum([0, *(len(source) for source in sources)])
    ordinals = spread_runs(int(bounds[-1]))
    cuts = np.searchsorted(ordinals, bounds)
    chosen = [
        (source, ordinals[low:high] - first)
        for source, first, (low, high) in zip(sources, bounds, pairwise(cuts), strict=False)
        if low < high
    ]
    stored: dict[tuple[int, str], StoredMeasure | None] = {}
    measures = [SourceMeasures(source, own, stored) for source, own in chosen]
    names = dict.fromkeys(name for each in measures for name in each)
    described: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            values = np.concatenate([each[name] for each in measures])
        except (ConfigError, FormatError) as error:
            described[name] = {"problem": str(error)}
            continue
        present = of_present(name, values[np.isfinite(values)])
        if not len(present):
            continue
        files = [stored.get((id(source), name)) for source, _ in chosen]
        functions = [file.table.header.function for file in files if file is not None]
        described[name] = {
            **({"function": functions[0]} if functions else {}),
            **_distribution(present),
            "measured": len(values),
            "samples": int(bounds[-1]),
        }
    return described


def spread_runs(total: int) -> Ints:
    """Return the numbers of samples that stand for all: all of them, or evenly spaced runs.

    Neighbors are stored together, so runs are read in fewer pieces than single samples.

    Example:
        >>> spread_runs(3), len(spread_runs(10**9))
        (array([0, 1, 2]), 65536)
    """
    if total <= DESCRIBED_RUNS * DESCRIBED_TOGETHER:
        return np.arange(total)
    starts = np.linspace(0, total - DESCRIBED_TOGETHER, DESCRIBED_RUNS).astype(np.int64)
    return (starts[:, None] + np.arange(DESCRIBED_TOGETHER)).reshape(-1)


def of_present(name: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of a measure without those of samples that lack its part, which are 0."""
    return values[values != 0] if ":" in name else values


def _distribution(values: NDArray[np.float64]) -> dict[str, Any]:
    """Return quantiles of numbers, and how many are below each of some bounds.

    The bounds are powers of two for whole numbers from 0 up, else evenly spaced.
    """
    # It imports SQLite, which training does not need.
    from energon.sources.part_statistics import SizeStatistics

    values = np.sort(values)
    # numpy.quantile would import numpy.ma.
    at = np.array([0, 0.5, 0.99, 1]) * (len(values) - 1)
    low, median, p99, high = np.interp(at, np.arange(len(values)), values).tolist()
    if 0 <= low <= high < 2**53 and (values == np.round(values)).all():
        sizes = SizeStatistics()
        sizes.add(values.astype(np.int64))
        buckets = sizes.to_json()["histogram"]
    else:
        counts, edges = np.histogram(values, DESCRIBED_STEPS)
        pairs = zip(edges[1:].tolist(), counts.tolist(), strict=True)
        buckets = [{"below": edge, "count": count} for edge, count in pairs]
    quantiles = {"min": low, "median": median, "p99": p99, "max": high}
    return {"count": len(values), **quantiles, "histogram": buckets}
