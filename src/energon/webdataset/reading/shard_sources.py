"""Choose the source of shards that fits what a program names as its data.

Besides lists of addresses and folders, there are YAML documents, which mix the shards of several
sources in given proportions.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from bisect import bisect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from typing import Any

from energon.errors import ConfigError, DatasetNotFoundError
from energon.io.address import is_remote, redact
from energon.webdataset.dataset_spec import DatasetSpec, LoadedSpec, SelectionSpec, load_spec
from energon.webdataset.reading.urls import check_variables, local_path
from energon.webdataset.running.place import TorchLookalike, current_place
from energon.webdataset.shardlists import (
    ResampledShards,
    Shard,
    ShardSource,
    SimpleShardList,
    permuted,
)
from energon.webdataset.stages.base import Context, Stage, UnsavableIterator
from energon.webdataset.stages.shuffling import Draws
from energon.webdataset.utils import glob_with_braces

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
    found = _CLAIMED.match(fname)
    return int(found["pid"]) if found else None


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
        spec = load_spec(fname, allow=self.allow)
        self._shards = [_shards(spec, number) for number in range(len(spec.urls))]
        self.urls = [shard["url"] for source in self._shards for shard in source]
        self.content = spec.content
        self.is_endless = self._resampled or _weighted(spec)

    @property
    def is_random(self) -> bool:
        return self.is_endless or isinstance(self.content, SelectionSpec)

    @property
    def sources(self) -> list[MSSource]:
        """The sources of the document."""
        content = self.content
        listed = content.datasets if isinstance(content, SelectionSpec) else content.dataset
        return [
            MSSource(
                name=getattr(source, "name", None) or "",
                perepoch=getattr(source, "choose", None) or -1,
                resample=getattr(source, "resample", None) or -1,
                urls=[shard["url"] for shard in shards],
            )
            for source, shards in zip(listed, self._shards, strict=True)
        ]

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
        context = Context(current_place(), epoch=self.epoch + 1)
        return [shard["url"] for shard in self.open(iter(()), context)]

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Shard]:
        if self._seed is not None:
            context = replace(context, seed=self._seed)
        if isinstance(self.content, SelectionSpec):
            return iter(self._selected(self.content, context))
        if self.is_endless:
            return self._drawn(self.content, context)
        return iter([shard for source in self._shards for shard in source])

    def describe(self) -> dict[str, Any]:
        return {"stage": "MultiShardSample", "spec": self.content.model_dump(mode="json")}

    def _drawn(self, content: DatasetSpec, context: Context) -> Iterator[Shard]:
        """Draw a source by its weight, then one of its shards."""
        draws = Draws(partial(context.seed_of, shared=False))
        weights = [
            len(shards) if each.weight is None else each.weight
            for each, shards in zip(content.dataset, self._shards, strict=True)
        ]
        bounds = list(accumulate(weights))
        for _ in count():
            place = bisect(bounds, draws.fraction() * bounds[-1])
            shards = self._shards[min(place, len(self._shards) - 1)]
            yield shards[draws.below(len(shards))]

    def _selected(self, content: SelectionSpec, context: Context) -> list[Shard]:
        """Return the shards of one epoch, the same ones for all workers."""
        chosen: list[Shard] = []
        for number, (each, shards) in enumerate(zip(content.datasets, self._shards, strict=True)):
            seed = context.seed_of("source", number, shared=True)
            if each.resample is not None:
                draws = Draws(lambda block, seed=seed: seed + block)  # type: ignore[misc]
                chosen += [shards[draws.below(len(shards))] for _ in range(each.resample)]
            else:
                chosen += permuted(shards, seed)[: each.choose]
        return permuted(chosen, context.seed_of("order", shared=True))


def _shards(spec: LoadedSpec, number: int) -> list[Shard]:
    urls = spec.urls[number]
    if isinstance(spec.content, SelectionSpec):
        return [{"url": url} for url in urls]
    source = spec.content.dataset[number]
    about: Shard = {"options": source.sample_options} if source.sample_options else {}
    if source.fields is not None:
        about["fields"] = source.fields
    return [{"url": url, **about} for url in urls]


def _weighted(spec: LoadedSpec) -> bool:
    content = spec.content
    return isinstance(content, DatasetSpec) and any(
        source.weight is not None for source in content.dataset
    )


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
        from energon.webdataset.wids.descriptor import load_descriptor

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
