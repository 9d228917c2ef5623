"""Make the object that a YAML document describes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from energon.compat.megatron.datasets import flavors
from energon.compat.megatron.datasets import webdataset as factories
from energon.compat.megatron.datasets.leaf import LeafDataset
from energon.errors import ConfigError
from energon.formats.meta.yaml import load
from energon.io.files import read_text
from energon.samples.registry import resolve_class
from energon.samples.sample import Sample

T = TypeVar("T")


def load_config(
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    default_type: type[T],
    default_kwargs: Mapping[str, Any] | None = None,
    parser: Any = None,
    allow: Collection[str] = (),
) -> T:
    """Return the object that a YAML document describes: its type and the arguments of that.

    Args:
        path: The file, or the document as a dict.
        default_type: The type, if the document names none with `__module__` and `__class__`.
        default_kwargs: Arguments that the document may leave out.
        parser: Has no effect: documents are data, types in them are looked up by name.
        allow: What a document may name beside the dataset classes and sample types that this
            program knows: "code" lets it import modules and call anything.

    Raises:
        ConfigError: If the document makes no sense.
        SecurityError: If it names anything else, and that is not allowed.
    """
    document = path if isinstance(path, Mapping) else load(read_text(path), origin=str(path))
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path}: expected a mapping, found {type(document).__name__}")
    given = {key: _value(value, allow) for key, value in document.items()}
    module, name = given.pop("__module__", None), given.pop("__class__", None)
    arguments = {**(default_kwargs or {}), **given}
    kind = default_type if name is None else _find(str(module), str(name), allow)
    known = inspect.signature(kind).parameters
    free = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    unknown = [key for key in arguments if key not in known and not free]
    if unknown:
        raise ConfigError(
            f"{path}: {kind.__name__} has no {unknown[0]!r}; known are {', '.join(known)}"
        )
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{path}: {kind.__name__}: {error}") from error


def _value(value: Any, allow: Collection[str]) -> Any:
    """Return what stands in a document; a class, if it names one."""
    if isinstance(value, Mapping) and set(value) == {"__module__", "__class__"}:
        return _find(str(value["__module__"]), str(value["__class__"]), allow)
    return value


def _find(module: str, name: str, allow: Collection[str]) -> Any:
    """Return the class of that name: a dataset class, a sample type, or one of the user."""
    ours = _DATASET_CLASSES
    return resolve_class(module, name, allow=allow, kinds=(Sample, LeafDataset), ours=ours)


_DATASET_CLASSES = {
    name: value
    for place in (factories, flavors)
    for name, value in vars(place).items()
    if isinstance(value, type) and issubclass(value, factories.WebdatasetFactory)
}
