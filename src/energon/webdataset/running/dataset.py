"""Be a dataset to torch without importing it, with a length where the program says one."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any


class TorchLookalike:
    """Looks like an `torch.utils.data.IterableDataset` where there is torch."""

    # isinstance() believes what an object says of its class.
    @property
    def __class__(self) -> type:
        data = sys.modules.get("torch.utils.data")
        base = getattr(data, "IterableDataset", None)
        own: Any = type(self)
        return own if base is None else _with_base(own, base)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        object.__dict__["__class__"].__set__(self, kind)

    def __reduce__(self) -> Any:
        return _rebuild, (
            _without_length(type(self)),
            isinstance(self, _Sized),
            self.__getstate__(),
        )

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


def add_length_method(obj: Any) -> Any:
    """Let `len` of an object return its `size`, and return the object."""
    if not isinstance(obj, _Sized):
        kind: Any = type(obj)
        obj.__class__ = _with_length(kind)
    return obj


def _rebuild(kind: Any, is_sized: bool, state: Any) -> Any:
    value = kind.__new__(kind)
    value.__setstate__(state)
    return add_length_method(value) if is_sized else value


class _Sized:
    """Adds `__len__`."""

    size: int

    def __len__(self) -> int:
        return self.size


@lru_cache(maxsize=256)
def _with_base(kind: type, base: type) -> type:
    """Return `kind` as a subclass of `base`: only ever looked at, never instantiated."""
    return type(kind.__name__, (kind, base), {"__module__": kind.__module__})


@lru_cache(maxsize=256)
def _with_length(kind: type) -> type:
    return type(kind.__name__, (_Sized, kind), {"__module__": kind.__module__, "_unsized": kind})


def _without_length(kind: type) -> type:
    found: type = getattr(kind, "_unsized", kind)
    return found
