"""Create the object described by a YAML document, including the datasets of leaves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from energon.compat.megatron.datasets import others
from energon.compat.megatron.datasets import webdataset as factories
from energon.compat.megatron.datasets.arguments import (
    call_with,
    check_written,
    current_opening,
    defaults_of,
    opening_for,
    read_arguments,
)
from energon.compat.megatron.datasets.webdataset import (
    DecoderWebdatasetFactory,
    StandardWebdatasetFactory,
    WebdatasetFactory,
)
from energon.compat.megatron.names import class_of
from energon.compat.megatron.worker import note_ignored
from energon.errors import ConfigError, UnknownArgumentError
from energon.formats.meta.yaml import load
from energon.io.epath import EPath
from energon.io.files import read_document
from energon.metadataset.kind import kind_entry
from energon.samples.registry import resolve_class
from energon.samples.sample import Sample
from energon.task_encoder.dataset_class import DatasetCall, DatasetClass, DatasetOpening

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
    allow = allow or (() if opening is None else opening.allow)
    written = dict(document)
    module, name = written.pop("__module__", None), written.pop("__class__", None)
    given = read_arguments(written, origin=origin, allow=allow)
    kind: Any = default_type
    if name is not None:
        kind = _find(str(module), str(name), allow, default_type)
    defaults = dict(default_kwargs or {})
    if isinstance(kind, type) and issubclass(kind, WebdatasetFactory):
        if not issubclass(kind, DecoderWebdatasetFactory):
            defaults.pop("decoder", None)
        if opening is not None:
            given = check_written(given, opening)
    config: T = call_with(kind, given, defaults, origin=origin)
    return config


def _find(module: str, name: str, allow: Collection[str], default: Any) -> Any:
    """Return the named class: a dataset class, a sample type, or a subclass of the default."""
    ours: dict[str, type] = _DATASET_CLASSES
    kinds: tuple[type, ...] = (Sample, DatasetClass)
    if isinstance(default, type) and default is not object:
        kinds = (*kinds, default)
        if name not in ours and (named := class_of(name, default)) is not None:
            ours = {**ours, name: named}
    return resolve_class(module, name, allow=allow, kinds=kinds, ours=ours)


_DATASET_CLASSES: dict[str, type] = {
    "DefaultDecoderWebdataset": DecoderWebdatasetFactory,
    "DefaultDecoderWebdatasetFactory": DecoderWebdatasetFactory,
    "DefaultGenericWebdataset": factories.GenericWebdatasetFactory,
    "DefaultGenericWebdatasetFactory": factories.GenericWebdatasetFactory,
} | {
    name: value
    for place in (factories, others)
    for name, value in vars(place).items()
    if isinstance(value, type) and issubclass(value, WebdatasetFactory)
}


@dataclass(frozen=True)
class GetterCall(DatasetCall):
    """The call of a getter of `megatron.energon`.

    Args:
        arguments: Arguments that the getter does not know, which are for the datasets.
        as_factories: Whether each dataset of shards becomes an object of its class.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    as_factories: bool = False

    def open(self, opening: DatasetOpening) -> DatasetClass | None:
        replaced, leaf = _replaced(), opening.leaf
        if replaced is None and not self.arguments and not self.as_factories:
            return super().open(opening)
        if not kind_entry(leaf.kind).in_shards:
            if self.arguments:
                name = next(iter(self.arguments))
                raise UnknownArgumentError(f"{leaf.path} is not a dataset of shards: no {name!r}")
            return None
        with opening_for(opening):
            dataset: Any = (replaced or load_config)(
                EPath(leaf.path) / ".nv-meta" / leaf.dataset_config,
                default_type=StandardWebdatasetFactory,
                default_kwargs={**defaults_of(opening), **self.arguments},
            )
        if not isinstance(dataset, DatasetClass):
            raise ConfigError(
                f"{leaf.path}: load_config of megatron.energon.dataset_config returned a "
                f"{type(dataset).__name__}, expected a dataset"
            )
        return dataset


def _replaced() -> Callable[..., Any] | None:
    """Return a program's replacement of `load_config`; None if there is none."""
    module = sys.modules.get("megatron.energon.dataset_config")
    replacement = None if module is None else vars(module).get("load_config")
    return None if replacement is load_config else replacement
