"""Stages made of functions whose first argument is an iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from energon.webdataset.stage import Context, Stage, UnsavableIterator, describe


@dataclass(frozen=True)
class FilterFunction(Stage):
    """A function of an iterator and further arguments, with these arguments."""

    f: Callable[..., Iterable[Any]]
    args: tuple[Any, ...]
    kw: dict[str, Any]

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        items = self.f(source, *self.args, **self.kw)
        return UnsavableIterator(items, describe(self.f), source)


@dataclass(frozen=True)
class RestCurried:
    """Makes stages of a function: call it with all arguments but the first."""

    f: Callable[..., Iterable[Any]]

    def __call__(self, *args: Any, **kw: Any) -> FilterFunction:
        return FilterFunction(self.f, args, kw)


def pipelinefilter(f: Callable[..., Iterable[Any]]) -> RestCurried:
    """Return what makes stages of a function whose first argument is an iterator."""
    return RestCurried(f)
