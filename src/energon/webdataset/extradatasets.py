"""Small datasets for tests and experiments."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any

from energon.webdataset import utils
from energon.webdataset.names import __getattr__ as __getattr__
from energon.webdataset.pipeline import DataPipeline, IterableStage
from energon.webdataset.running.worker_info import TorchLookalike


class _Repeated:
    """A sequence of one object, which states do not describe: it may be large."""

    def __init__(self, item: Any, length: int) -> None:
        self.item = item
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.item, self.length)


class MockDataset(DataPipeline):
    """Yields one sample again and again.

    Args:
        sample: The sample.
        length: How often.

    Example:
        >>> list(MockDataset({"__key__": "a"}, 2))
        [{'__key__': 'a'}, {'__key__': 'a'}]
    """

    def __init__(self, sample: Any, length: int) -> None:
        super().__init__(IterableStage(_Repeated(sample, length)))
        self.sample = sample
        self.length = length


class with_epoch(TorchLookalike):
    """A dataset, a number of items at a time: each loop continues where the last one stopped.

    Also a stage that ends after a number of items: `DataPipeline(source, with_epoch(100))`.

    Args:
        dataset: The dataset. A number alone is the length of a stage.
        length: How many items a loop has.

    Example:
        >>> dataset = with_epoch([1, 2, 3], 2)
        >>> list(dataset), list(dataset)
        ([1, 2], [3, 1])
    """

    def __init__(self, dataset: Any, length: int | None = None) -> None:
        self.dataset = None if length is None else dataset
        self.length: int = dataset if length is None else length
        self.source: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            item = next(self.source, _END) if self.source is not None else _END
            if item is _END:
                self.source = iter(self.dataset or ())
                item = next(self.source, _END)
                if item is _END:
                    return
            yield item

    def run(self, dataset: Any) -> Iterator[Any]:
        """Yield the first items of any dataset."""
        yield from islice(dataset, self.length)

    invoke = run

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}


class with_length(TorchLookalike):
    """Add a length to any dataset: `with_length(dataset, 100)`.

    Example:
        >>> len(with_length(range(3), 100))
        100
    """

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset = dataset
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def invoke(self, dataset: Any) -> Iterator[Any]:
        """Return the items of any dataset."""
        return iter(dataset)

    run = invoke


class repeatedly(TorchLookalike):
    """Yields the items of several loops over a dataset, see `utils.repeatedly`.

    Args:
        source: The dataset.
        nepochs: How many loops; None means without end.
        nbatches: How many items in total; None means all.
        length: Accepted for compatibility.
    """

    def __init__(
        self,
        source: Any,
        nepochs: int | None = None,
        nbatches: int | None = None,
        length: int | None = None,
    ) -> None:
        self.source = source
        self.nepochs = nepochs
        self.nbatches = nbatches
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return self.invoke(self.source)

    def invoke(self, source: Any) -> Iterator[Any]:
        """Return the items of several loops over any dataset."""
        return utils.repeatedly(source, self.nepochs, self.nbatches)

    run = invoke


_END = object()
