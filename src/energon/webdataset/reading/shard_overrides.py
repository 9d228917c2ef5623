"""Files that users place in a cache folder, to be read instead of shards.

`DIR/shard.tar` overrides `s3://bucket/train/shard.tar`, and `DIR/train/shard.tar` does so where
several shards have the same name. A file that would override two shards is an error.

Files that the cache itself has stored have a record beside them, which tells them from overrides.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from energon.errors import ConfigError
from energon.io.address import redact, scheme_of
from energon.io.file_lock import FileLock

_RECORD = ".about.json"
_CLAIM_BYTES = 1 << 16


def record_path(path: Path) -> Path:
    """Return where the record of a file is, if the cache has stored it."""
    return path.with_name(f".{path.name}{_RECORD}")


def has_content(path: Path) -> bool:
    """Return whether a file exists and is not empty; shards never are."""
    try:
        about = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_size > 0


def is_override(path: Path) -> bool:
    """Return whether a file in the cache was placed there by a user."""
    is_ours = path.name.startswith(".") or record_path(path).exists()
    return not is_ours and has_content(path)


def find_override(folder: str, url: str) -> Path | None:
    """Return the file that overrides a shard, the most specific of several; None without one."""
    if scheme_of(url) in ("", "pipe"):
        return None
    parts = [part for part in _address(url).split("/") if part not in ("", ".", "..")]
    paths = (Path(folder, *parts[start:]) for start in range(1, len(parts)))
    return next(filter(is_override, paths), None)


def check_overrides(folder: str, urls: Iterable[str], *, is_stored: Callable[[str], bool]) -> None:
    """Check that no file overrides two of some shards.

    Args:
        folder: The folder of the cache.
        urls: The addresses of the shards.
        is_stored: Returns whether a shard has a file of its own in the cache.

    Raises:
        ConfigError: If one does.
    """
    names = _names_of_overrides(folder)
    users: dict[Path, str] = {}
    for url in urls if names else ():
        if _address(url).rpartition("/")[2] not in names or is_stored(url):
            continue
        path = find_override(folder, url)
        if path is not None and _address(users.setdefault(path, url)) != _address(url):
            raise _ambiguous(path, users[path], url)


def _names_of_overrides(folder: str) -> set[str]:
    found = set()
    for _, _, names in os.walk(folder):
        there = set(names)
        found |= {n for n in there if not n.startswith(".") and f".{n}{_RECORD}" not in there}
    return found


_claims: dict[Path, _Claim] = {}
"""The shard that is overridden by each file that this process has used."""
_claims_lock = threading.Lock()


class _Claim(NamedTuple):
    """The shard that a file is used for, by all running processes of this machine."""

    shard: str
    """A digest of its address, followed by the address for messages."""
    lock: FileLock | None
    """A lock that all of them share until they end; None if the folder is read-only."""


def claim(path: Path, url: str) -> None:
    """Use a file for a shard.

    Where no process knows the list of all shards, one worker may see one of two shards and another
    worker the other. The use of a file is therefore recorded next to it while a process uses it.

    Raises:
        ConfigError: If it is used for another shard.
    """
    address = _address(url)
    shard = f"{hashlib.blake2b(address.encode(), digest_size=12).hexdigest()} {redact(address)}"
    with _claims_lock:
        place = path.resolve()
        found = _claims.get(place)
        if found is None:
            found = _claims[place] = _claim_for_all(place, shard)
    if found.shard != shard:
        raise _ambiguous(path, found.shard.partition(" ")[2], url)


def _claim_for_all(path: Path, shard: str) -> _Claim:
    try:
        lock = FileLock(path.with_name(f".{path.name}.used"))
    except OSError:
        return _Claim(shard, None)
    try:
        if lock.hold(wait=False):
            # No process uses it now.
            os.ftruncate(lock.descriptor, 0)
            os.pwrite(lock.descriptor, shard.encode(), 0)
        # Another process may have come first between these locks: the record decides.
        lock.hold(shared=True)
        noted = os.pread(lock.descriptor, _CLAIM_BYTES, 0).decode("utf-8", "replace")
    except OSError:
        lock.close()
        return _Claim(shard, None)
    return _Claim(noted or shard, lock)


def _ambiguous(path: Path, *urls: str) -> ConfigError:
    first, second = (redact(_address(url)) for url in urls)
    return ConfigError(
        f"{path} would override two shards: {first} and {second}. Move it into a subfolder of the "
        "cache with the name of the folder that holds the intended shard"
    )


def _address(url: str) -> str:
    """Return an address without its query, which may contain signatures."""
    return url.partition("?")[0]
