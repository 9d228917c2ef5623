"""Be a dataset to torch without importing it, with a length where the program says one."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from energon.errors import ConfigError


class TorchLookalike:
    """Looks like an `torch.utils.data.IterableDataset` where there is torch."""

    # isinstance() believes what an object says of its class.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        data = sys.modules.get("torch.utils.data")
        base = getattr(data, "IterableDataset", None)
        own: Any = type(self)
        return own if base is None else _with_base(own, base)

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.__getstate__())


def _rebuild(kind: Any, state: Any) -> Any:
    value = kind.__new__(kind)
    value.__setstate__(state)
    return value


@lru_cache(maxsize=256)
def _with_base(kind: type, base: type) -> type:
    """Return `kind` as a subclass of `base`: only ever looked at, never instantiated."""
    return type(kind.__name__, (kind, base), {"__module__": kind.__module__})


def with_length(pipeline: Any, length: int | None) -> Any:
    """Return a copy of `pipeline` for which `len` returns `length`.

    Args:
        pipeline: Any pipeline.
        length: None counts the samples that the indexes of its shards list.

    Raises:
        ConfigError: If the length is negative, or there are no indexes.
    """
    if length is None:
        from energon.webdataset.reading.lengths import count_samples

        length = count_samples(pipeline)
    if not isinstance(length, int) or length < 0:
        raise ConfigError(f"with_length({length!r}): expected a whole number, 0 or more")
    return rebuild(
        _unsized(type(pipeline)), {**pipeline._changed().__getstate__(), "_length": length}
    )


def rebuild(kind: type, state: dict[str, Any]) -> Any:
    """Return a pipeline of class `kind` with that state, with `__len__` if it has a length."""
    actual: Any = _sized(kind) if state.get("_length") is not None else kind
    pipeline = actual.__new__(actual)
    pipeline.__setstate__(state)
    return pipeline


class _Sized:
    """Adds `__len__`."""

    _length: int

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> Any:
        return rebuild, (_unsized(type(self)), self.__getstate__())


@lru_cache(maxsize=256)
def _sized(kind: type) -> type:
    return type(kind.__name__, (_Sized, kind), {"__module__": kind.__module__, "_unsized": kind})


def _unsized(kind: type) -> type:
    found: type = getattr(kind, "_unsized", kind)
    return found
