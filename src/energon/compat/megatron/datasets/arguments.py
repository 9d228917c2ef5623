"""What a document says to a class, as its arguments; and what factories get and give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypedDict, TypeVar

from energon.errors import ConfigError, EnergonError
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Subset
from energon.plan.subset import resolve_range
from energon.samples.registry import resolve_class, resolve_function
from energon.samples.sample import Sample
from energon.task_encoder.dataset_class import DatasetClass
from energon.task_encoder.load import leaf_decoder

T = TypeVar("T")


def read_arguments(
    written: Mapping[str, Any], *, origin: str, allow: Collection[str] = ()
) -> dict[str, Any]:
    """Return what is written in a document, with classes for their names.

    Args:
        written: What is written.
        origin: The document.
        allow: What it may name beside what the program knows.

    Raises:
        ConfigError: If it is invalid.
        SecurityError: If it names what is not allowed.
    """
    return {
        key: _decoder(value, origin) if key == "decoder" else _value(value, allow)
        for key, value in written.items()
    }


def call_with(
    kind: Callable[..., T], written: Mapping[str, Any], defaults: Mapping[str, Any], *, origin: str
) -> T:
    """Return what `kind` makes of arguments of a document.

    Args:
        kind: A class.
        written: What the document says.
        defaults: More, for arguments that the class has, or passes on.
        origin: The document.

    Raises:
        ConfigError: If the class has no such argument, or needs others.
    """
    known = inspect.signature(kind).parameters
    hands_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    if not hands_on:
        unknown = [key for key in written if key not in known]
        if unknown:
            raise ConfigError(
                f"{origin}: {_name(kind)} has no {unknown[0]!r}; known are {', '.join(known)}"
            )
        defaults = {key: value for key, value in defaults.items() if key in known}
    try:
        return kind(**{**defaults, **written})
    except EnergonError:
        raise
    except TypeError as error:
        raise ConfigError(f"{origin}: {_name(kind)}: {error}") from error


def _value(value: Any, allow: Collection[str]) -> Any:
    """Return what stands in a document; a class or function, if it names one."""
    if isinstance(value, Mapping):
        names = {name: str(given) for name, given in value.items()}
        if set(value) == {"__module__", "__class__"}:
            kinds = (Sample, DatasetClass)
            return resolve_class(names["__module__"], names["__class__"], allow=allow, kinds=kinds)
        if set(value) == {"__module__", "__function__"}:
            return resolve_function(names["__module__"], names["__function__"], allow=allow)
    return value


def _decoder(value: Any, origin: str) -> Any:
    if value is not None and not isinstance(value, Mapping):
        return value
    return leaf_decoder(DatasetConfig(decoder=value, given=frozenset({"decoder"}), origin=origin))


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))


@dataclass(frozen=True, kw_only=True)
class DatasetSubset:
    """A range of samples: first in numbers of samples, then as shares of what is left.

    Args:
        range: Shares from 0 to 1 at which it begins and ends; None for all.
        absolute_range: Number of its first sample and of the one after its last, None for the
            end; None for all.
        subsets: Instead of these, the ranges of several levels, the innermost first.
    """

    range: tuple[float, float] | None = None
    absolute_range: tuple[int, int | None] | None = None
    subsets: tuple[Subset, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.subsets:
            return
        found: list[Subset] = []
        if self.absolute_range is not None:
            first, last = self.absolute_range
            found.append((first, "end" if last is None else last))
        if self.range is not None:
            found.append((_percent(self.range[0]), _percent(self.range[1])))
        object.__setattr__(self, "subsets", tuple(found))

    def compute_subset(self, total_samples: int) -> tuple[int, int]:
        """Return the number of the first of this many samples, and of the one after the last."""
        return resolve_range(total_samples, self.subsets)

    def config(self) -> dict[str, Any]:
        """Return the range as plain data."""
        return {"range": self.range, "absolute_range": self.absolute_range}


@dataclass(frozen=True, kw_only=True)
class WebdatasetInfo:
    """What `.nv-meta/.info.json` says.

    Args:
        energon_version: What prepared the dataset.
        shard_counts: How many samples each shard has, by its name.
    """

    energon_version: str | None = None
    shard_counts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class WebdatasetSplits:
    """What a file like `.nv-meta/split.yaml` says.

    Args:
        split_parts: The shards of each split.
        exclude: Shards, and samples as `SHARD/KEY`, that are skipped.
    """

    split_parts: dict[str, list[str]]
    exclude: list[str] = field(default_factory=list)


class FilteredSample(TypedDict):
    """What `load_sample` of a factory gets, beside the parts by name."""

    __key__: str
    __shard__: str
    __restore_key__: tuple[Any, ...]
    __sources__: Sequence[Any]


def _percent(share: float) -> str:
    return f"{Decimal(repr(share)) * 100:f}%"
