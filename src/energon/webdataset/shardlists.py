"""Sources of shards, their order, and their distribution to ranks and workers."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import re
import sys
import time
from bisect import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count, islice
from typing import Any

import numpy as np

from energon.errors import ConfigError, DatasetNotFoundError, EmptyDatasetError
from energon.io.address import is_remote, redact
from energon.plan.randomness import derive_seed, permute
from energon.webdataset.names import __getattr__ as __getattr__
from energon.webdataset.reading.urls import check_variables, expand_source, expand_urls, local_path
from energon.webdataset.reading.urls import envlookup as envlookup
from energon.webdataset.reading.urls import envsubst as envsubst
from energon.webdataset.running.worker_info import TorchLookalike, WorkerInfo, current_worker_info
from energon.webdataset.stages.base import Context, SplitAxis, Stage, UnsavableIterator
from energon.webdataset.stages.shuffling import Draws, default_seed
from energon.webdataset.utils import glob_with_braces, pytorch_worker_seed
from energon.webdataset.utils import is_iterable as is_iterable
from energon.webdataset.utils import obsolete as obsolete

logger = logging.getLogger("energon")

Shard = dict[str, Any]


class ShardSource(TorchLookalike, Stage):
    """A source with a fixed list of shards.

    Attributes:
        urls: The shards, which a program may change between loops.
        epoch: Number of iterations over it outside of a pipeline, from -1. Pipelines count their
            epochs themselves.
    """

    urls: list[str]
    epoch = -1
    _own_seed = 0
    """The seed outside of a pipeline."""

    def __len__(self) -> int:
        return len(self.urls)

    def __iter__(self) -> Iterator[Shard]:
        self.epoch += 1
        return self.open(iter(()), Context(current_worker_info(), self._own_seed, self.epoch))

    def describe(self) -> dict[str, Any]:
        digest = hashlib.blake2b("\n".join(self.urls).encode(), digest_size=8).hexdigest()
        return {"stage": type(self).__name__, "shards": len(self.urls), "names": digest}


class SimpleShardList(ShardSource):
    """Yields each shard once.

    Args:
        urls: Patterns, folders, or a list of these; see `expand_urls`.
        seed: Shuffles them, differently in each epoch; None keeps their order.

    Example:
        >>> list(SimpleShardList("{a,b}.tar"))
        [{'url': 'a.tar'}, {'url': 'b.tar'}]
    """

    def __init__(self, urls: Any, seed: int | None = None) -> None:
        self.urls = list(expand_urls(urls))
        self.seed = None if seed is None else default_seed(seed)

    @property
    def is_random(self) -> bool:
        return self.seed is not None

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Shard]:
        shards = [{"url": url} for url in self.urls]
        if self.seed is None:
            return iter(shards)
        return iter(permuted(shards, derive_seed(self.seed, context.epoch)))


class ResampledShards(ShardSource):
    """Yields shards drawn at random with replacement, independently in each worker.

    Args:
        urls: Patterns, folders, or a list of these; see `expand_urls`.
        nshards: Number of draws.
        seed: Distinguishes sources that draw from the same shards.
        worker_seed: Returns a seed for the worker that calls it; None derives it from rank and
            worker.
        deterministic: Whether sources with the same seed draw the same shards outside of a
            pipeline. In a pipeline, draws are always a function of seed, epoch and worker.
        max_urls: Maximum number of shards.
        empty_check: Accepted for compatibility: an empty list is always an error.

    Example:
        >>> drawn = list(ResampledShards("{a,b}.tar", nshards=100))
        >>> len(drawn), {shard["url"] for shard in drawn} == {"a.tar", "b.tar"}
        (100, True)
    """

    is_endless = is_random = True

    def __init__(
        self,
        urls: Any,
        nshards: int = sys.maxsize,
        seed: int = 0,
        worker_seed: Any = None,
        deterministic: bool = False,
        max_urls: float = 1e6,
        empty_check: bool = True,
    ) -> None:
        self.urls = list(expand_source(urls, max_urls))
        self.nshards = nshards
        self.deterministic = deterministic
        self.seed = default_seed(seed)
        self.worker_seed = worker_seed or pytorch_worker_seed
        self._own_seed = 0 if deterministic else next(_numbers)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Shard]:
        is_own = self.worker_seed is not pytorch_worker_seed
        worker = (int(self.worker_seed()),) if is_own else ()
        draws = Draws(lambda block: context.seed_of(self.seed, *worker, block, shared=False))
        shown = os.environ.get("WDS_SHOW_SEED", "0") not in ("", "0")
        seed = context.seed_of(self.seed, *worker, shared=False)
        level = logging.INFO if shown else logging.DEBUG
        logger.log(level, "drawing from %d shards with seed %d", len(self.urls), seed)
        numbers = range(self.nshards) if self.nshards < sys.maxsize else count()
        return ({"url": self.urls[draws.below(len(self.urls))]} for _ in numbers)


ResampledShardList = ResampledShards
_numbers = count(1)
"""Numbers sources that draw, in the order in which the program creates them."""


def resampled_(src: Iterable[Any], n: int = sys.maxsize) -> Iterator[Any]:
    """Yield `n` random items of an iterable, which is first read to its end."""
    yield from resampled(n)(src)


@dataclass(frozen=True)
class ShuffleShards(Stage):
    """Yields all shards in an order that changes with every epoch.

    Args:
        same_for_all: Whether all ranks get the same order whatever their seeds, so that they can
            divide the shards afterwards.
    """

    is_random = True

    same_for_all: bool = False

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        seed = context.seed_of()
        if self.same_for_all:
            seed = derive_seed("shards of all ranks", context.epoch)
        return iter(permuted(list(source), seed))


@dataclass(frozen=True)
class DealShards(Stage):
    """Divides the shards among the workers, so that together they read each shard once.

    If there are fewer shards than workers, several workers share a shard: each of m workers
    takes every m-th sample of it.

    Args:
        by_node: Whether to divide the shards among ranks; otherwise each rank gets all of them.
        by_worker: Whether to divide the shards of a rank among its workers.
    """

    by_node: bool = True
    by_worker: bool = True

    @property
    def splits(self) -> frozenset[SplitAxis]:
        by_axis: dict[SplitAxis, bool] = {"rank": self.by_node, "worker": self.by_worker}
        return frozenset(axis for axis, is_divided in by_axis.items() if is_divided)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        if not context.divides:
            return source
        shards = list(source)
        worker = context.worker
        if self.by_node:
            shards = list(deal(shards, worker.rank, worker.world_size))
        return deal(shards, worker.number, worker.num_workers) if self.by_worker else iter(shards)


def deal(shards: list[Any], number: int, count: int) -> Iterator[Any]:
    """Return the shards of worker `number` of `count`."""
    if len(shards) >= count or not shards:
        return islice(shards, number, None, count)
    shard = shards[number % len(shards)]
    sharing = len(range(number % len(shards), count, len(shards)))
    return iter([_shared(shard, number // len(shards), sharing)])


def _shared(shard: Any, number: int, count: int) -> Shard:
    shard = {"url": shard} if isinstance(shard, str) else dict(shard)
    before, parts = shard.get("share", (0, 1))
    return {**shard, "share": (before + number * parts, parts * count)}


def permuted(items: list[Any], seed: int) -> list[Any]:
    """Return the items in an order that is a function of a seed."""
    if len(items) < 2:
        return items
    numbers = np.arange(len(items))
    order = permute(numbers, np.array([len(items)]), np.array([seed], np.uint64))
    return [items[number] for number in order.tolist()]


def split_by_node(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Yield every n-th item, where n is the number of ranks.

    Example:
        >>> list(split_by_node("ab"))  # there is one node
        ['a', 'b']
    """
    worker = current_worker_info(group)
    yield from islice(src, worker.rank, None, worker.world_size)


def split_by_worker(src: Iterable[Any]) -> Iterator[Any]:
    """Yield every n-th item, where n is the number of loader workers of this rank.

    Example:
        >>> list(split_by_worker("ab"))  # outside of loaders
        ['a', 'b']
    """
    worker = current_worker_info()
    yield from islice(src, worker.number, None, worker.num_workers)


def single_node_only(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Yield all items, if this is the only rank.

    Raises:
        ConfigError: If there are several ranks, which would all get the same items.

    Example:
        >>> list(single_node_only("ab"))
        ['a', 'b']
    """
    worker: WorkerInfo = current_worker_info(group)
    if worker.world_size > 1:
        raise ConfigError(
            f"there are {worker.world_size} ranks, but nodesplitter=single_node_only allows only "
            "one; leave nodesplitter out to share the shards among them"
        )
    yield from src


@dataclass(frozen=True)
class _Resampled(Stage):
    n: int

    is_endless = is_random = True

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        items = list(source)
        if not items:
            raise EmptyDatasetError("there is nothing to draw from: the source is empty")
        draws = Draws(partial(context.seed_of, shared=False))
        return (items[draws.below(len(items))] for _ in range(self.n))


def resampled(n: int = sys.maxsize) -> Stage:
    """Return a stage that reads its whole source and yields `n` random items of it.

    Example:
        >>> len(list(resampled(5)("ab")))
        5
    """
    return _Resampled(n)


def non_empty(src: Iterable[Any]) -> Iterator[Any]:
    """Yield all items.

    Raises:
        EmptyDatasetError: If there are none.

    Example:
        >>> list(non_empty("ab"))
        ['a', 'b']
    """
    is_empty = True
    for item in src:
        is_empty = False
        yield item
    if is_empty:
        raise EmptyDatasetError("the pipeline yielded nothing")


def expand(s: str) -> str:
    """Return a path with the home folder (`~`) and environment variables (`$NAME`) expanded."""
    return os.path.expanduser(os.path.expandvars(s))


_CLAIMED = re.compile(r"^(?P<name>.*)\._(?P<pid>\d+)_$")
_SELECT = ("random", "oldest")
_FATES = ("unlink", "keep", "resample")


class DirectoryShardList(TorchLookalike, Stage):
    """Yields the files of a folder as they appear, each to one process.

    A file is claimed by appending the process id to its name, and recycled when the next one is
    requested. Files claimed by processes that have died are recycled as well.

    Args:
        path: The folder.
        pattern: A pattern for the names of files, which may contain braces.
        poll: Seconds between scans of the folder while it has no file; None ends the source then.
        timeout: Seconds without a file after which the source ends.
        mode: What happens to a used file: "unlink" deletes it, "keep" appends `._done_` to its
            name, "resample" releases it, to be used again.
        select: Which file to take next: "random" or "oldest".
        fate: Called with the path of a used file, instead of what `mode` says.

    Raises:
        ConfigError: If `mode` or `select` is invalid.
        DatasetNotFoundError: If there is no such folder.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> open(f"{folder}/a.tar", "w").close()
        >>> for shard in DirectoryShardList(folder, poll=None, fate=os.unlink):
        ...     shard["url"].startswith(f"{folder}/a.tar._")
        True
    """

    is_endless = is_random = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        pattern: str = "*.{tar,tgz,tar.gz,tar.bz2,tar.xz,tar.zst}",
        poll: float | None = 1.0,
        timeout: float = 1e12,
        mode: str = "resample",
        select: str = "random",
        fate: Any = None,
    ) -> None:
        self.path = local_path(os.fspath(path)) or ""
        if not os.path.isdir(self.path):
            raise DatasetNotFoundError(f"{path}: no such folder on this machine")
        if mode not in _FATES or select not in _SELECT:
            raise ConfigError(
                f"{mode=}, {select=}: expected a mode of {', '.join(_FATES)}, and a selection of "
                f"{', '.join(_SELECT)}"
            )
        self.pattern, self.poll, self.timeout = pattern, poll, timeout
        self.mode, self.select, self.fate = mode, select, fate

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # The caller may still have to read the last file.
        return self._claimed_files(random.Random(), puts_back=False)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        files = self._claimed_files(random.Random(context.seed_of(shared=False)), puts_back=True)
        return UnsavableIterator(files, "DirectoryShardList")

    def recycle(self, activename: str) -> None:
        """Dispose of a claimed file according to the mode."""
        name = without_last_extension(activename)
        with contextlib.suppress(FileNotFoundError):
            if self.fate is not None:
                self.fate(activename)
            elif self.mode == "unlink":
                os.unlink(activename)
            elif self.mode == "keep":
                os.rename(activename, f"{name}._done_")
            else:
                os.rename(activename, name)

    def cleanup_files_without_processes(self) -> None:
        """Recycle files claimed by processes that no longer exist."""
        for claimed in self._orphans():
            self.recycle(claimed)

    def _claimed_files(
        self, chooser: random.Random, *, puts_back: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield claimed files; one that has not been read to its end on closing may be released."""
        waiting_since = time.monotonic()
        while time.monotonic() - waiting_since < self.timeout:
            claimed = self._claim(chooser)
            if claimed is None:
                if self.poll is None:
                    return
                time.sleep(min(self.poll, self.timeout))
                continue
            try:
                yield {"url": claimed}
            except GeneratorExit:
                if puts_back:
                    _put_back(claimed)
                raise
            self.recycle(claimed)
            waiting_since = time.monotonic()

    def _claim(self, chooser: random.Random) -> str | None:
        """Claim a file for this process, and return its new path."""
        for orphan in self._orphans():
            _put_back(orphan)
        files = glob_with_braces(os.path.join(self.path, self.pattern))
        if self.select == "oldest":
            files = sorted(files, key=_age)
        else:
            chooser.shuffle(files)
        for file in files:
            claimed = f"{file}._{os.getpid()}_"
            # The first process to rename it wins.
            with contextlib.suppress(FileNotFoundError):
                os.rename(file, claimed)
                return claimed
        return None

    def _orphans(self) -> Iterator[str]:
        """Yield the paths of files claimed by processes that no longer exist."""
        for name in os.listdir(self.path):
            pid = get_pid_from_filename(name)
            if pid is not None and not check_pid_is_running(pid):
                yield os.path.join(self.path, name)


def _put_back(claimed: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rename(claimed, without_last_extension(claimed))


def get_pid_from_filename(fname: str) -> int | None:
    """Return the id of the process that has claimed a file, or None."""
    claimed = _CLAIMED.match(fname)
    return int(claimed["pid"]) if claimed else None


def without_last_extension(fname: str) -> str:
    """Return a name without its last dot and everything after it."""
    return re.sub(r"\.[^.]*$", "", fname)


def check_pid_is_running(pid: int) -> bool:
    """Return whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _age(path: str) -> float:
    try:
        return os.path.getmtime(path)
    except FileNotFoundError:
        return 0.0


@dataclass
class MSSource:
    """One source of a document.

    Attributes:
        name: Its name.
        perepoch: Number of its shards in an epoch; -1 for all.
        resample: Number of shards drawn with replacement; -1 for none.
        urls: Its shards.
    """

    name: str = ""
    perepoch: int = -1
    resample: int = -1
    urls: list[str] = field(default_factory=list)


class MultiShardSample(ShardSource):
    """Yields the shards of a document: each once per pass, or drawn at random without end.

    They are drawn if the document has weights, or if requested. Samples have the options of
    their source in `__options__`.

    Args:
        fname: Address of a YAML document, or a mapping like one, see `dataset_spec`.
        resampled: Whether to draw at random.
        allow: "env" lets its addresses refer to environment variables.

    Example:
        >>> dataset = {"name": "a", "shards": ["{0..3}.tar"], "choose": 2}
        >>> len(list(MultiShardSample({"datasets": [dataset]})))
        2
    """

    def __init__(
        self,
        fname: str | os.PathLike[str] | Mapping[str, Any],
        resampled: bool = False,
        allow: Collection[str] = (),
    ) -> None:
        self.allow = allow
        self._resampled = resampled
        self._seed: int | None = None
        self.parse_spec(fname)

    def parse_spec(self, fname: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        """Use the sources of another document."""
        from energon.webdataset.dataset_spec import load_spec  # needs pydantic

        spec = load_spec(fname, allow=self.allow)
        self.content, self._shards = spec.content, spec.shards
        self.urls = [shard["url"] for source in self._shards for shard in source]
        self.is_endless = self._resampled or spec.content.is_weighted
        self.sources = [
            MSSource(
                name=source.name or "",
                perepoch=getattr(source, "choose", None) or -1,
                resample=getattr(source, "resample", None) or -1,
                urls=[shard["url"] for shard in shards],
            )
            for source, shards in zip(spec.content.groups, spec.shards, strict=True)
        ]

    @property
    def is_random(self) -> bool:
        return self.is_endless or self.content.is_selection

    def set_epoch(self, seed: int) -> None:
        """Set the seed of all random choices, for all ranks."""
        self._seed = seed

    def get_shards_for_epoch(self) -> list[str]:
        """Return the shards of the next pass, without starting it.

        Raises:
            ConfigError: If they are drawn without end.
        """
        if self.is_endless:
            raise ConfigError("the shards of an epoch have no end: they are drawn by weight")
        context = Context(current_worker_info(), epoch=self.epoch + 1)
        return [shard["url"] for shard in self.open(iter(()), context)]

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Shard]:
        if self._seed is not None:
            context = replace(context, seed=self._seed)
        if self.content.is_selection:
            return iter(self._selected(context))
        if self.is_endless:
            return self._drawn(context)
        return iter([shard for source in self._shards for shard in source])

    def describe(self) -> dict[str, Any]:
        return {"stage": "MultiShardSample", "spec": self.content.model_dump(mode="json")}

    def _drawn(self, context: Context) -> Iterator[Shard]:
        """Draw a source by its weight, then one of its shards."""
        draws = Draws(partial(context.seed_of, shared=False))
        weights = [
            len(shards) if group.weight is None else group.weight
            for group, shards in zip(self.content.groups, self._shards, strict=True)
        ]
        bounds = list(accumulate(weights))
        for _ in count():
            source = bisect(bounds, draws.fraction() * bounds[-1])
            shards = self._shards[min(source, len(self._shards) - 1)]
            yield shards[draws.below(len(shards))]

    def _selected(self, context: Context) -> list[Shard]:
        """Return the shards of one epoch, the same ones for all workers."""
        chosen: list[Shard] = []
        groups = zip(self.content.groups, self._shards, strict=True)
        for number, (group, shards) in enumerate(groups):
            seed = context.seed_of("source", number, shared=True)
            if group.resample is not None:
                draws = Draws(lambda block, seed=seed: seed + block)  # type: ignore[misc]
                chosen += [shards[draws.below(len(shards))] for _ in range(group.resample)]
            else:
                chosen += permuted(shards, seed)[: group.choose]
        return permuted(chosen, context.seed_of("order", shared=True))


def shardspec(spec: Any) -> Stage:
    """Return the source of shards for a pattern, a list, or a YAML file.

    Example:
        >>> list(shardspec("{a,b}.tar"))
        [{'url': 'a.tar'}, {'url': 'b.tar'}]
    """
    source: Stage = shard_source(spec)
    return source


def shard_source(
    urls: Any, *, mode: str | None = None, resampled: bool = False, allow: Collection[str] = ()
) -> Any:
    """Return the source of shards for the arguments of `WebDataset`.

    Args:
        urls: See `WebDataset`.
        mode: See `WebDataset`.
        resampled: Whether to draw shards at random.
        allow: "env" lets addresses in documents refer to environment variables.

    Raises:
        ConfigError: If the arguments describe no source.
        SecurityError: If a document needs something that is not allowed.
    """
    if mode not in (None, "resampled", "unlink", "keep", "resample"):
        raise ConfigError(
            f"mode={mode!r}: expected resampled, or unlink, keep or resample for a folder"
        )
    if mode in ("unlink", "keep", "resample"):
        return DirectoryShardList(urls, mode=mode)
    resampled = resampled or mode == "resampled"
    if isinstance(urls, Mapping) or _ends_with(urls, ".yaml", ".yml"):
        return MultiShardSample(urls, resampled=resampled, allow=allow)
    if _ends_with(urls, ".json"):
        from energon.webdataset.descriptor import load_descriptor

        origin, remote = redact(os.fspath(urls)), is_remote(urls)
        urls = [shard.url for shard in load_descriptor(urls).shards]
        for url in urls:
            check_variables(url, origin=origin, allow=allow, is_remote=remote)
    if _is_source(urls):
        return urls
    return ResampledShards(urls) if resampled else SimpleShardList(urls)


def _ends_with(urls: Any, *extensions: str) -> bool:
    """Return whether this is the address of a file with one of some extensions."""
    return isinstance(urls, str | os.PathLike) and os.fspath(urls).endswith(extensions)


def _is_source(urls: Any) -> bool:
    if isinstance(urls, Stage):
        return True
    # A dataset of shards from early releases, where programs composed these themselves.
    return hasattr(urls, "__iter__") and not isinstance(
        urls, str | os.PathLike | list | tuple | set | frozenset
    )
