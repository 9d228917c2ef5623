"""Read the samples of shards: the stage between addresses of tar files and samples.

Shards are opened at any address, compressed or not, at any position. Compression (gzip, bzip2, xz,
zstd) is detected from the first bytes. Where opening takes time, the next shard is opened while the
current one is read.

Damaged archives raise errors that are also those of Python's tar library, as programs expect.
"""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import islice
from operator import length_hint
from typing import Any, Self

from energon.errors import (
    ConfigError,
    EmptyDatasetError,
    FormatError,
    StateError,
    TruncatedError,
)
from energon.formats.compressed import HEAD_BYTES, Unpacked, compression_of
from energon.formats.meta.braces import expand_braces
from energon.formats.tar.headers import split_name
from energon.formats.tar.parser import SampleParser, StreamSample
from energon.formats.tar.stream import StreamReader
from energon.io.threads import WaitingThreads
from energon.limits import TAR_PART_BYTES, UNPACKED_BYTES, Limit
from energon.loader.memory import keep_heap
from energon.messages import describe_error
from energon.webdataset import security
from energon.webdataset.gopen import open_url, rewrite_url
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.reading.shard_cache import ShardCache, ShardStream, nothing
from energon.webdataset.reading.urls import is_local, local_path
from energon.webdataset.stages.base import (
    Context,
    Positioned,
    Stage,
    StageIterator,
    State,
)

SKIP_BYTES = 1 << 20


def part_limit(stream: Any) -> Limit:
    """Return how large a part in a stream may be; compressed, it costs nothing to be huge."""
    return UNPACKED_BYTES if isinstance(stream, Unpacked) else TAR_PART_BYTES


@dataclass(frozen=True)
class ShardOpening:
    """How shards are opened.

    Args:
        allowed: What is allowed, see `security.resolve`.
        cache: Stores copies of remote shards; None for no cache.
    """

    allowed: frozenset[str] = frozenset()
    cache: ShardCache | None = None

    def open(self, shard: Any) -> ShardStream:
        """Open an item of a shard list: an address, or a dict, see `open_packed`."""
        opened = self.open_packed(shard)
        self.unpack(opened)
        return opened

    def unpack(self, opened: ShardStream, position: int = 0) -> None:
        """Make a shard that was opened as stored yield decompressed bytes, from a position on."""
        opened.head = read_exactly(opened.stream, HEAD_BYTES)
        compression = compression_of(opened.head)
        if compression is not None:
            opened.stream = Unpacked(
                opened.stream, compression, head=opened.head, origin=opened.url
            )
            opened.head = b""
        if position:
            _skip(opened, position)

    def open_packed(self, shard: Any) -> ShardStream:
        """Open a shard as stored, from its beginning.

        Args:
            shard: An address, or a dict with `url` and optionally `local_path` or an open `stream`.
        """
        shard = {"url": shard} if isinstance(shard, str) else shard
        if not isinstance(shard, dict) or "url" not in shard:
            raise ConfigError(
                f"expected a shard (an address, or a dict with a url), found {shard!r:.200}; is "
                "a stage that reads shards, such as tarfile_to_samples, in the wrong place?"
            )
        url, path = shard["url"], shard.get("local_path")
        if "stream" in shard:
            completed = shard.get("completed", nothing)
            return ShardStream(url, shard["stream"], local_path=path, completed=completed)
        path = path or local_path(rewrite_url(url))
        if path is None and self.cache is not None:
            return self.cache.open(url, lambda: open_url(url, allowed=self.allowed))
        return ShardStream(url, open_url(path or url, allowed=self.allowed), local_path=path)


def read_exactly(stream: Any, size: int) -> bytes:
    """Return `size` bytes; fewer only at the end."""
    data = b""
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


def _skip(opened: ShardStream, position: int) -> None:
    """Skip to a position in decompressed bytes."""
    stream: Any = opened.stream
    passed, opened.head = len(opened.head), b""
    if hasattr(stream, "seekable") and stream.seekable():
        stream.seek(position)
        return
    while passed < position:
        more = len(stream.read(min(position - passed, SKIP_BYTES)) or b"")
        if not more:
            raise StateError(
                f"{opened.url}: ends at byte {passed}, before the saved position {position}; has "
                "it changed since?"
            )
        passed += more


_END = object()


class OpeningAhead(Iterator[Any]):
    """Opens the next shard early, since servers and commands take time to start.

    Local files are not opened early, and sources of them are not read ahead: they may remove a
    file as soon as the next one is requested.

    Args:
        shards: Items as `ShardOpening.open` accepts them.
        opening: How they are opened.
    """

    def __init__(self, shards: Iterator[Any], opening: ShardOpening) -> None:
        self._shards = shards
        self._opening = opening
        self._next: Any = None
        self._failure: Exception | None = None
        self._begun: Future[ShardStream] | None = None

    def __next__(self) -> Any:
        if self._failure is not None:
            raise self._failure
        shard, self._next = self._next, None
        shard = next(self._shards) if shard is None else shard
        if shard is _END:
            raise StopIteration
        return shard

    def open(self, shard: Any, *, position: int = 0) -> ShardStream:
        """Open the shard that was yielded last, or wait until it is open; start opening the next.

        Args:
            shard: The shard.
            position: Where to begin, in decompressed bytes.
        """
        begun, self._begun = self._begun, None
        opened = self._opening.open_packed(shard) if begun is None else begun.result()
        try:
            self._opening.unpack(opened, position)
        except BaseException:
            opened.stream.close()  # the error may be kept, and the stream with it
            raise
        if not _is_local(shard):
            self._look_ahead()
        return opened

    def close(self) -> None:
        """Close a shard that was opened early."""
        if self._begun is not None:
            self._begun.add_done_callback(_close)
            self._begun = None

    def _look_ahead(self) -> None:
        try:
            self._next = next(self._shards, _END)
        except Exception as error:
            # The error concerns the next shard, and the current one must be yielded first.
            self._failure = error
            return
        if self._next is not _END and not _is_local(self._next):
            # The thread ends once the shard is open: many datasets may be open at a time.
            with closing(WaitingThreads(1, "energon-shards")) as threads:
                self._begun = threads.submit(self._opening.open_packed, self._next)


def _is_local(shard: Any) -> bool:
    url = shard.get("url") if isinstance(shard, dict) else shard
    if isinstance(shard, dict) and "stream" in shard:
        return True
    return not isinstance(url, str) or is_local(url) or url == "-"


def _close(opened: Future[ShardStream]) -> None:
    if opened.exception() is None:
        opened.result().stream.close()


logger = logging.getLogger("energon")


class DamagedArchiveError(FormatError, tarfile.ReadError):
    """An archive is damaged."""


class CutOffArchiveError(TruncatedError, tarfile.ReadError):
    """An archive ends before its content does."""


def as_read_error(error: Exception) -> Exception:
    """Return a format error as one that is also a `tarfile.ReadError`; other errors unchanged."""
    kinds: dict[Any, Any] = {TruncatedError: CutOffArchiveError, FormatError: DamagedArchiveError}
    kind = kinds.get(type(error))
    if kind is None:
        return error
    read_error: Exception = kind(*error.args)
    read_error.__cause__ = error.__cause__
    return read_error.with_traceback(error.__traceback__)


KEPT_BYTES = 128 << 20
MANY_EMPTY_SHARDS = 100
"""A warning is logged after this many shards in a row without a sample."""


@cache
def keep_memory() -> None:
    """Let the C library keep memory freed by samples for the next ones; done once per process.

    Measured on images of 70 kB: more than three times as many samples a second.
    """
    keep_heap(KEPT_BYTES)


@dataclass(frozen=True)
class TarSamples(Stage):
    """Yields the samples of tar files, one file after the other.

    Args:
        handler: Called for files that cannot be opened or are damaged: True continues with the
            next file, False ends the stage. Also called for a field that occurs twice in a sample:
            True keeps the first one.
        select_files: Returns by (renamed) name whether a member is needed; None reads all.
        rename_files: Renames members; None keeps their names.
        local_path: Whether samples of local files have the path in `__local_path__`.
        verbose: Whether to log each file as it is opened.
        lowercase: Whether to convert field names to lower case.
        opening: How files are opened.
        sizes: Whether fields are the sizes of contents, which are then not read.
    """

    handler: Handler = reraise_exception
    select_files: Callable[[str], Any] | None = None
    rename_files: Callable[[str], str] | None = None
    local_path: bool = False
    verbose: bool = False
    lowercase: bool = True
    opening: ShardOpening = field(default_factory=ShardOpening)
    sizes: bool = False

    @classmethod
    def configured(
        cls,
        *,
        select_files: Any = None,
        rename_files: Callable[[str], str] | None = None,
        allow: Collection[str] = (),
        cache: ShardCache | None = None,
        **options: Any,
    ) -> Self:
        """Return the stage that the options of `WebDataset` describe.

        Raises:
            ConfigError: If an option is invalid.
        """
        if isinstance(select_files, str):
            select_files = NamePattern(select_files)
        for name, function in (("select_files", select_files), ("rename_files", rename_files)):
            if function is not None and not callable(function):
                raise ConfigError(
                    f"{name}={function!r}: expected a function of the name of a member"
                )
        options["opening"] = ShardOpening(security.resolve(allow), cache)
        return cls(select_files=select_files, rename_files=rename_files, **options)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        keep_memory()
        return _TarSamplesIterator(self, source)


@dataclass(frozen=True)
class NamePattern:
    """Returns whether a name matches a pattern such as `*.jpg` or `*.{jpg,txt}`."""

    pattern: str

    def __call__(self, name: str) -> bool:
        return any(fnmatchcase(name, each) for each in expand_braces(self.pattern))


@dataclass(frozen=True)
class FieldFilter:
    """Returns whether a member is one of the selected fields and passes a further filter."""

    fields: tuple[str, ...]
    select: Callable[[str], Any] | None

    def __call__(self, name: str) -> bool:
        parts = split_name(name)
        if parts is None or parts[1].lower() not in self.fields:
            return False
        return self.select is None or bool(self.select(name))


@dataclass(frozen=True)
class NonEmpty(Stage):
    """Passes on all items; raises if there are none, unless another worker may have some."""

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return Positioned(partial(self._checked, context.worker.count), source, seen=False)

    def _checked(self, workers: int, source: Iterator[Any], at: State) -> Iterator[Any]:
        items = iter(source)
        for item in items:
            at["seen"] = True
            yield item
            del item  # its memory is used again
            yield from items
        if workers > 1 or at["seen"]:
            return
        failure = getattr(source, "failure", None)
        if failure is not None:
            raise EmptyDatasetError(
                "no shard could be read, and the handler has tolerated each failure; the last "
                f"one: {describe_error(failure)}"
            ) from failure
        raise EmptyDatasetError(
            "the shards hold no samples: files in a shard are named KEY.EXTENSION; pass "
            "empty_check=False if there may be none"
        )


class ShardIterator(StageIterator):
    """Items of shards, one shard after the other. Subclasses read the items of a shard.

    Shard lists need no state of their own: they are iterated again, which costs next to nothing
    compared with opening a shard. The position also tells whether the handler has ended the stage:
    a shard that failed may not fail again.
    """

    def __init__(self, stage: Any, source: Iterator[Any]) -> None:
        self._stage = stage
        self._num_shards = 0
        self._has_stopped = False
        self._refused: Exception | None = None
        self.failure: Exception | None = None
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        shards = iter(self._source)
        if sum(1 for _ in islice(shards, self._num_shards)) < self._num_shards:
            raise StateError(
                f"the saved position is in shard {self._num_shards}, but there are fewer; has the "
                "list of shards changed?"
            )
        with closing(OpeningAhead(shards, self._stage.opening)) as ahead:
            for shard in ahead:
                failure: Exception | None = None
                try:
                    yield from self._shard_items(shard, ahead)
                except Exception as error:
                    failure = self.failure = as_read_error(error)
                    if error is self._refused or not self._stage.handler(failure):
                        self._has_stopped = True
                        return
                self._end_shard(failure)
                self._num_shards += 1

    def _shard_items(self, shard: Any, ahead: OpeningAhead) -> Iterator[Any]:
        """Yield the items of a shard from the position on."""
        raise NotImplementedError

    def _end_shard(self, failure: Exception | None) -> None:
        """Set the position in the next shard to its beginning."""
        raise NotImplementedError

    def state_dict(self) -> State:
        return {"shards": self._num_shards, "stopped": self._has_stopped}

    def load_state_dict(self, state: State) -> None:
        self._num_shards, self._has_stopped = state["shards"], state["stopped"]
        if self._has_stopped:
            self._items = iter(())


def share_of(shard: Any) -> tuple[int, int]:
    """Return which of the samples of a shard belong to this worker: the first, and every n-th."""
    share: tuple[int, int] = shard.get("share", (0, 1)) if isinstance(shard, dict) else (0, 1)
    return share


class _TarSamplesIterator(ShardIterator):
    """Its position has the offset and sample number of a block, and how many were taken of it."""

    def __init__(self, stage: TarSamples, source: Iterator[Any]) -> None:
        self._position = self._number = self._block_length = 0
        self._rest: Iterator[StreamSample] = iter(())
        self._num_empty = 0
        super().__init__(stage, source)

    def _end_shard(self, failure: Exception | None) -> None:
        self._num_empty = 0 if self._number + self._block_length else self._num_empty + 1
        if self._num_empty == MANY_EMPTY_SHARDS:
            # Shards that are drawn at random never end.
            logger.warning(
                "%d shards in a row have no samples: %s; check their addresses, or stop "
                "the run, which may wait for samples without end",
                self._num_empty,
                "they are empty" if failure is None else describe_error(failure),
            )
        self._position = self._number = self._block_length = 0

    def _shard_items(self, shard: Any, ahead: OpeningAhead) -> Iterator[StreamSample]:
        opened = ahead.open(shard, position=self._position)
        reader = self._reader(opened, shard)
        first, step = share_of(shard)
        # Offset and number are those of the start of a block. After a restore, the samples before
        # number + taken have already been yielded.
        taken = self._block_length
        self._block_length = 0
        number = self._number
        with closing(reader):
            while (block := reader.next_block()) is not None:
                length = len(block)
                self._position, self._number = reader.block_position, number
                self._block_length, self._rest = length, iter(block)
                # Keeps no reference to yielded samples, so that their memory is reused.
                del block
                if taken:
                    taken -= sum(1 for _ in islice(self._rest, taken))
                if step == 1:
                    yield from self._rest
                else:
                    yield from self._every(first, step)
                number += length
            opened.completed()

    def _every(self, first: int, step: int) -> Iterator[StreamSample]:
        """Yield the samples of a block that belong to this worker, if several share the shard."""
        for sample in self._rest:
            number = self._number + self._block_length - length_hint(self._rest) - 1
            if number % step == first:
                yield sample

    def _reader(self, opened: ShardStream, shard: Any) -> StreamReader:
        stage = self._stage
        if stage.verbose:
            logger.info("reading %s from byte %d", opened.url, self._position)
        entries: StreamSample = {"__url__": opened.url}
        if stage.local_path and opened.local_path:
            entries["__local_path__"] = opened.local_path
        select = stage.select_files
        if isinstance(shard, dict):
            if "options" in shard:
                entries["__options__"] = shard["options"]
            if "fields" in shard:
                select = FieldFilter(shard["fields"], select)
        parser = SampleParser(
            opened.url,
            common=entries,
            select=select,
            rename=stage.rename_files,
            lowercase=stage.lowercase,
            position=self._position,
            part_limit=part_limit(opened.stream),
            tolerates=self._tolerates,
            sizes=stage.sizes,
        )
        return StreamReader(opened.stream, parser, head=opened.head)

    def _tolerates(self, error: Exception) -> Any:
        """Ask the handler about a field that occurs twice, which it is not asked about again."""
        goes_on = self._stage.handler(error)
        if not goes_on:
            self._refused = error
        return goes_on

    def state_dict(self) -> State:
        return {
            **super().state_dict(),
            "position": self._position,
            "number": self._number,
            "taken": self._block_length - length_hint(self._rest),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._position, self._number = state["position"], state["number"]
        self._block_length = state["taken"]
