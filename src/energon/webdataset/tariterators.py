"""Read tar files step by step, for programs that compose the steps themselves."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from energon.errors import DuplicateSampleKeyError, FormatError
from energon.formats.meta.braces import expand_braces
from energon.formats.tar.parser import SampleParser, StreamSample
from energon.formats.tar.stream import StreamReader
from energon.webdataset import security
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.names import __getattr__ as __getattr__
from energon.webdataset.reading.shard_cache import ShardStream, nothing
from energon.webdataset.reading.tar_samples import (
    ShardOpening,
    TarSamples,
    as_read_error,
    part_limit,
)
from energon.webdataset.stages.base import Context, UnsavableIterator

Shard = dict[str, Any]

meta_prefix = "__"
meta_suffix = "__"
trace = False

_META = r"__[^/]*__($|/)"
_ORIGIN = ("__url__", "__local_path__")
# Each segment is tried once, or long paths would take quadratic time.
_EXTENSION = re.compile(r"^((?:.*/)?(?:[^./]+|[^./]*/))[.]([^/]*)$", re.DOTALL)


def base_plus_ext(path: str) -> tuple[str | None, str | None]:
    """Return key and field of a member's name, or (None, None) if it has none.

    Example:
        >>> base_plus_ext("d/a.seg.png")
        ('d/a', 'seg.png')
    """
    parts = _EXTENSION.match(path)
    return (parts[1], parts[2]) if parts else (None, None)


def valid_sample(sample: Any) -> bool:
    """Return whether a sample has content, and is not marked as bad.

    Example:
        >>> valid_sample({"__key__": "a", "txt": b"A"})
        True
        >>> valid_sample({"__key__": "a", "__bad__": True})
        False
    """
    return isinstance(sample, dict) and len(sample) > 0 and not sample.get("__bad__", False)


def shardlist(urls: str | Iterable[str], *, shuffle: bool = False) -> Iterator[Shard]:
    """Yield shards by their addresses.

    Args:
        urls: Addresses, or a pattern with braces.
        shuffle: Whether to yield them in random order.
    """
    listed = list(expand_braces(urls) if isinstance(urls, str) else urls)
    if shuffle:
        random.shuffle(listed)
    for url in listed:
        yield {"url": url}


def tarfile_to_samples(
    handler: Handler = reraise_exception,
    select_files: Any = None,
    rename_files: Callable[[str], str] | None = None,
    *,
    allow: Collection[str] = (),
) -> TarSamples:
    """Return a stage from addresses of tar files to the samples in them.

    Args:
        handler: Called for files that cannot be opened or are damaged: True continues with the
            next file, False ends the stage. Also called for a field that occurs twice in a sample:
            True keeps the first one.
        select_files: Returns by (renamed) name whether a member is needed, or a pattern for the
            names; None reads all.
        rename_files: Renames members; None keeps their names.
        allow: "shell" permits addresses that are commands.

    Example:
        >>> samples = list(tarfile_to_samples()([{"url": "photos/shard-0.tar"}]))
        >>> samples[0]["txt"]
        b'grey number 0'
    """
    return SteppedTarSamples.configured(
        handler=handler, select_files=select_files, rename_files=rename_files, allow=allow
    )


@dataclass(frozen=True)
class SteppedTarSamples(TarSamples):
    """Reads with the functions of this module if the program has replaced one of them.

    Programs do so to open shards of their own stores, or to group files in another way.
    """

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        if (url_opener, tar_file_expander, group_by_keys) == _OWN_STEPS:
            return super().open(source, context)
        return UnsavableIterator(
            self._in_steps(source), "replaced function of tariterators", source
        )

    def _in_steps(self, source: Iterator[Any]) -> Iterator[StreamSample]:
        for shard in source:
            shard = {"url": shard} if isinstance(shard, str) else shard
            first, step = shard.get("share", (0, 1))
            yield from islice(self._shard_in_steps(shard), first, None, step)

    def _shard_in_steps(self, shard: Shard) -> Iterator[StreamSample]:
        if url_opener is _OWN_STEPS[0]:
            streams = opened_shards([shard], self.handler, self._opened)
        else:
            streams = url_opener([shard], handler=self.handler)
        options = {"select_files": self.select_files, "rename_files": self.rename_files}
        files = tar_file_expander(streams, handler=self.handler, **options)
        return group_by_keys(files, handler=self.handler)

    def _opened(self, shard: Shard) -> Shard:
        opened = self.opening.open_packed(shard)
        path = opened.local_path if self.local_path else None
        return {
            **shard,
            "stream": opened.stream,
            "local_path": path,
            "completed": opened.completed,
        }


def tarfile_samples(
    src: Iterable[Any],
    handler: Handler = reraise_exception,
    select_files: Any = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[StreamSample]:
    """Yield the samples of tar files.

    Args:
        src: Dicts with the `url` of a file.
        handler: See `tarfile_to_samples`, as for all arguments below.
        select_files: Selects members by name.
        rename_files: Renames members.

    Example:
        >>> samples = list(tarfile_samples([{"url": "photos/shard-0.tar"}]))
        >>> samples[0]["txt"]
        b'grey number 0'
    """
    return tarfile_to_samples(handler, select_files, rename_files)(src)


def url_opener(
    data: Iterable[Shard],
    handler: Handler = reraise_exception,
    *,
    allow: Collection[str] = (),
    **kw: Any,
) -> Iterator[Shard]:
    """Yield shards with an open `stream` of their stored bytes.

    Args:
        data: Dicts with a `url`.
        handler: Called for shards that cannot be opened.
        allow: "shell" permits addresses that are commands.
        kw: Accepted for compatibility.

    Example:
        >>> for shard in url_opener([{"url": "photos/shard-0.tar"}]):
        ...     with shard["stream"] as stream:
        ...         print(stream.read(5))
        b'0.png'
    """
    opening = ShardOpening(security.resolve(allow))
    return opened_shards(
        data, handler, lambda shard: {**shard, "stream": opening.open_packed(shard).stream}
    )


def opened_shards(
    data: Iterable[Any], handler: Handler, open_shard: Callable[[Shard], Shard]
) -> Iterator[Shard]:
    """Yield shards as a function returns them; the handler is called for its errors."""
    for shard in data:
        try:
            opened = open_shard({"url": shard} if isinstance(shard, str) else shard)
        except Exception as error:
            if handler(error):
                continue
            return
        yield opened


def tar_file_iterator(
    fileobj: Any,
    skip_meta: str | None = _META,
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[StreamSample]:
    """Yield the regular files of an open archive, as dicts of `fname` and `data`.

    Args:
        fileobj: The archive, compressed or not.
        skip_meta: Regular expression for names to skip; None skips none.
        handler: Called for damaged archives: True ends the archive.
        select_files: Returns by (renamed) name whether a file is needed.
        rename_files: Renames files.

    Example:
        >>> with open("photos/shard-0.tar", "rb") as stream:
        ...     [file["fname"] for file in tar_file_iterator(stream)][:2]
        ['0.png', '0.txt']
    """
    try:
        yield from _files(fileobj, skip_meta, select_files, rename_files)
    except FormatError as error:
        handler(as_read_error(error))


def _files(
    fileobj: Any,
    skip_meta: str | None,
    select_files: Callable[[str], Any] | None,
    rename_files: Callable[[str], str] | None,
) -> Iterator[StreamSample]:
    """Yield the regular files of an open archive.

    Raises:
        FormatError: If it is damaged.
    """
    skipped = re.compile(skip_meta) if skip_meta else None
    numbers = count()

    def alone(name: str) -> tuple[str, str] | None:
        # With the number as key and the name as field, no two files belong to one sample.
        return None if skipped and skipped.match(name) else (str(next(numbers)), name)

    origin = str(getattr(fileobj, "name", "the archive"))
    opened = ShardStream(origin, fileobj)
    ShardOpening().unpack(opened)
    parser = SampleParser(
        origin,
        select=select_files,
        rename=rename_files,
        split=alone,
        part_limit=part_limit(opened.stream),
    )
    reader = StreamReader(opened.stream, parser, head=opened.head)
    while (members := reader.next_block()) is not None:
        for member in members:
            _, (name, data) = member.items()
            yield {"fname": name, "data": data}


def tar_file_expander(
    data: Iterable[Shard],
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
    eof_value: Any = None,
) -> Iterator[StreamSample]:
    """Yield the files of open shards, as dicts of `fname`, `data` and `__url__`.

    Args:
        data: The shards that `url_opener` yields.
        handler: Called for damaged archives.
        select_files: See `tar_file_iterator`.
        rename_files: See `tar_file_iterator`.
        eof_value: Yielded after each shard; None yields nothing. `group_by_keys` needs no marker,
            and grouping functions of programs often expect files only.

    Example:
        >>> shards = url_opener([{"url": "photos/shard-0.tar"}])
        >>> [file.get("fname") for file in tar_file_expander(shards)][:2]
        ['0.png', '0.txt']
    """
    for shard in data:
        origin = {"__url__": shard["url"]}
        if shard.get("local_path") is not None:
            origin["__local_path__"] = shard["local_path"]
        try:
            for member in _files(shard["stream"], _META, select_files, rename_files):
                yield {**member, **origin}
            # A cache keeps shards that were read to their end and are complete.
            shard.get("completed", nothing)()
        except Exception as error:
            if not handler(as_read_error(error)):
                return
        finally:
            shard["stream"].close()
        if eof_value is not None:
            yield eof_value


def group_by_keys(
    data: Iterable[StreamSample],
    keys: Callable[[str], tuple[str | None, str | None]] = base_plus_ext,
    lcase: bool = True,
    suffixes: Collection[str] | None = None,
    handler: Handler = reraise_exception,
) -> Iterator[StreamSample]:
    """Group consecutive files with the same key into samples.

    Args:
        data: Dicts of `fname`, `data` and `__url__`. A sample ends with its shard: where
            `__url__` changes, or at a dict without `fname`.
        keys: Returns key and field of a name.
        lcase: Whether to convert fields to lower case.
        suffixes: The fields to keep; None for all.
        handler: Called for files that cannot be part of a sample.

    Example:
        >>> files = [{"fname": "a.txt", "data": b"A"}, {"fname": "a.cls", "data": b"1"}]
        >>> list(group_by_keys(files))
        [{'__key__': 'a', '__url__': None, 'txt': b'A', 'cls': b'1'}]
    """
    sample: StreamSample = {}
    for member in data:
        name = member.get("fname")
        key, field = keys(name) if name is not None else (None, None)
        if name is not None and key is None:
            continue
        if sample and (key != sample["__key__"] or member.get("__url__") != sample["__url__"]):
            if valid_sample(sample):
                yield sample
            sample = {}
        if key is None or field is None:
            continue
        field = field.lower() if lcase else field
        if not sample:
            origin = {name: member[name] for name in _ORIGIN if name in member}
            sample = {"__key__": key, "__url__": None, **origin}
        if field in sample:
            where = f"{sample['__url__']}: {name}: sample {key!r} has"
            error: FormatError = DuplicateSampleKeyError(
                f"{where} the field {field!r} twice; if these are two samples, rename one, as "
                "`energon prepare --fix-duplicates` does"
            )
            if field in ("__key__", "__url__", *_ORIGIN):
                error = FormatError(
                    f"{where} a field named {field!r}, a name that every sample has; rename the "
                    "file, or leave it out with `suffixes`"
                )
            if not handler(error):
                return
        elif suffixes is None or field in suffixes:
            sample[field] = member["data"]
    if valid_sample(sample):
        yield sample


_OWN_STEPS = (url_opener, tar_file_expander, group_by_keys)
