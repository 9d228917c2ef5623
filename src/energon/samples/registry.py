"""Resolve names in documents: the only place where text of a document becomes a Python object.

A document is data, and data must not decide which code runs. So a name stands for

- a class of ours, from a fixed list, or
- a class that derives from one of ours (a `Sample`, say), and that the program itself has defined
  or imported: it is in the namespace of a module that is loaded, under its plain name.

Resolving neither imports a module nor reads an attribute of one: both may run code. Anything else
needs `allow=("code",)`, which imports modules and permits functions and dotted names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from energon.allow import is_allowed, refusal
from energon.errors import ConfigError, EnergonError
from energon.messages import describe_error, nearest
from energon.samples.sample import Sample

_OURS = ("energon", "megatron.energon")


@cache
def sample_types() -> dict[str, type[Sample]]:
    """Return the sample types that come with energon, by name."""
    from energon.samples import sample_types as ours

    return {
        name: value
        for name, value in vars(ours).items()
        if isinstance(value, type) and issubclass(value, Sample)
    }


def _flavors() -> dict[str, type[Sample]]:
    """Return them by the names of the old dataset classes, which implied a sample type."""
    return {
        name.removesuffix("Sample") + "Webdataset": value
        for name, value in sample_types().items()
        if name != "Sample"
    }


def resolve_class(
    module: str,
    name: str,
    *,
    allow: Collection[str] = (),
    kinds: tuple[type, ...] = (Sample,),
    ours: Mapping[str, type] | None = None,
) -> Any:
    """Return the class that a document names with `__module__` and `__class__`.

    Args:
        module: E.g. "megatron.energon".
        name: E.g. "CaptioningSample".
        allow: "code" permits importing modules, and any name.
        kinds: The class has to derive from one of these.
        ours: Classes of energon that may be named besides the sample types.

    Raises:
        ConfigError: If there is no such name.
        SecurityError: If it is not such a class, or its module would have to be imported.
    """
    if _is_ours(module):
        types = {**sample_types(), **_flavors(), **(ours or {})}
        if name in types:
            return types[name]
        near = nearest(name, types)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(sample_types())}"
        raise ConfigError(f"{module} has no sample type {name!r}; {hint}")
    if is_allowed("code", allow):
        return _import(module, name)
    chosen: Any = _loaded(module).get(name)
    # Not isinstance, which may run code of an object of unknown type.
    if issubclass(type(chosen), type) and any(kind in type.mro(chosen) for kind in kinds):
        return chosen
    raise _unusable(module, name, " or ".join(f"energon.{kind.__name__}" for kind in kinds))


def resolve_function(module: str, name: str, *, allow: Collection[str] = ()) -> Callable[..., Any]:
    """Return the function that a document names with `__module__` and `__function__`.

    Raises:
        SecurityError: If code is not allowed.
        ConfigError: If there is no such function.
    """
    if not is_allowed("code", allow):
        raise refusal(
            "code",
            f"{module}.{name} is a function, and a document may not choose the function to call; "
            "name a subclass of energon.Sample, whose `from_joined` is called, with __class__",
        )
    function = _import(module, name)
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"{module}.{name} is not a function; a class is named by __class__")
    return function  # type: ignore[no-any-return]


def _is_ours(module: str) -> bool:
    return module in _OURS or module.startswith(tuple(f"{ours}." for ours in _OURS))


def _loaded(module: str) -> Mapping[str, Any]:
    """Return the namespace of a module; an empty one if it is not loaded.

    Reads `__dict__` directly: any attribute access would load a lazy module.
    """
    loaded = sys.modules.get(module)
    if not issubclass(type(loaded), ModuleType):
        return {}
    namespace: Mapping[str, Any] = object.__getattribute__(loaded, "__dict__")
    return namespace


def _unusable(module: str, name: str, expected: str) -> EnergonError:
    """Return the error for a name that does not stand for a usable class."""
    if module not in sys.modules:
        problem = "importing its module would run code; import it in your program"
    elif name in _loaded(module):
        problem = f"it is not a subclass of {expected}, and a document may name nothing else"
    elif "." in name:
        problem = "names with dots may lead anywhere; name what the module itself has"
    else:
        near = nearest(name, _loaded(module))
        hint = f", did you mean {near!r}?" if near else f"; expected a subclass of {expected}."
        return ConfigError(
            f"module {module} has no {name!r}{hint} Names that it creates on access are "
            'found with allow=("code",) or ENERGON_ALLOW=code'
        )
    return refusal("code", f"{module}.{name} is named by a document: {problem}")


def _import(module: str, name: str) -> Any:
    """Import the module and return what a dotted name refers to; the user allows it."""
    try:
        value: Any = import_module(module)
    except Exception as error:
        why = describe_error(error)
        raise ConfigError(f"{module}.{name}: cannot import {module!r}: {why}") from error
    for step in name.split("."):
        if not hasattr(value, step):
            raise ConfigError(f"module {module} has no {name!r}")
        value = getattr(value, step)
    return value
