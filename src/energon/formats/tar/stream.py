"""Read the samples of tar archives that arrive as streams of bytes.

`StreamReader` reads windows of bytes, and `SampleParser` finds the samples in them.
"""

from __future__ import annotations

import io
import logging
import os
from typing import Any, Protocol, TypeGuard

from energon.errors import FormatError
from energon.formats.tar.parser import SampleParser

WINDOW_BYTES = 1 << 20
MAX_STREAM_WINDOW_BYTES = 2 << 20
"""Windows of local files have this size. Those of other streams grow to it, since there the first
sample would wait for so much. Measured on texts of 1 kB, two workers: 5 % more samples than with
half of it, and 1 % more than with twice as much, which fits no cache of a core."""
MAX_STREAM_READ_BYTES = 64 << 20
"""What is asked for at a time: memory is taken for content that exists, whatever a damaged
header says of its size."""

logger = logging.getLogger("energon")


class ByteStream(Protocol):
    """A source of samples: any raw or buffered binary file."""

    def read(self, size: int, /) -> bytes | None:
        """Return up to `size` bytes, and none only at the end."""

    def close(self) -> None:
        """Release the underlying resources."""


class StreamReader:
    """The samples of a stream, in blocks that were read together.

    Args:
        stream: At the beginning of what `parser` expects next.
        parser: Knows the format.
        head: What has been read from `stream` already.
        reads_all: Whether to read what the parser does not want, too, to see that it is there.
    """

    def __init__(
        self,
        stream: ByteStream,
        parser: SampleParser,
        *,
        head: bytes = b"",
        reads_all: bool = False,
    ) -> None:
        self.block_position = parser.position
        """Where in the archive the block begins that was returned last."""
        self._stream = stream
        self._reads_all = reads_all
        self._parser = parser
        self._rest = head
        self._window_bytes = MAX_STREAM_WINDOW_BYTES if _can_seek(stream) else WINDOW_BYTES
        self._end = parser.position + len(head)
        self._next_position = parser.position
        self._finished = False
        self._failure: FormatError | None = None

    def next_block(self) -> list[Any] | None:
        """Return some samples in order, as dicts or rows; None after the last.

        The samples before the end marker are yielded when the stream has proven to be whole, those
        before damage ahead of the error.

        Raises:
            TruncatedError: If the archive is truncated.
            FormatError: If it is damaged.
        """
        parser = self._parser
        while not self._finished and self._failure is None:
            try:
                self._finished = not self._advance()
            except FormatError as error:
                self._failure = error
            if parser.samples and parser.is_within_sample:
                break
        if self._failure is not None and not parser.samples:
            raise self._failure
        if not parser.samples:
            return None
        self.block_position, self._next_position = self._next_position, parser.sample_position
        samples, parser.samples = parser.samples, []
        return samples

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    def _advance(self) -> bool:
        """Feed the parser its next bytes; return False after the end."""
        parser = self._parser
        if parser.content_bytes:
            size = parser.content_bytes
            content = self._read_content(size)
            if len(content) == size:
                parser.put_content(content)
                return True
        elif self._fill(parser.needed_bytes):
            window = self._rest
            before = parser.position
            parser.feed(window)
            self._rest = window[parser.position - before :]
            return True
        parser.finish(self._end, self._rest)
        for warning in parser.warnings:
            logger.warning("%s", warning)
        return False

    def _fill(self, at_least: int) -> bool:
        """Refill the window; return whether it has the bytes that are needed."""
        self._skip()
        rest = self._rest
        while len(rest) < at_least:
            more = self._stream.read(max(at_least, self._window_bytes) - len(rest))
            if not more:
                break
            self._window_bytes = min(2 * self._window_bytes, MAX_STREAM_WINDOW_BYTES)
            self._end += len(more)
            rest = rest + more if rest else more
        self._rest = rest
        return len(rest) >= at_least

    def _skip(self) -> None:
        """Skip bytes that the parser does not need."""
        missing = self._parser.position - (self._end - len(self._rest))
        if missing and self._rest:
            dropped = min(missing, len(self._rest))
            self._rest = self._rest[dropped:]
            missing -= dropped
        stream = self._stream
        jumps = missing > WINDOW_BYTES and not self._reads_all
        if jumps and _can_seek(stream):
            here = stream.tell()
            there = min(here + missing, stream.seek(0, os.SEEK_END))
            self._end += stream.seek(there) - here
            return
        while missing > 0:
            passed = len(stream.read(min(missing, WINDOW_BYTES)) or b"")
            if not passed:
                return
            self._end += passed
            missing -= passed

    def _read_content(self, size: int) -> bytes:
        """Return the next `size` bytes, and fewer only at the end."""
        chunks = [self._rest[:size]]
        self._rest = self._rest[size:]
        missing = size - len(chunks[0])
        while missing:
            chunk = self._stream.read(min(missing, MAX_STREAM_READ_BYTES))
            if not chunk:
                break
            self._end += len(chunk)
            missing -= len(chunk)
            chunks.append(chunk)
        return b"".join(chunks)


def _can_seek(stream: ByteStream) -> TypeGuard[io.IOBase]:
    return isinstance(stream, io.IOBase) and stream.seekable()
