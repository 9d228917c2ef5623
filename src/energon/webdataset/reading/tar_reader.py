"""Read samples out of a stream of tar bytes, block by block."""

from __future__ import annotations

import io
import logging
import os
from typing import Protocol

from energon.webdataset.tar_parser import Sample, TarParser

WINDOW_BYTES = 1 << 20
MAX_READ_BYTES = 64 << 20
"""What is asked for at a time: memory is taken for content that is there, whatever a damaged
header says of its size."""

logger = logging.getLogger("energon")


class ByteStream(Protocol):
    """What samples are read from: any raw or buffered binary file will do."""

    def read(self, size: int, /) -> bytes | None:
        """Return up to `size` bytes; none at the end only."""

    def close(self) -> None:
        """Give back what is held."""


class TarReader:
    """The samples of a stream, in blocks of those that were read together.

    Args:
        stream: At the beginning of what `parser` expects next.
        parser: Knows the format.
        head: What has been read from `stream` already.
        reads_all: Whether to read what the parser does not want, too, to see that it is there.
    """

    def __init__(
        self, stream: ByteStream, parser: TarParser, *, head: bytes = b"", reads_all: bool = False
    ) -> None:
        self.block_position = parser.position
        """Where in the archive the block begins that was returned last."""
        self._stream = stream
        self._reads_all = reads_all
        self._parser = parser
        self._rest = head
        self._end = parser.position + len(head)
        self._next_position = parser.position
        self._finished = False

    def next_block(self) -> list[Sample] | None:
        """Return some samples in order, or None after the last.

        The samples before the end marker are given out when the stream has proven to be whole.

        Raises:
            TruncatedError: If the archive is cut off.
            FormatError: If it is damaged.
        """
        parser = self._parser
        while not self._finished:
            self._finished = not self._advance()
            if parser.samples and not parser.ended:
                break
        if not parser.samples:
            return None
        self.block_position, self._next_position = self._next_position, parser.sample_position
        samples, parser.samples = parser.samples, []
        return samples

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    def _advance(self) -> bool:
        """Give the parser what it wants next; return False after the end."""
        parser = self._parser
        if parser.content_bytes:
            wanted = parser.content_bytes
            content = self._read_content(wanted)
            if len(content) == wanted:
                parser.put_content(content)
                return True
        elif self._fill(max(parser.wanted_bytes, WINDOW_BYTES), at_least=parser.wanted_bytes):
            window = self._rest
            before = parser.position
            parser.feed(window)
            self._rest = window[parser.position - before :]
            return True
        parser.finish(self._end)
        if parser.num_passed_over:
            logger.warning(
                "%s: left out %d links, devices or sparse files, which are no parts of samples",
                parser.origin,
                parser.num_passed_over,
            )
        return False

    def _fill(self, size: int, *, at_least: int) -> bool:
        """Make the rest a window; return whether it has the bytes that are needed."""
        self._skip()
        rest = self._rest
        while len(rest) < at_least:
            more = self._stream.read(size - len(rest))
            if not more:
                break
            self._end += len(more)
            rest = rest + more if rest else more
        self._rest = rest
        return len(rest) >= at_least

    def _skip(self) -> None:
        """Pass over bytes that the parser does not want."""
        missing = self._parser.position - (self._end - len(self._rest))
        if missing and self._rest:
            dropped = min(missing, len(self._rest))
            self._rest = self._rest[dropped:]
            missing -= dropped
        stream = self._stream
        jumps = missing > WINDOW_BYTES and not self._reads_all
        if jumps and isinstance(stream, io.IOBase) and stream.seekable():
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
        """Return the next `size` bytes; fewer at the end only."""
        chunks = [self._rest[:size]]
        self._rest = self._rest[size:]
        missing = size - len(chunks[0])
        while missing:
            chunk = self._stream.read(min(missing, MAX_READ_BYTES))
            if not chunk:
                break
            self._end += len(chunk)
            missing -= len(chunk)
            chunks.append(chunk)
        return b"".join(chunks)
