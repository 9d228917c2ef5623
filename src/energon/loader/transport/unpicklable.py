"""Find what it is in a pipeline that cannot be pickled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType
from typing import Any

MAX_DEPTH = 100


def find_unpicklable(value: Any, pickles: Callable[[Any], object]) -> str:
    """Return the innermost thing in `value` on which `pickles` fails, as a user would name it.

    Args:
        value: Something on which it fails.
        pickles: Pickles a value, or raises.

    Example:
        >>> import pickle, threading
        >>> from types import SimpleNamespace
        >>> find_unpicklable([1, SimpleNamespace(guard=threading.Lock())], pickle.dumps)
        'SimpleNamespace.guard'
    """
    name = type(value).__name__
    for _ in range(MAX_DEPTH):
        failing = ((inner, item) for inner, item in _inside(value) if _fails(pickles, item))
        found = next(failing, None)
        if found is None:
            break
        inner, value = found
        name = name + inner if inner.startswith("[") else inner
    return name


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `value` holds, with names."""
    owner = type(value).__name__
    if isinstance(value, MethodType):
        yield type(value.__self__).__name__, value.__self__
    elif isinstance(value, FunctionType):
        yield from _used_by(value)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{place}]", item) for place, item in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value))
        yield from ((f"{owner}.{name}", getattr(value, name)) for name in names)
    else:
        held = getattr(value, "__dict__", {})
        yield from ((f"{owner}.{name}", item) for name, item in held.items())
        methods = (item for item in vars(type(value)).values() if isinstance(item, FunctionType))
        yield from ((method.__qualname__, method) for method in methods)


def _used_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of surrounding functions and of the module that `function` uses."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield f"{name}, which {function.__qualname__} uses,", cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield f"{name}, which {function.__qualname__} uses,", function.__globals__[name]


def _fails(pickles: Callable[[Any], object], value: Any) -> bool:
    try:
        pickles(value)
    except Exception:
        return True
    return False
