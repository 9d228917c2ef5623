"""Inspect samples as they pass: show some, or log the keys of all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from energon.webdataset.stages.base import (
    Context,
    Stage,
    StageIterator,
    State,
    load_state,
    state_of,
    unpack,
)


@dataclass(frozen=True)
class Info(Stage):
    """Passes on all items, and writes some of them to a text stream.

    Args:
        fmt: Accepted for compatibility: fields are shown one per line.
        n: Number of items to show at the beginning.
        every: After these, every how many items to show one; -1 for none.
        width: Maximum length of a field's text.
        stream: The text stream; None for standard error.
        name: Prefix of every line.
    """

    fmt: str | None = None
    n: int = 3
    every: int = -1
    width: int = 50
    stream: TextIO | None = None
    name: str = ""

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _Counted(source, lambda number, item: self._show(number, item))

    def describe(self) -> dict[str, Any]:
        return {"stage": "Info"}

    def _show(self, number: int, item: Any) -> None:
        if number >= self.n and (self.every < 1 or number % self.every):
            return
        fields = item.items() if isinstance(item, dict) else enumerate(_listed(item))
        lines = [f"{self.name} {number} {key}: {_brief(v, self.width)}" for key, v in fields]
        (self.stream or sys.stderr).write("".join(f"{line.strip()}\n" for line in lines))


@dataclass(frozen=True)
class LogKeys(Stage):
    """Passes on all samples, and appends number, worker, rank and key of each to a file.

    Args:
        logfile: Path of the file; None for LOGKEYS in the environment, or else no log.
    """

    logfile: str | None = None

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        path = self.logfile or os.environ.get("LOGKEYS")
        if not path:
            return source
        place = context.place

        def log(number: int, item: Any) -> None:
            line = f"{number}\t{place.worker}\t{place.rank}\t{item.get('__key__')}\n"
            # One write to a file opened for appending, so that lines of several workers do not mix.
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            with contextlib.closing(os.fdopen(descriptor, "ab", buffering=0)) as file:
                file.write(line.encode())

        return _Counted(source, log)

    def describe(self) -> dict[str, Any]:
        return {"stage": "LogKeys"}


class _Counted(StageIterator):
    def __init__(self, source: Iterator[Any], look: Any) -> None:
        self._look = look
        self._number = 0
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        for item in self._source:
            self._look(self._number, item)
            self._number += 1
            yield item

    def state_dict(self) -> State:
        return {"source": state_of(self._source), "number": self._number}

    def load_state_dict(self, state: State) -> None:
        source, self._number = unpack(state, "source", "number")
        load_state(self._source, source)


def _listed(item: Any) -> Any:
    return item if isinstance(item, tuple | list) else [item]


def _brief(value: Any, width: int) -> str:
    shape = getattr(value, "shape", None)
    text = repr(value) if shape is None else f"{type(value).__name__} {tuple(shape)} {value.dtype}"
    return text if len(text) <= width else f"{text[: width - 3]}..."
