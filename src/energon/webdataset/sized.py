"""Pipelines that know their length.

torch and its users take an iterable dataset with `__len__` for one of that length, so pipelines
only have it when it was asked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from energon.errors import ConfigError


def with_length(pipeline: Any, length: int | None) -> Any:
    """Return a copy of `pipeline` for which `len` returns `length`.

    Args:
        pipeline: Any pipeline.
        length: None counts the samples that the indexes of its shards list.

    Raises:
        ConfigError: If the length is negative, or there are no indexes.
    """
    if length is None:
        from energon.webdataset.lengths import count_samples

        length = count_samples(pipeline)
    if not isinstance(length, int) or length < 0:
        raise ConfigError(f"with_length({length!r}): wanted is a whole number, 0 or more")
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
