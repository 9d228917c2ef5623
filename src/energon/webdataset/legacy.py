"""Names of earlier generations that programs still use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from energon.webdataset.compat import FluidWrapper
from energon.webdataset.pipeline import DataPipeline
from energon.webdataset.shardlists import SimpleShardList

ShardList = SimpleShardList
PytorchShardList = SimpleShardList

HINTS = {
    "MultiDataset": "use WebLoader(dataset, num_workers=n)",
    "Dataset": "use WebDataset(urls)",
    "SampleEqually": "use RandomMix",
    "ShardedWriter": "use ShardWriter",
    "lru_cleanup": "use WebDataset(cache_dir=..., cache_size=...)",
    "dbcache": "use mcached() or lmdb_cached(path)",
    "Shorthands": "use FluidInterface",
    "Composable": "use DataPipeline, which has compose()",
}
"""What to use in place of names that are gone."""


class Processor:
    """Applies a stage to a dataset: `Processor(wds.map, function)(dataset)`.

    Args:
        f: Makes a stage of the other arguments, or is a function of an iterator and these.
        args: See above.
        kw: See above.
    """

    def __init__(self, f: Callable[..., Any], *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw

    def __call__(self, source: Any) -> Any:
        """Return `source` with the stage at its end."""
        pipeline = source if isinstance(source, DataPipeline) else FluidWrapper(source)
        stage = _stage(self.f, self.args, self.kw)
        return pipeline.compose(stage)


def _stage(f: Callable[..., Any], args: tuple[Any, ...], kw: dict[str, Any]) -> Any:
    from energon.webdataset import filters

    if getattr(f, "__module__", None) == filters.__name__:
        return f(*args, **kw)

    def run(source: Iterator[Any]) -> Any:
        return f(source, *args, **kw)

    return run


def ddp_equalize(dataset: Any, length: int, batchsize: int = 1) -> Any:
    """Return a dataset whose loops have the same number of steps on all ranks.

    Args:
        dataset: A pipeline, or a loader.
        length: Samples of an epoch, over all ranks.
        batchsize: Samples of an item.
    """
    return dataset.with_epoch(math.ceil(length / batchsize))


def ResizedDataset(dataset: Any, length: int, nominal: int | None = None) -> Any:
    """Return a dataset whose loops have another length, and continue where the last one stopped.

    Args:
        dataset: Any dataset.
        length: Items of a loop.
        nominal: What `len` returns; None means the same.
    """
    resized = FluidWrapper(dataset).with_epoch(length)
    return resized.with_length(length if nominal is None else nominal)


def FakeLength(dataset: Any, length: int) -> Any:
    """Return a dataset for which `len` returns `length`."""
    return FluidWrapper(dataset).with_length(length)


__all__ = [
    "HINTS",
    "FakeLength",
    "Processor",
    "PytorchShardList",
    "ResizedDataset",
    "ShardList",
    "ddp_equalize",
]
