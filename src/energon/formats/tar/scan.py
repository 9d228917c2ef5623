"""Scan shards: which samples they hold, and where the parts of these lie.

Only headers are looked at: small members are parsed out of large blocks, content of large ones
is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from energon.errors import TruncatedError
from energon.formats.tar.bulk import Run, parse_run
from energon.formats.tar.headers import BLOCK
from energon.formats.tar.parser import Member, TarParser
from energon.formats.tar.scan_builder import ScanBuilder, TarScan
from energon.formats.tar.window import JUMP_BYTES, ReadInto, TarWindow

MIN_RUN_BLOCKS = 64
"""Fewer blocks are parsed one by one."""
MIN_RUN_MEMBERS = 16
MAX_SINGLE_MEMBERS = 4096

ReadRange = Callable[[int, int], bytes]
"""`read(offset, size)` returns `size` bytes, or fewer at the end of the file."""


def scan_tar(path: str | os.PathLike[str], *, strict: bool = True) -> TarScan:
    """Return what a shard on local disk holds, in one pass over its headers.

    Args:
        path: The shard.
        strict: Whether an archive without an end marker is an error.

    Raises:
        TruncatedError: If the archive is cut off.
        FormatError: If it is no tar archive.
        FileNotFoundError: If it does not exist.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:

        def read_into(offset: int, buffer: memoryview) -> int:
            return os.preadv(descriptor, [buffer], offset)

        size = os.fstat(descriptor).st_size
        return scan_archive(read_into, size, origin=os.fspath(path), strict=strict)
    finally:
        os.close(descriptor)


def scan_archive(read_into: ReadInto, size: int, *, origin: str, strict: bool = True) -> TarScan:
    """Return what an archive holds that can be read at any offset, see `scan_tar`.

    Args:
        read_into: Fills a buffer with the bytes from an offset on, and returns how many.
        size: Bytes of the archive.
        origin: What messages call it.
        strict: Whether an archive without an end marker is an error.
    """
    walk = TarWalk(read_into, size, origin=origin)
    builder = ScanBuilder()
    singles = MIN_RUN_MEMBERS
    while True:
        found = walk.next_run()
        if found is not None:
            run, start = found
            builder.add_run(run, start)
            if len(run.size) >= MIN_RUN_MEMBERS:
                singles = MIN_RUN_MEMBERS
        # What stopped the run is taken alone. Where runs are short again and again, as with
        # a long name before each member, they are tried less and less often.
        for _ in range(singles):
            member = walk.next()
            if member is None:
                if strict:
                    walk.check_end()
                return builder.finish(size)
            builder.add_member(member)
        singles = min(2 * singles, MAX_SINGLE_MEMBERS)


def iter_members(
    read: ReadRange, size: int, *, origin: str, strict: bool = True
) -> Iterator[Member]:
    """Yield the regular files of an archive.

    Args:
        read: Gives bytes of the archive.
        size: Bytes of the archive.
        origin: What messages call it.
        strict: Whether an archive without an end marker is an error; it may have lost members.

    Raises:
        TruncatedError: If a member or a header is cut off, or the end marker is missing.
        FormatError: If there is something else where a header should be.
    """

    def read_into(offset: int, buffer: memoryview) -> int:
        data = read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    walk = TarWalk(read_into, size, origin=origin)
    while (member := walk.next()) is not None:
        yield member
    if strict:
        walk.check_end()


class TarWalk:
    """Goes through the headers of an archive that can be read at any offset.

    Args:
        read_into: Fills a buffer with the bytes from an offset on, and returns how many.
        size: Bytes of the archive.
        origin: What messages call it.
    """

    def __init__(self, read_into: ReadInto, size: int, *, origin: str) -> None:
        self.window = TarWindow(read_into, size)
        self.size = size
        self._parser = TarParser(origin)

    def next(self) -> Member | None:
        """Return the next regular file, or None at the end of the archive.

        Raises:
            TruncatedError: If a member or a header is cut off.
            FormatError: If there is something else where a header should be.
        """
        parser, window = self._parser, self.window
        while True:
            wanted, position = parser.wanted, parser.position
            data = window.block(position) if wanted == BLOCK else window.read(position, wanted)
            if len(data) < wanted:
                parser.finish(self.size)
                return None
            member = parser.take(data)
            if member is not None:
                self._check_content(member)
                return member

    def next_run(self) -> tuple[Run, int] | None:
        """Return the plain members that are in memory, and where they begin, if these are many."""
        parser = self._parser
        start = parser.position
        blocks = self.window.blocks(start)
        if len(blocks) < MIN_RUN_BLOCKS:
            return None
        run = parse_run(blocks, self.size - start)
        if run.stop:
            parser.position = start + run.stop
            parser.ended = False
        large = run.size[run.size >= JUMP_BYTES].sum()
        if 2 * large >= len(blocks) * BLOCK:
            self.window.expect_jumps()
        return run, start

    def check_end(self) -> None:
        """Check that the archive ends with its end marker, after `next` returned None.

        Raises:
            TruncatedError: If it does not.
        """
        self._parser.check_end(self.size)

    def _check_content(self, member: Member) -> None:
        parser = self._parser
        missing = member.offset + member.size - self.size
        if missing > 0:
            raise TruncatedError(
                f"{parser.origin}: {member.name!r} at byte {member.header_offset} has "
                f"{member.size} bytes, but the archive ends {missing} bytes too early; restore or "
                "write it again"
            )
        # What fills its last block may be missing where no end marker is asked for.
        parser.position = min(parser.position, self.size)
