"""Write files that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary name to write to, and rename it to `path` at the end.

    The content is on disk before the name is. After an exception nothing is left behind.
    """
    target = Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a whole file: afterwards it has the new content, or after a crash maybe the old."""
    with atomic_path(path) as temporary:
        if isinstance(content, str):
            content = content.encode()
        temporary.write_bytes(content)
