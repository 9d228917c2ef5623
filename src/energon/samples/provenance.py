"""The origin of samples by name: dataset, key, shard and parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import repeat
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


def known_source(*known: Any) -> SampleSource:
    """Return the source of a sample: dataset, key, restore key, shard and names of its parts."""
    source = blank_source()
    fill_source(source, known)
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
