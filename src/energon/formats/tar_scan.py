"""Scan shards: which samples they hold, and where the parts of these lie."""

from __future__ import annotations

import os

from energon.formats.scan_builder import ScanBuilder, TarScan
from energon.formats.tar import TarWalk
from energon.formats.tar_bulk import parse_run
from energon.formats.tar_window import BLOCK, JUMP_BYTES, ReadInto

MIN_RUN_BLOCKS = 64
"""Fewer blocks are parsed one by one."""
MIN_RUN_MEMBERS = 16
MAX_SINGLE_MEMBERS = 4096


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
        if _take_run(walk, builder):
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


def _take_run(walk: TarWalk, builder: ScanBuilder) -> bool:
    """Add the plain members that are in memory; return whether these were many."""
    blocks = walk.window.blocks(walk.position)
    if len(blocks) < MIN_RUN_BLOCKS:
        return False
    run = parse_run(blocks, walk.size - walk.position)
    builder.add_run(run, walk.position)
    walk.position += run.stop
    large = run.size[run.size >= JUMP_BYTES].sum()
    if 2 * large >= len(blocks) * BLOCK:
        walk.window.expect_jumps()
    return len(run.size) >= MIN_RUN_MEMBERS
