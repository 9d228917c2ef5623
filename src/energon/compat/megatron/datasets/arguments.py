"""Arguments of dataset classes in documents, and the types that factories accept and return.

While a factory opens the dataset of a document, the document supplies arguments as well.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, TypedDict, TypeVar

from energon.compat.megatron.finder import class_of
from energon.compat.megatron.worker import note_ignored
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, EnergonError
from energon.formats.meta.yaml import load
from energon.io.epath import EPath
from energon.io.files import read_document
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Subset
from energon.plan.leaves.subset import resolve_range
from energon.samples.sample import Sample
from energon.samples.sample_types import resolve_class, resolve_function
from energon.task_encoder.leaves import DatasetClass, DatasetOpening
from energon.task_encoder.load import leaf_decoder
from energon.worker import WorkerConfig

T = TypeVar("T")


def load_config(
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    default_type: type[T],
    default_kwargs: Mapping[str, Any] | None = None,
    parser: Any = None,
    allow: Collection[str] = (),
) -> T:
    """Return the object described by a YAML document: a type and its arguments.

    A program may replace this function in `megatron.energon.dataset_config` to change how the
    getters open datasets.

    Args:
        path: The file, or the document as a dict.
        default_type: The type, unless the document names one with `__module__` and `__class__`.
        default_kwargs: Arguments that the document may omit.
        parser: Has no effect, as is logged once: documents are data, types in them are looked up by
            name.
        allow: What a document may name besides the dataset classes and sample types known to this
            program: "code" lets it import modules and call anything.

    Raises:
        ConfigError: If the document is invalid.
        SecurityError: If it names something that is not allowed.
    """
    note_ignored("types in documents are looked up by name", parser=parser is not None)
    document = path if isinstance(path, Mapping) else load(read_document(path), origin=str(path))
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path}: expected a mapping, found {type(document).__name__}")
    opening, origin = current_opening(), "document" if document is path else str(path)
    if opening is not None:
        origin = opening.config.origin
    allow = allow or (() if opening is None else opening.allow)
    written = dict(document)
    module, name = written.pop("__module__", None), written.pop("__class__", None)
    given = {
        key: _decoder(value, origin) if key == "decoder" else _value(value, allow)
        for key, value in written.items()
    }
    kind: Any = default_type
    if name is not None:
        bases: tuple[type, ...] = (Sample, DatasetClass)
        if isinstance(default_type, type) and default_type is not object:
            bases = (*bases, default_type)
        kind = named_class(str(module), str(name), allow, bases)
    defaults = dict(default_kwargs or {})
    if not getattr(kind, "takes_decoder", True):
        defaults.pop("decoder", None)
    if opening is not None and isinstance(kind, type) and issubclass(kind, DatasetClass):
        given = check_written(given, opening)
    config: T = call_with(kind, given, defaults, origin=origin)
    return config


def named_class(module: str, name: str, allow: Collection[str], kinds: tuple[type, ...]) -> Any:
    """Return the class that a document names: one of ours, or of the program.

    Args:
        module: Its module.
        name: Its name.
        allow: What a document may name besides known classes.
        kinds: It derives from one of these.
    """
    named = class_of(name, kinds)
    ours = {} if named is None else {name: named}
    return resolve_class(module, name, allow=allow, kinds=kinds, ours=ours)


def call_with(
    kind: Callable[..., T], written: Mapping[str, Any], defaults: Mapping[str, Any], *, origin: str
) -> T:
    """Call `kind` with arguments from a document.

    Args:
        kind: A class.
        written: The arguments as written.
        defaults: Further arguments, passed if the class accepts or forwards them.
        origin: The document.

    Raises:
        ConfigError: If the class does not accept an argument, or requires others.
    """
    parameters = inspect.signature(kind).parameters
    hands_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if not hands_on:
        unknown = [key for key in written if key not in parameters]
        if unknown:
            raise ConfigError(
                f"{origin}: {_name(kind)} has no {unknown[0]!r}; known are {', '.join(parameters)}"
            )
        defaults = {key: value for key, value in defaults.items() if key in parameters}
    try:
        return kind(**{**defaults, **written})
    except EnergonError:
        raise
    except TypeError as error:
        raise ConfigError(f"{origin}: {_name(kind)}: {error}") from error


def _value(value: Any, allow: Collection[str]) -> Any:
    """Return a value of a document, with the name of a class or function resolved."""
    if isinstance(value, Mapping):
        names = {name: str(given) for name, given in value.items()}
        if set(value) == {"__module__", "__class__"}:
            kinds = (Sample, DatasetClass)
            return resolve_class(names["__module__"], names["__class__"], allow=allow, kinds=kinds)
        if set(value) == {"__module__", "__function__"}:
            return resolve_function(names["__module__"], names["__function__"], allow=allow)
    return value


OF_DECODER = ("image_decode", "av_decode", "video_decode_audio")
"""Deprecated arguments of getters and factories, which are those of `SampleDecoder`."""


def older_decoder(decoder: Any, arguments: dict[str, Any]) -> Any:
    """Return a decoder as deprecated arguments change it, and remove them from `arguments`."""
    given = {name: arguments.pop(name, None) for name in OF_DECODER}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        base = decoder if isinstance(decoder, SampleDecoder) else SampleDecoder()
        decoder = replace(base, **given)
    return decoder if arguments.pop("auto_decode", True) else None


def _decoder(value: Any, origin: str) -> Any:
    if value is not None and not isinstance(value, Mapping):
        return value
    return leaf_decoder(DatasetConfig(decoder=value, given=frozenset({"decoder"}), origin=origin))


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))


@dataclass(frozen=True, kw_only=True)
class DatasetSubset:
    """A range of samples: an absolute range, and a relative range within it.

    Args:
        range: Start and stop as fractions from 0 to 1; None for all.
        absolute_range: Start and stop as numbers of samples, where a stop of None is the end;
            None for all.
        subsets: The ranges of several levels, the innermost first, instead of these.
    """

    range: tuple[float, float] | None = None
    absolute_range: tuple[int, int | None] | None = None
    subsets: tuple[Subset, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.subsets:
            return
        subsets: list[Subset] = []
        if self.absolute_range is not None:
            first, last = self.absolute_range
            subsets.append((first, "end" if last is None else last))
        if self.range is not None:
            subsets.append((_percent(self.range[0]), _percent(self.range[1])))
        object.__setattr__(self, "subsets", tuple(subsets))

    def compute_subset(self, total_samples: int) -> tuple[int, int]:
        """Return start and stop of the range among this many samples."""
        return resolve_range(total_samples, self.subsets)

    def config(self) -> dict[str, Any]:
        """Return the range as plain data."""
        return {"range": self.range, "absolute_range": self.absolute_range}


@dataclass(frozen=True, kw_only=True)
class WebdatasetInfo:
    """The content of `.nv-meta/.info.json`.

    Args:
        energon_version: The version that prepared the dataset.
        shard_counts: Number of samples of each shard, by its name.
    """

    energon_version: str | None = None
    shard_counts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class WebdatasetSplits:
    """The content of `.nv-meta/split.yaml`, or of a similar file.

    Args:
        split_parts: The shards of each split.
        exclude: Shards, and samples as `SHARD/KEY`, that are skipped.
    """

    split_parts: dict[str, list[str]]
    exclude: list[str] = field(default_factory=list)


class FilteredSample(TypedDict):
    """The argument of a factory's `load_sample`: metadata, and the parts by name."""

    __key__: str
    __shard__: str
    __restore_key__: tuple[Any, ...]
    __sources__: Sequence[Any]


def _percent(share: float) -> str:
    return f"{Decimal(repr(share)) * 100:f}%"


_opening: ContextVar[DatasetOpening | None] = ContextVar("opening", default=None)
"""The dataset of a document that a factory is opening; None if a program calls the factory."""


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a variable of the context a value within the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def opening_for(opening: DatasetOpening) -> AbstractContextManager[None]:
    """Set the dataset of a document that factories called in the block are opening."""
    return bound(_opening, opening)


def current_opening() -> DatasetOpening | None:
    """Return the dataset of a document that is being opened; None outside of one."""
    return _opening.get()


def defaults_of(opening: DatasetOpening) -> dict[str, Any]:
    """Return the arguments of a factory that do not come from the document."""
    leaf, call = opening.leaf, opening.call
    worker_config = call.worker_config or WorkerConfig(rank=0, world_size=1, num_workers=0)
    defaults = {
        "path": EPath(leaf.path),
        "split_part": leaf.split_part,
        "split_config": leaf.split_config,
        "training": call.training,
        "worker_config": worker_config,
        "decoder": SampleDecoder(),
        **call.settings,
    }
    if leaf.subsets:
        defaults["subset"] = DatasetSubset(subsets=leaf.subsets)
    return defaults


def check_written(written: Mapping[str, Any], opening: DatasetOpening) -> dict[str, Any]:
    """Return the arguments that a document has for a factory.

    Raises:
        ConfigError: If it sets arguments that only the program may set.
    """
    for key in _OF_CALLS:
        if key in written:
            raise ConfigError(
                f"{opening.config.origin}: a dataset.yaml cannot set {key!r}; the program that "
                "opens the dataset does. Remove it"
            )
    checked = dict(written)
    if "subset" in checked:
        inner = subset_ranges(checked["subset"])
        checked["subset"] = DatasetSubset(subsets=(*inner, *opening.leaf.subsets))
    return checked


_OF_CALLS = ("path", "worker_config", "training")


def subset_ranges(given: Any) -> tuple[Subset, ...]:
    """Return ranges of samples, the innermost first."""
    if given is None:
        return ()
    if isinstance(given, DatasetSubset):
        return given.subsets
    if isinstance(given, Mapping):
        return (tuple(given["range"]),)
    return (tuple(given),)
