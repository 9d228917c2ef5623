"""Where the data of a sample came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True)
class SourceInfo:
    """One place that went into a sample.

    Args:
        dataset_path: The dataset.
        index: Number of the sample in the split, or the name of a file in a store.
        shard_name: The shard, as the dataset lists it; None where there are none.
        file_names: The files of the sample.
    """

    dataset_path: str
    index: int | str
    shard_name: str | None
    file_names: tuple[str, ...]


class SampleSource(SourceInfo):
    """Where a sample came from that was just read: a `SourceInfo` that is not worked out yet.

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

    def follows_from(self, sample: Mapping[str, Any]) -> tuple[str, tuple[str, ...]] | None:
        """Return what it tells that `sample` does not: the dataset, and the names of its parts.

        None if it tells other things than the sample does.
        """
        path, key, restore_key, shard, names = self._known
        get = partial(dict.get, sample)
        if key is None or key is not get("__key__") or shard is not get("__shard__"):
            return None
        return (path, names) if restore_key is get("__restore_key__") else None


_new = SampleSource.__new__
_know = SampleSource._known.__set__  # type: ignore[attr-defined]


def known_source(*known: Any) -> SampleSource:
    """Return the source of a sample: dataset, key, restore key, shard and names of its parts."""
    source = _new(SampleSource)
    _know(source, known)
    return source


def sources_of(dataset_path: str, raw: Mapping[str, Any]) -> tuple[SourceInfo, ...]:
    """Return where the parts of a sample come from that was just read.

    Args:
        dataset_path: The dataset.
        raw: The sample, with its key, shard and restore key.
    """
    key, restore_key, shard = raw["__key__"], raw["__restore_key__"], raw["__shard__"]
    source = _new(SampleSource)  # not known_source: this is called for every sample
    _know(source, (dataset_path, key, restore_key, shard, tuple(raw)))
    return (source,)


def add_source_info(sample: T, *sources: SourceInfo) -> T:
    """Note that `sources` went into `sample`, a dict or an object with `__sources__`; return it."""
    known = get_source_info(sample) or ()
    if isinstance(sample, dict):
        sample["__sources__"] = (*known, *sources)
    else:
        sample.__sources__ = (*known, *sources)  # type: ignore[attr-defined]
    return sample


def get_source_info(sample: Any) -> tuple[SourceInfo, ...] | None:
    """Return what went into `sample`; None if nobody noted it."""
    if isinstance(sample, dict):
        return sample.get("__sources__")
    return getattr(sample, "__sources__", None)
