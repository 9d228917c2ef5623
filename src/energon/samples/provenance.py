"""The origin of samples by name: dataset, key, shard and parts.

Batches are sent with the sources of their samples by property. One by one, pickling them takes as
long as all else that a text sample costs. What they tell is mostly the same for all of them, or
known from the samples themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain, islice, repeat
from operator import itemgetter
from typing import Any, TypeVar, cast, final

T = TypeVar("T")


@dataclass(frozen=True)
class SourceInfo:
    """One of the sources of a sample.

    Args:
        dataset_path: The dataset.
        index: Number of the sample in the split, or the name of a file in a store.
        shard_name: The shard, as the dataset lists it; None for datasets without shards.
        file_names: The files of the sample.

    Example:
        >>> from energon import WorkerConfig, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_val_dataset("photos", worker_config=config, batch_size=None)
        >>> source = next(iter(dataset)).__sources__[0]
        >>> source.shard_name, source.index, source.file_names
        ('shard-0.tar', 0, ('8.png', '8.txt'))
    """

    dataset_path: str
    index: int | str
    shard_name: str | None
    file_names: tuple[str, ...]


@final
class SampleSource(SourceInfo):
    """The `SourceInfo` of a sample that was just read, computed on first access.

    Every cooked sample has one, and hardly any program looks at it.
    """

    __slots__ = ("_known",)
    _known: tuple[str, Any, Any, str | None, tuple[str, ...]]

    def __init__(
        self,
        dataset_path: str,
        index: int | str,
        shard_name: str | None,
        file_names: tuple[str, ...],
    ) -> None:
        object.__setattr__(self, "_known", (dataset_path, None, (index,), shard_name, file_names))

    @property
    def dataset_path(self) -> str:
        """The dataset."""
        return self._known[0]

    @property
    def index(self) -> int | str:
        """Number of the sample in the split."""
        return self._known[2][-1]  # type: ignore[no-any-return]

    @property
    def shard_name(self) -> str | None:
        """The shard."""
        return self._known[3]

    @property
    def file_names(self) -> tuple[str, ...]:
        """The files of the sample."""
        _, key, _, _, names = self._known
        if key is None:
            return names
        return tuple(f"{key}.{name}" for name in names if not name.startswith("__"))

    def __eq__(self, other: object) -> bool:
        if type(other) not in (SourceInfo, SampleSource):
            return NotImplemented
        return astuple(self) == astuple(cast("SourceInfo", other))

    def __hash__(self) -> int:
        return hash(astuple(self))

    def __repr__(self) -> str:
        return repr(SourceInfo(*astuple(self)))

    def __reduce__(self) -> tuple[Callable[..., SampleSource], tuple[Any, ...]]:
        return known_source, self._known


blank_source = partial(SampleSource.__new__, SampleSource)
"""Returns a source of which nothing is known yet. This and the next run no code of Python."""
fill_source: Callable[[SampleSource, tuple[Any, ...]], None]
fill_source = SampleSource._known.__set__  # type: ignore[attr-defined]
"""Called with a source and what `known_source` takes, returns None."""


def known_source(*properties: Any) -> SampleSource:
    """Return the source of a sample: dataset, key, restore key, shard and names of its parts."""
    source = blank_source()
    fill_source(source, properties)
    return source


def known_sources(columns: Sequence[Sequence[Any]], count: int) -> list[SampleSource]:
    """Return the sources of samples.

    Args:
        columns: A column for each argument of `known_source`; a single value stands for all
            samples.
        count: How many samples there are.
    """
    rows = zip(*[c if len(c) == count else repeat(c[0]) for c in columns], strict=False)
    sources = [blank_source() for _ in range(count)]
    deque(map(fill_source, sources, rows), maxlen=0)
    return sources


def sources_of(dataset_path: str, raw: Mapping[str, Any]) -> tuple[SourceInfo, ...]:
    """Return the sources of a sample that was just read.

    Args:
        dataset_path: The dataset.
        raw: The sample, with its key, shard and restore key.
    """
    key, restore_key, shard = raw["__key__"], raw["__restore_key__"], raw["__shard__"]
    return (known_source(dataset_path, key, restore_key, shard, tuple(raw)),)


def record_sources(dataset_path: str, samples: Sequence[dict[str, Any]]) -> None:
    """Attach its source to each of some samples that were just read."""
    origins = map(itemgetter("__key__", "__restore_key__", "__shard__"), samples)
    for sample, (key, restore_key, shard) in zip(samples, origins, strict=True):
        source = known_source(dataset_path, key, restore_key, shard, tuple(sample))
        sample["__sources__"] = (source,)


def add_source_info(sample: T, *sources: SourceInfo) -> T:
    """Add to the sources of `sample`, a dict or an object with `__sources__`, and return it."""
    earlier = get_source_info(sample) or ()
    if isinstance(sample, dict):
        sample["__sources__"] = (*earlier, *sources)
    else:
        sample.__sources__ = (*earlier, *sources)  # type: ignore[attr-defined]
    return sample


def get_source_info(sample: Any) -> tuple[SourceInfo, ...] | None:
    """Return the sources of `sample`; None if it has none."""
    if isinstance(sample, dict):
        return sample.get("__sources__")
    return getattr(sample, "__sources__", None)


Known = list[Any]
"""What is known of some sources. For each property, in the order of `known_source`, that is the
name of the column of their samples that has the values, or else a column of its own, of one value
if all sources share it."""

PackedSources = tuple[int, Sequence[int] | None, Known]
"""Tuples of sources: how many sources there are in total, how many are in each tuple (None: one),
and what is known of them."""

FEW_SOURCES = 4
"""Fewer of them pickle as quickly one by one."""

_NAMES = {1: "__key__", 2: "__restore_key__", 3: "__shard__"}
"""The properties that samples have as well."""


def pack_sources(
    column: Sequence[Any], samples: Mapping[str, Sequence[Any]]
) -> PackedSources | None:
    """Return the sources of samples in the form that is sent; None if they are anything else.

    Args:
        column: The sources of each sample.
        samples: The other columns of the samples, by name.
    """
    if not column or not all_are(tuple, column):
        return None
    counts: Sequence[int] | None = None
    try:
        sources = [source for (source,) in column]
    except ValueError:  # several of a sample, or none
        counts = [*map(len, column)]
        sources = [*chain.from_iterable(column)]
    if not sources or not all_are(SampleSource, sources):
        return None
    columns: Known = list(zip(*[source._known for source in sources], strict=True))
    if counts is None:
        for at, name in _NAMES.items():
            if name in samples and _are_equal(columns[at], samples[name]):
                columns[at] = name
    return len(sources), counts, [c if type(c) is str else _shortened(c) for c in columns]


def unpack_sources(
    packed: PackedSources, samples: Mapping[str, Sequence[Any]]
) -> list[tuple[SampleSource, ...]]:
    """Return the sources of each sample: what `pack_sources` was given."""
    count, counts, columns = packed
    sources = known_sources([samples[c] if type(c) is str else c for c in columns], count)
    if counts is None:
        return list(zip(sources))
    remaining = iter(sources)
    return [tuple(islice(remaining, each)) for each in counts]


class ReducedSources:
    """Stands for the sources of a batch in its pickle, where they come out again.

    Args:
        reduced: How to make them.
    """

    __slots__ = ("reduced",)

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def reduce_sources(sources: Any) -> ReducedSources | None:
    """Return the sources of a batch in columns; None for a form that pickles as it is.

    Args:
        sources: The sources of each sample in a list, or those of all samples in a tuple.
    """
    is_list = type(sources) is list
    packed = pack_sources(sources if is_list else (sources,), {})
    if packed is None or packed[0] < FEW_SOURCES:
        return None
    return ReducedSources(
        (unpack_sources, (packed, {})) if is_list else (_sources_of_batch, (packed,))
    )


def _sources_of_batch(packed: PackedSources) -> tuple[SampleSource, ...]:
    return unpack_sources(packed, {})[0]


def _shortened(column: Sequence[Any]) -> Sequence[Any]:
    first = column[0]
    return column[:1] if column[-1] == first and column.count(first) == len(column) else column


def _are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    try:
        return one == other
    except (TypeError, ValueError):  # arrays among them
        return False


def all_are(kind: type, values: Sequence[Any]) -> bool:
    """Return whether all values are of exactly this type."""
    return [*map(type, values)].count(kind) == len(values)
