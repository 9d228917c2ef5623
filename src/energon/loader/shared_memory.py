"""Memory that two processes share and that has no name, so that it cannot be left behind."""

from __future__ import annotations

import mmap
import os
import tempfile


def create_shared(size: int) -> int:
    """Return a file descriptor of `size` bytes of zeroed memory.

    The memory lives as long as a process maps it or holds a descriptor of it; the system
    takes it back when the last one is gone, however it goes.
    """
    try:
        descriptor = os.memfd_create("energon")
    except (AttributeError, OSError):
        # Not Linux: a file that is unlinked before anything is in it.
        descriptor, path = tempfile.mkstemp(prefix="energon-")
        os.unlink(path)
    os.ftruncate(descriptor, size)
    return descriptor


def share_bytes(data: bytes) -> int:
    """Return a descriptor of shared memory that holds `data`."""
    descriptor = create_shared(len(data))
    if data:
        with mmap.mmap(descriptor, len(data)) as mapping:
            mapping[:] = data
    return descriptor


def read_shared(descriptor: int) -> bytes:
    """Return all that is in the shared memory and close the descriptor."""
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            return b""
        with mmap.mmap(descriptor, size) as mapping:
            return bytes(mapping)
    finally:
        os.close(descriptor)


def map_shared(descriptor: int) -> mmap.mmap:
    """Map all of the shared memory for reading and writing, and close the descriptor."""
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
