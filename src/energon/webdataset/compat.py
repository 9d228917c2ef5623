"""The fluid interface, pipelines as a chain of calls; and names of earlier releases."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from energon.webdataset import filters
from energon.webdataset.cache import Cached, LMDBCached
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.names import __getattr__ as __getattr__
from energon.webdataset.pipeline import DataPipeline, pipelinefilter
from energon.webdataset.reading.shard_cache import cache_of
from energon.webdataset.reading.tar_samples import NonEmpty
from energon.webdataset.shardlists import (
    DealShards,
    ShuffleShards,
    SimpleShardList,
    non_empty,
    shard_source,
)
from energon.webdataset.stages.base import Stage
from energon.webdataset.tariterators import SteppedTarSamples

P = ParamSpec("P")
Fluid = TypeVar("Fluid", bound="FluidInterface")


def check_empty(source: Iterable[Any]) -> Iterator[Any]:
    """Yield all items, see `non_empty`."""
    return non_empty(source)


def _appends(make: Callable[P, Stage]) -> Callable[Concatenate[Fluid, P], Fluid]:
    """Return a method that appends the stage returned by `make` for its arguments."""

    @wraps(make)
    def append(self: Fluid, /, *args: P.args, **kw: P.kwargs) -> Fluid:
        return self.compose(make(*args, **kw))

    signature = inspect.signature(make)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(append)["__signature__"] = signature.replace(
        parameters=[this, *signature.parameters.values()], return_annotation=Self
    )
    append.__qualname__ = f"FluidInterface.{make.__name__}"
    return append


class FluidInterface:
    """Methods that append a stage, and return a new pipeline. See `filters` for what they do.

    Example:
        >>> list(FluidWrapper(range(4)).map(str).listed(2))
        [['0', '1'], ['2', '3']]
    """

    def compose(self, *stages: Any) -> Self:
        """Append any stages."""
        raise NotImplementedError

    batched = _appends(filters.batched)
    unbatched = _appends(filters.unbatched)
    listed = _appends(filters.listed)
    unlisted = _appends(filters.unlisted)
    log_keys = _appends(filters.log_keys)
    map = _appends(filters.map)
    flatmap = _appends(filters.flatmap)
    decode = _appends(filters.decode)
    map_dict = _appends(filters.map_dict)
    select = _appends(filters.select)
    to_tuple = _appends(filters.to_tuple)
    map_tuple = _appends(filters.map_tuple)
    slice = _appends(filters.slice)
    rename = _appends(filters.rename)
    rsample = _appends(filters.rsample)
    rename_keys = _appends(filters.rename_keys)
    extract_keys = _appends(filters.extract_keys)
    xdecode = _appends(filters.xdecode)
    associate = _appends(filters.associate)
    info = _appends(filters.info)

    def shuffle(self, size: int, **kw: Any) -> Self:
        """Shuffle items through a buffer of `size`; 0 leaves them in order."""
        return self.compose(filters.shuffle(size, **kw)) if size > 0 else self

    def mcached(self) -> Self:
        """Cache the items of the first complete pass in memory."""
        return self.compose(Cached())

    def lmdb_cached(self, *args: Any, **kw: Any) -> Self:
        """Cache the items of the first complete pass in a file."""
        return self.compose(LMDBCached(*args, **kw))


class FluidWrapper(DataPipeline, FluidInterface):
    """Any source with the fluid interface.

    Args:
        initial: A pipeline, a loader, or any iterable.

    Example:
        >>> list(FluidWrapper(range(4)).select(lambda n: n % 2))
        [1, 3]
    """

    def __init__(self, initial: Any, seed: int | None = None) -> None:
        super().__init__(tuple(initial) if isinstance(initial, list) else initial, seed=seed)


class WebDataset(DataPipeline, FluidInterface):
    """The samples of tar files, as dicts.

    A loop is one pass over the data, divided among all ranks and workers: each sample is yielded
    once. Samples are dicts of `__key__`, `__url__`, for local files `__local_path__`, and the
    bytes of each field. `close`, or the end of a `with` block, releases open files.

    Args:
        urls: Patterns, folders, or a list of these (see `urls.expand_urls`), a description of a
            mixture (see `mixture`), or a source of shards.
        handler: Called for shards that cannot be opened or are damaged.
        mode: "resampled" is equivalent to `resampled=True`; "unlink", "keep" and "resample"
            determine what happens to used files of a folder, see `DirectoryShardList`.
        resampled: Whether to draw shards at random, without end: set an epoch with `with_epoch`.
        repeat: Whether loops continue without end.
        shardshuffle: Whether to shuffle the shards in each epoch; any number except 0 is True.
        cache_size: Maximum size of the cache in bytes; -1 for no limit.
        cache_dir: Folder in which remote shards are cached; defaults to WDS_CACHE in the
            environment.
        url_to_name: Returns the name of a shard in the cache; None derives it from the address.
        detshuffle: Accepted for compatibility: shuffling is always a function of the seed.
        nodesplitter: Stage that divides shards among ranks; None gives every rank all shards.
        workersplitter: Stage that divides shards among workers; None gives every worker all.
        select_files: Selects members by name: a function, or a pattern.
        rename_files: Renames members.
        empty_check: Whether a pass without any sample is an error.
        verbose: Whether to log every shard as it is opened.
        seed: Determines all random choices; None for WDS_SEED in the environment, or 0.
        allow: "shell" permits addresses that are commands (`pipe:`), "env" lets addresses in
            documents refer to environment variables.

    Example:
        >>> dataset = WebDataset("photos/shard-0.tar", shardshuffle=False).decode("rgb8")
        >>> image, text = next(iter(dataset.to_tuple("png", "txt")))
        >>> image.shape, text
        ((24, 32, 3), 'grey number 0')
    """

    def __init__(
        self,
        urls: Any,
        handler: Handler = reraise_exception,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool = False,
        shardshuffle: bool | int | None = None,
        cache_size: float = -1,
        cache_dir: str | None = None,
        url_to_name: Callable[[str], str] | None = None,
        detshuffle: bool = False,
        nodesplitter: Any = "auto",
        workersplitter: Any = "auto",
        select_files: Any = None,
        rename_files: Callable[[str], str] | None = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: int | None = None,
        allow: Collection[str] = (),
    ) -> None:
        source = shard_source(urls, mode=mode, resampled=resampled, allow=allow)
        splitters = (nodesplitter, workersplitter)
        samples = SteppedTarSamples.configured(
            handler=handler,
            select_files=select_files,
            rename_files=rename_files,
            local_path=True,
            verbose=verbose,
            allow=allow,
            cache=cache_of(cache_size, cache_dir, url_to_name),
        )
        super().__init__(
            source,
            *_order(source, shardshuffle or 0, *splitters),
            samples,
            NonEmpty() if empty_check else None,
            seed=seed,
        )
        if repeat:
            self.repeat()


def _order(source: Any, shuffled: int, nodesplitter: Any, workersplitter: Any) -> list[Any]:
    """Return the stages that order shards and divide them among ranks and workers."""
    asked = [each for each in (nodesplitter, workersplitter) if each not in ("auto", None)]
    if getattr(source, "is_endless", False):
        # Every worker draws independently; splitting would only discard draws.
        return asked
    if not isinstance(source, Stage):
        # A source of the program's own, which may have divided its shards, or have no end.
        return [filters.shuffle(100 if shuffled is True else shuffled), *asked]
    by_node = DealShards(by_node=True, by_worker=False) if nodesplitter == "auto" else nodesplitter
    by_worker = (
        DealShards(by_node=False, by_worker=True) if workersplitter == "auto" else workersplitter
    )
    if not shuffled:
        return [by_node or None, by_worker or None]
    # All ranks must divide the same order, or some shards would be read twice and others never.
    return [ShuffleShards(same_for_all=True), by_node or None, ShuffleShards(), by_worker or None]


ShardList = SimpleShardList
PytorchShardList = SimpleShardList


class Processor:
    """Applies a stage to a dataset: `Processor(wds.map, function)(dataset)`.

    Args:
        f: Returns a stage for the other arguments, or is a function of an iterator and these.
        args: Arguments of `f`.
        kw: Keyword arguments of `f`.

    Example:
        >>> from energon.webdataset.filters import map as mapped
        >>> list(Processor(mapped, str)(FluidWrapper(range(2))))
        ['0', '1']
    """

    def __init__(self, f: Callable[..., Any], *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw

    def __call__(self, source: Any) -> Any:
        """Return `source` with the stage at its end."""
        pipeline = source if isinstance(source, DataPipeline) else FluidWrapper(source)
        is_factory = getattr(self.f, "__module__", None) == filters.__name__
        make = self.f if is_factory else pipelinefilter(self.f)
        return pipeline.compose(make(*self.args, **self.kw))


def ddp_equalize(dataset: Any, length: int, batchsize: int = 1) -> Any:
    """Return a dataset whose loops have the same number of steps on all ranks.

    Args:
        dataset: A pipeline, or a loader.
        length: Number of samples in an epoch, over all ranks.
        batchsize: Number of samples in an item.

    Example:
        >>> len(list(ddp_equalize(FluidWrapper(range(10)), length=8, batchsize=2)))
        4
    """
    return dataset.with_epoch(math.ceil(length / batchsize), scope="job")


def ResizedDataset(dataset: Any, length: int, nominal: int | None = None) -> Any:
    """Return a dataset whose loops have another length, each continuing where the last one stopped.

    Args:
        dataset: Any dataset.
        length: Number of items in a loop.
        nominal: What `len` returns; None for `length`.

    Example:
        >>> dataset = ResizedDataset(FluidWrapper(range(3)), 2)
        >>> list(dataset), list(dataset)
        ([0, 1], [2, 0])
    """
    resized = FluidWrapper(dataset).with_epoch(length, continues=True)
    return resized.with_length(length if nominal is None else nominal)


def FakeLength(dataset: Any, length: int) -> Any:
    """Return a dataset for which `len` returns `length`.

    Example:
        >>> len(FakeLength(FluidWrapper(range(3)), 100))
        100
    """
    return FluidWrapper(dataset).with_length(length)
