"""Read files of concatenated CBOR, MsgPack or JSON values instead of tar files."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from energon.decode.values import decode_json
from energon.errors import FormatError, TruncatedError, needs_extra
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
        try:
            mine = islice(self._stage.records(opened), number, None, count)
            for record in islice(mine, self._taken, None):
                self._taken += 1
                yield record
            opened.completed()
        finally:
            opened.stream.close()

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
    stream = _Buffered(opened)
    number = 0
    while stream.has_more():
        try:
            stream.begin(number)
            yield cbor2.load(stream, max_depth=PART_DEPTH.value)  # type: ignore[arg-type]
        except cbor2.CBORDecodeEOF as error:
            raise _cut_off(opened, number) from error
        except cbor2.CBORDecodeError as error:
            if isinstance(error.__cause__, FormatError):
                raise error.__cause__ from None
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
    for chunk in _chunks(opened):
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
    # A long line arrives in many pieces, which are joined only once.
    pieces: list[bytes] = []
    number = length = 0
    for chunk in _chunks(opened):
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            whole = b"".join((*pieces, line))
            pieces, length = [], 0
            if whole.strip():
                yield _json(opened, number, whole)
            number += 1
        pieces.append(rest)
        length += len(rest)
        if length > DOCUMENT_BYTES.value:
            raise _too_large(opened, number)
    if (last := b"".join(pieces)).strip():
        yield _json(opened, number, last)


def _json(opened: ShardStream, number: int, line: bytes) -> Any:
    try:
        return decode_json(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{opened.url}: line {number + 1} is not JSON: {error}") from error


def _chunks(opened: ShardStream) -> Iterable[bytes]:
    if opened.head:
        yield opened.head
    while chunk := opened.stream.read(_CHUNK_BYTES):
        yield chunk


class _Buffered(io.RawIOBase):
    """A stream that knows whether it has ended, and returns exactly as many bytes as requested."""

    def __init__(self, opened: ShardStream) -> None:
        self._opened = opened
        self._chunks = iter(_chunks(opened))
        self._buffer = b""
        self._at = 0
        self._number = self._taken = 0

    def begin(self, number: int) -> None:
        """Begin with the next value, which may have up to `DOCUMENT_BYTES`."""
        self._number, self._taken = number, 0

    def readable(self) -> bool:
        return True

    def has_more(self) -> bool:
        while self._at >= len(self._buffer):
            self._buffer, self._at = next(self._chunks, b""), 0
            if not self._buffer:
                return False
        return True

    def read(self, size: int = -1) -> bytes:
        parts = []
        while size and self.has_more():
            part = self._buffer[self._at : self._at + size]
            self._at += len(part)
            size -= len(part)
            parts.append(part)
            self._taken += len(part)
            if self._taken > DOCUMENT_BYTES.value:
                raise _too_large(self._opened, self._number)
        return b"".join(parts)


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
