"""The origin of samples: restore keys, and sources by name.

A restore key tells where in the data a sample, a pack or a batch came from. A sample that was read
has the key (leaf, epoch, ordinal). A combination of several has the key (kind, (key, key, …)); a
batch adds its number in the run, and each hook that yields several outputs appends the number of
the output. Keys are independent of ranks and workers.

    (0, 3, 4711)                                 a sample
    (0, 3, 4711, 1)                              the second output of a generator
    ("pack", ((0, 3, 4711), (0, 3, 12)))         a pack of two samples
    ("batch", ((0, 3, 4711), (0, 3, 12)), 170)   a batch
    ((0, 3, 4711), (0, 3, 12))                   the same, by hand: the keys of its samples

A `SourceInfo` says so with names: dataset, key, shard and parts.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, TypeVar, cast, final

RestoreKey = tuple[Any, ...]


def key_of(item: Any) -> RestoreKey | None:
    """Return the restore key of a sample or a batch; None if it carries none.

    Hooks may store anything there: only what looks like a key counts.
    """
    if isinstance(item, dict):
        key = item.get("__restore_key__")
    else:
        key = getattr(item, "__restore_key__", None)
    return key if key and isinstance(key, tuple | list) else None  # type: ignore[return-value]


def carries_key(item: Any) -> bool:
    """Return whether the type of `item` can carry keys."""
    if isinstance(item, dict):
        return "__restore_key__" in item
    return hasattr(item, "__restore_key__")


def stamp(item: Any, key: RestoreKey) -> None:
    """Attach `key` to `item`, if its type can carry keys."""
    if not carries_key(item):
        return
    if isinstance(item, dict):
        item["__restore_key__"] = key
    else:
        with contextlib.suppress(AttributeError):  # a frozen type of the user
            item.__restore_key__ = key


def joint_key(kind: str, items: Iterable[Any]) -> RestoreKey | None:
    """Return the key of a combination of `items`; None unless all of them carry keys."""
    keys = tuple(map(key_of, items))
    return None if None in keys or not keys else (kind, keys)


def flat(key: Iterable[Any]) -> tuple[int | str, ...]:
    """Return the numbers and words of a key, one after another."""
    parts: list[int | str] = []
    for part in key:
        if isinstance(part, tuple | list):
            parts += flat(part)
        else:
            parts.append(part)
    return tuple(parts)


def split_key(key: Iterable[Any], kind: str) -> tuple[list[RestoreKey], RestoreKey] | None:
    """Return the keys in a joint key, and the numbers appended to it.

    Accepts (kind, keys, *numbers) and the short form, a list of keys; returns None for other keys.
    Lists count as tuples, since a key may have passed through JSON.
    """
    key = tuple(key)
    if len(key) > 1 and key[0] == kind and isinstance(key[1], tuple | list) and key[1]:
        return [to_tuple(each) for each in key[1]], key[2:]
    joined = [part for part in key if isinstance(part, tuple | list)]
    if not joined or joined != list(key[: len(joined)]):
        return None
    return [to_tuple(each) for each in joined], key[len(joined) :]


def to_tuple(key: Any) -> Any:
    """Return a key that passed through JSON with tuples in place of lists."""
    return tuple(to_tuple(part) for part in key) if isinstance(key, tuple | list) else key


def sample_keys(key: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield (leaf, epoch, ordinal) of every sample that a key stands for."""
    parts = tuple(key)
    if len(parts) >= 3 and all(isinstance(part, int) for part in parts[:3]):
        yield parts[:3]
        return
    for part in parts:
        if isinstance(part, tuple | list):
            yield from sample_keys(part)


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
    known = zip(*[c if len(c) == count else repeat(c[0]) for c in columns], strict=False)
    sources = [blank_source() for _ in range(count)]
    deque(map(fill_source, sources, known), maxlen=0)
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
    known = map(itemgetter("__key__", "__restore_key__", "__shard__"), samples)
    for sample, (key, restore_key, shard) in zip(samples, known, strict=True):
        source = known_source(dataset_path, key, restore_key, shard, tuple(sample))
        sample["__sources__"] = (source,)


def add_source_info(sample: T, *sources: SourceInfo) -> T:
    """Add to the sources of `sample`, a dict or an object with `__sources__`, and return it."""
    known = get_source_info(sample) or ()
    if isinstance(sample, dict):
        sample["__sources__"] = (*known, *sources)
    else:
        sample.__sources__ = (*known, *sources)  # type: ignore[attr-defined]
    return sample


def get_source_info(sample: Any) -> tuple[SourceInfo, ...] | None:
    """Return the sources of `sample`; None if it has none."""
    if isinstance(sample, dict):
        return sample.get("__sources__")
    return getattr(sample, "__sources__", None)
