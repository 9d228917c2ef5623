"""Make the object that a YAML document describes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from energon.errors import ConfigError
from energon.formats.yaml import load
from energon.io.files import read_text
from energon.samples.registry import resolve_class
from energon.task_encoder import factories, flavors

T = TypeVar("T")


def load_config(
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    default_type: type[T],
    default_kwargs: Mapping[str, Any] | None = None,
    parser: Any = None,
) -> T:
    """Return the object that a YAML document describes: its type and the arguments of that.

    Args:
        path: The file, or the document as a dict.
        default_type: The type, if the document names none with `__module__` and `__class__`.
        default_kwargs: Arguments that the document may leave out.
        parser: Has no effect: documents are data, types in them are looked up by name.

    Raises:
        ConfigError: If the document makes no sense.
        SecurityError: If a module would have to be imported.
    """
    document = path if isinstance(path, Mapping) else load(read_text(path), origin=str(path))
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path}: wanted is a mapping, found {type(document).__name__}")
    given = {key: _value(value) for key, value in document.items()}
    module, name = given.pop("__module__", None), given.pop("__class__", None)
    arguments = {**(default_kwargs or {}), **given}
    kind = default_type if name is None else _find(str(module), str(name))
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


def _value(value: Any) -> Any:
    """Return what stands in a document; a class, if it names one."""
    if isinstance(value, Mapping) and set(value) == {"__module__", "__class__"}:
        return _find(str(value["__module__"]), str(value["__class__"]))
    return value


def _find(module: str, name: str) -> Any:
    """Return the class of that name: a dataset class of ours, a sample type, or one of the user."""
    if module.partition(".")[0] in ("energon", "megatron"):
        for place in (factories, flavors):
            found = getattr(place, name, None)
            if isinstance(found, type) and issubclass(found, factories.WebdatasetFactory):
                return found
    return resolve_class(module, name)
