"""Read files of concatenated CBOR, MsgPack or JSON values instead of tar files."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from energon.decode.values import decode_json
from energon.errors import EnergonError, FormatError, TruncatedError, needs_extra
from energon.limits import DOCUMENT_BYTES, PART_DEPTH, check_depth
from energon.messages import describe_error
from energon.webdataset import security
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.reading.shard_cache import ShardStream
from energon.webdataset.reading.tar_samples import (
    OpeningAhead,
    ShardIterator,
    ShardOpening,
    share_of,
)
from energon.webdataset.stages.base import Context, Stage, State

Records = Callable[[ShardStream], Iterator[Any]]
"""Yields the records of an open file."""

_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class RecordSamples(Stage):
    """Yields the records of files, one file after another, unchanged.

    Args:
        records: Reads the records of a file.
        handler: Called for files that cannot be opened or are damaged: True continues with the next
            file, False ends the stage.
        opening: How files are opened.
    """

    records: Records
    handler: Handler = reraise_exception
    opening: ShardOpening = field(default_factory=ShardOpening)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _RecordIterator(self, source)


class _RecordIterator(ShardIterator):
    """Its position is also the number of records taken from the next file."""

    def __init__(self, stage: RecordSamples, source: Iterator[Any]) -> None:
        self._taken = 0
        super().__init__(stage, source)

    def _shard_items(self, shard: Any, ahead: OpeningAhead) -> Iterator[Any]:
        opened = ahead.open(shard)
        number, count = share_of(shard)
        with closing(opened.stream):
            mine = islice(self._stage.records(opened), number, None, count)
            for record in islice(mine, self._taken, None):
                self._taken += 1
                yield record
            opened.completed()

    def _end_shard(self, failure: Exception | None) -> None:
        self._taken = 0

    def state_dict(self) -> State:
        return {**super().state_dict(), "taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._taken = state["taken"]


def cbors_to_samples(
    handler: Handler = reraise_exception, allow: Collection[str] = ()
) -> RecordSamples:
    """Return a stage from addresses of files to the CBOR values in them.

    Example:
        >>> import cbor2, tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".cbors") as file:
        ...     file.write(cbor2.dumps([1]) + cbor2.dumps([2]))
        ...     file.flush()
        ...     list(cbors_to_samples()([{"url": file.name}]))
        4
        [[1], [2]]
    """
    return RecordSamples(read_cbor, handler, ShardOpening(security.resolve(allow)))


cbors2_to_samples = cbors_to_samples


def msgpacks_to_samples(
    handler: Handler = reraise_exception, allow: Collection[str] = ()
) -> RecordSamples:
    """Return a stage from addresses of files to the MsgPack values in them.

    Example:
        >>> import msgpack, tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".mps") as file:
        ...     file.write(msgpack.packb([1]) + msgpack.packb([2]))
        ...     file.flush()
        ...     list(msgpacks_to_samples()([{"url": file.name}]))
        4
        [[1], [2]]
    """
    return RecordSamples(read_msgpack, handler, ShardOpening(security.resolve(allow)))


def jsonl_to_samples(
    handler: Handler = reraise_exception, allow: Collection[str] = ()
) -> RecordSamples:
    """Return a stage from addresses of files to the JSON values in them, one per line.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        ...     file.write(b'{"n": 1}\\n{"n": 2}\\n')
        ...     file.flush()
        ...     list(jsonl_to_samples()([{"url": file.name}]))
        18
        [{'n': 1}, {'n': 2}]
    """
    return RecordSamples(read_jsonl, handler, ShardOpening(security.resolve(allow)))


def read_cbor(opened: ShardStream) -> Iterator[Any]:
    """Yield the values of a file of concatenated CBOR.

    Raises:
        TruncatedError: If the last value is truncated.
        FormatError: If there is something else.
    """
    with needs_extra("formats", "CBOR needs cbor2"):
        import cbor2
    stream = _Values(opened)
    number = 0
    while stream.peek(1):
        try:
            stream.begin(number)
            yield cbor2.load(stream, max_depth=PART_DEPTH.value)
        except cbor2.CBORDecodeError as error:
            if isinstance(error.__cause__, EnergonError):  # of the stream
                raise error.__cause__ from None
            if isinstance(error, cbor2.CBORDecodeEOF):
                raise _cut_off(opened, number) from error
            raise _damaged(opened, number, error) from error
        number += 1


def read_msgpack(opened: ShardStream) -> Iterator[Any]:
    """Yield the values of a file of concatenated MsgPack.

    Raises:
        TruncatedError: If the last value is truncated.
        FormatError: If there is something else.
    """
    with needs_extra("formats", "MsgPack needs msgpack"):
        import msgpack
    unpacker = msgpack.Unpacker(max_buffer_size=DOCUMENT_BYTES.value + _CHUNK_BYTES)
    number = fed = 0
    stream = io.BufferedReader(_Bytes(opened), _CHUNK_BYTES)
    while chunk := stream.read1(_CHUNK_BYTES):
        fed += len(chunk)
        try:
            unpacker.feed(chunk)
            for value in unpacker:
                if isinstance(value, list | dict):
                    check_depth(value)
                yield value
                number += 1
        except msgpack.BufferFull as error:
            raise _too_large(opened, number) from error
        except (ValueError, msgpack.UnpackException) as error:
            raise _damaged(opened, number, error) from error
    if unpacker.tell() < fed:
        raise _cut_off(opened, number)


def read_jsonl(opened: ShardStream) -> Iterator[Any]:
    """Yield the values of a file with one JSON value per line; empty lines are ignored.

    Raises:
        FormatError: If a line is not JSON.
    """
    lines = io.BufferedReader(_Bytes(opened), _CHUNK_BYTES)
    limit = DOCUMENT_BYTES.value
    number = 0
    while line := lines.readline(limit + len(b"\r\n")):
        content = line.rstrip(b"\r\n")
        if len(content) > limit:
            raise _too_large(opened, number)
        if content.strip():
            yield _json(opened, number, content)
        number += 1


def _json(opened: ShardStream, number: int, line: bytes) -> Any:
    try:
        return decode_json(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{opened.url}: line {number + 1} is not JSON: {error}") from error


class _Bytes(io.RawIOBase):
    """The bytes of an open file, as a stream of the standard library."""

    def __init__(self, opened: ShardStream) -> None:
        self._opened = opened
        self._rest = memoryview(opened.head)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # Streams of a program may return more than was requested.
        data = self._rest or memoryview(self._opened.stream.read(len(buffer)) or b"")
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        self._rest = data[size:]
        return size


class _Values(io.BufferedReader):
    """A stream of values whose size is limited."""

    def __init__(self, opened: ShardStream) -> None:
        super().__init__(_Bytes(opened), _CHUNK_BYTES)
        self._opened = opened
        self._number = self._left = 0

    def begin(self, number: int) -> None:
        """Begin with the next value, which may have up to `DOCUMENT_BYTES`."""
        self._number, self._left = number, DOCUMENT_BYTES.value

    def read(self, size: int | None = -1, /) -> bytes:
        # A damaged length may be huge: only bytes that are there count.
        most = self._left + 1
        data = super().read(most if size is None or size < 0 else min(size, most))
        self._left -= len(data)
        if self._left < 0:
            raise _too_large(self._opened, self._number)
        return data


def _cut_off(opened: ShardStream, number: int) -> TruncatedError:
    return TruncatedError(
        f"{opened.url}: value {number} is truncated; restore the file or write it again"
    )


def _too_large(opened: ShardStream, number: int) -> FormatError:
    return FormatError(
        f"{opened.url}: value {number} has more than {DOCUMENT_BYTES.value} bytes; "
        f"{DOCUMENT_BYTES.hint}"
    )


def _damaged(opened: ShardStream, number: int, error: Exception) -> FormatError:
    return FormatError(
        f"{opened.url}: value {number} is damaged ({describe_error(error)}); restore the "
        "file or write it again"
    )
