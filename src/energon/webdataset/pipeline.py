"""Pipelines: sources and stages in a row, immutable."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from energon.errors import ConfigError
from energon.webdataset.place import current_place
from energon.webdataset.stage import Context, FunctionStage, Stage, UnsavableIterator, describe


class DataPipeline:
    """A source and the stages after it."""

    def __init__(self, *stages: Any, seed: int = 0) -> None:
        self.stages = tuple(_stages(stages))
        self.seed = seed
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return iter(self.open(Context(current_place(), self.seed, epoch)))

    def open(self, context: Context) -> Iterator[Any]:
        if not self.stages:
            raise ConfigError("a pipeline without stages has nothing to iterate over")
        items: Iterator[Any] = iter(())
        for number, stage in enumerate(self.stages):
            items = _opened(stage, items, context.at(number), first=number == 0)
        return items

    def compose(self, *stages: Any):
        new = copy.copy(self)
        new.stages = (*self.stages, *_stages(stages))
        new._epoch = 0
        return new


def _stages(stages):
    for stage in stages:
        if stage is None:
            continue
        if isinstance(stage, list):
            yield from _stages(stage)
        else:
            yield stage


def _opened(stage, items, context, first):
    if isinstance(stage, Stage):
        return stage.open(items, context)
    if hasattr(stage, "run"):
        return UnsavableIterator(stage.run(items), describe(stage), items)
    if first and hasattr(stage, "__iter__"):
        return UnsavableIterator(stage, describe(stage))
    return FunctionStage(stage, first).open(items, context)
