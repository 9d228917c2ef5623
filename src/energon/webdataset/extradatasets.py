"""Small datasets for tests and experiments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from energon.webdataset.pipeline import DataPipeline
from energon.webdataset.reexport import reexport
from energon.webdataset.stages.make import IterableStage


class _Repeated:
    """A sequence of one object, again and again."""

    def __init__(self, item: Any, length: int) -> None:
        self.item = item
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return (self.item for _ in range(self.length))


class MockDataset(DataPipeline):
    """Gives one sample again and again.

    Args:
        sample: The sample.
        length: How often.
    """

    def __init__(self, sample: Any, length: int) -> None:
        super().__init__(IterableStage(_Repeated(sample, length)))


class with_epoch:
    """Stage that ends after a number of items: `DataPipeline(source, with_epoch(100))`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def run(self, src: Iterator[Any]) -> Iterator[Any]:
        """Yield the first items."""
        for number, item in enumerate(src, 1):
            yield item
            if number == self.length:
                return


class with_length:
    """Gives any dataset a length: `with_length(dataset, 100)`."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset = dataset
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


__getattr__ = reexport(__name__, {"PipelineStage": "stages.make", "repeatedly": "utils"})
