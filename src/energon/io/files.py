"""Whole files at an address, and the store that an address belongs to.

Stores are created on first use and kept for the life of the process, with their connections; a
forked child creates its own.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from glob import has_magic
from importlib import import_module

from energon.errors import ConfigError, DatasetNotFoundError
from energon.io.address import (
    Address,
    address_name,
    is_remote,
    local_path,
    parent_address,
    redact,
    scheme_of,
    split_address,
)
from energon.io.backends.base import Backend, ObjectInfo
from energon.io.backends.local import LocalBackend, PathPattern, object_info, walk_files
from energon.io.settings import StorageSettings, goes_to_aistore
from energon.io.store import Store
from energon.io.threads import fork_safe_lock
from energon.limits import DOCUMENT_BYTES, check_document
from energon.local_file import decode_utf8
from energon.messages import list_names, nearest

_MAKERS: Mapping[str, str] = {
    "s3": "backends.object_stores:s3",
    "s3a": "backends.object_stores:s3",
    "gs": "backends.object_stores:gcs",
    "gcs": "backends.object_stores:gcs",
    "az": "backends.object_stores:azure",
    "abfs": "backends.object_stores:azure",
    "abfss": "backends.object_stores:azure",
    "http": "backends.object_stores:web",
    "https": "backends.object_stores:web",
    "hf": "backends.object_stores:HuggingFaceHub",
    "ais": "backends.object_stores:AIStore",
    "msc": "backends.libraries:msc_backend",
    "rclone": "backends.libraries:msc_backend",
}
"""What makes the backend of each scheme, a function or class, as `module:name`."""

_FSSPEC = "backends.libraries:fsspec_backend"

_COUNTED = (
    "requests",
    "bytes_read",
    "retries",
    "stalls",
    "hedged",
    "changed",
    "failed",
    "cache_hits",
    "cache_misses",
    "cache_failed",
)

_stores: dict[str, Store] = {}
_taken: Counter[str] = Counter()
_lock = fork_safe_lock()


def open_store(address: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return the store of an address, and the key of the address in it.

    Raises:
        ConfigError: If the scheme is unknown.
        MissingExtraError: If a package is missing.
    """
    text = os.fspath(address)
    scheme = scheme_of(text)
    if scheme in ("", "file"):
        return _store("file:///", lambda: LocalBackend("/")), os.path.abspath(local_path(text))
    if scheme == "pipe":
        raise ConfigError("pipe: can be streamed only, by `energon.webdataset`; it is not a store")
    parts = split_address(text)
    return _store(parts.root, lambda: _make_fork_safe(parts.root)), parts.key


def all_statistics() -> dict[str, dict[str, float]]:
    """Return the statistics of every store that this process has used, by its root."""
    return {store.origin: store.statistics.snapshot() for store in _stores.values()}


def take_counts() -> dict[str, int]:
    """Return the counts since the last call, for statistics.

    `storage requests` is the number of requests to all stores together, and
    `storage s3://bucket requests` that to one.
    """
    global _taken
    totals: Counter[str] = Counter()
    for origin, counts in all_statistics().items():
        for name, count in counts.items():
            if name in _COUNTED:
                totals[f"storage {name}"] += int(count)
            if name in _COUNTED or name.startswith("error"):
                totals[f"storage {origin} {name}"] += int(count)
    with _lock:
        news = totals - _taken
        _taken = totals
    return dict(news)


def _store(root: str, make: Callable[[], Backend]) -> Store:
    with _lock:
        if root not in _stores:
            _stores[root] = Store(make(), StorageSettings.from_environment())
        return _stores[root]


def make_backend(root: str) -> Backend:
    """Return the backend of a root that makes requests in this process."""
    module, _, name = _maker_of(root).partition(":")
    make: Callable[[Address], Backend] = getattr(import_module(f"energon.io.{module}"), name)
    return make(split_address(root))


def _make_fork_safe(root: str) -> Backend:
    backend = make_backend(root)
    if _maker_of(root) == _FSSPEC:
        # Its file systems know what a fork is, and may be in the memory of this process.
        return backend
    # Here, so that programs that read local files start without it.
    from energon.io.backends.reader_process import ForkSafeBackend

    return ForkSafeBackend(root, backend)


def _maker_of(root: str) -> str:
    """Return the function that makes the backend of an address, as in `_MAKERS`."""
    scheme = scheme_of(root)
    return _MAKERS.get("ais" if goes_to_aistore(scheme) else scheme, _FSSPEC)


def forget_stores() -> None:
    """Forget all stores; the next use creates them from the environment of that time."""
    with _lock:
        _stores.clear()
        _taken.clear()


_inherited: list[dict[str, Store]] = []
"""Stores of the processes that this one was forked from. Releasing them could wait for locks that
threads of native libraries held, and these threads do not survive a fork."""


def _reset_after_fork() -> None:
    """Begin without stores: threads and connections do not survive a fork."""
    global _stores
    _inherited.append(_stores)
    _stores = {}
    _taken.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


LocalPath = str | os.PathLike[str]


def read_bytes(address: LocalPath) -> bytes:
    """Return a whole file.

    Raises:
        DatasetNotFoundError: If there is none (also a FileNotFoundError).
        StorageError: If it cannot be read.
    """
    store, key = open_store(address)
    return store.read(key)


def read_document(address: LocalPath) -> bytes:
    """Return a whole YAML or JSON document, reading no more than documents may have.

    Raises:
        FormatError: If it has more than `DOCUMENT_BYTES`.
        DatasetNotFoundError: If there is none (also a FileNotFoundError).
        StorageError: If it cannot be read.
    """
    store, key = open_store(address)
    most = DOCUMENT_BYTES.value
    content = store.read(key, most=most)
    check_document(len(content), redact(os.fspath(address)))
    return content


def read_text(address: LocalPath) -> str:
    """Return a whole file of UTF-8.

    Raises:
        DatasetNotFoundError: If there is none (also a FileNotFoundError).
        FormatError: If it is of another encoding.
        StorageError: If it cannot be read.
    """
    return decode_utf8(read_bytes(address), origin=redact(os.fspath(address)))


def write_bytes(address: LocalPath, content: bytes | os.PathLike[str]) -> None:
    """Write a file atomically: until it is complete, readers see the old one or none.

    Args:
        address: Where to write.
        content: Bytes, or the path of a local file to copy.
    """
    store, key = open_store(address)
    store.write(key, content)


def write_text(address: LocalPath, content: str) -> None:
    """Write a file of UTF-8, see `write_bytes`."""
    write_bytes(address, content.encode())


def file_info(address: LocalPath) -> ObjectInfo | None:
    """Return size and version of a file, or None if there is none."""
    try:
        return _existing(address)
    except DatasetNotFoundError:
        return None


def file_size(address: LocalPath) -> int:
    """Return the size of a file in bytes.

    Raises:
        DatasetNotFoundError: If there is none.
    """
    return _existing(address).size


def file_infos(addresses: Sequence[LocalPath]) -> list[ObjectInfo]:
    """Return sizes and versions of some files, requested in parallel.

    Raises:
        DatasetNotFoundError: If one is missing.
    """
    if not any(is_remote(address) for address in addresses):
        return [_existing(address) for address in addresses]
    store, _ = open_store(addresses[0])
    return store.together(_existing, [(address,) for address in addresses])


def _existing(address: LocalPath) -> ObjectInfo:
    store, key = open_store(address)
    return store.info(key)


def is_file(address: LocalPath) -> bool:
    """Return whether there is a file."""
    if not is_remote(address):
        return os.path.isfile(local_path(address))
    return file_info(address) is not None


def list_files(address: LocalPath) -> list[ObjectInfo]:
    """Return all files below a folder, sorted, with keys relative to it; none if it is missing.

    Raises:
        StorageError: If the place does not support listing, as web servers do not.
    """
    store, key = open_store(address)
    cut = len(key) + 1 if key else 0
    return [info._replace(key=info.key[cut:]) for info in store.list(key)]


def is_pattern(address: str) -> bool:
    """Return whether an address is a pattern for files, and not the name of one."""
    if is_remote(address):
        return "*" in address or "[" in address  # a question mark begins a query
    return has_magic(address) and not os.path.exists(local_path(address))


def match_files(pattern: str) -> tuple[str, list[ObjectInfo]]:
    """Return the folder that a pattern begins with, and the files that match.

    Args:
        pattern: An address with `*`, `?`, `[…]` or `**`, see `PathPattern`.

    Returns:
        The folder, and the files sorted by their keys, which are relative to it; each occurs once.

    Raises:
        StorageError: If the place does not support listing, as web servers do not.
    """
    folder, names = pattern, ""
    while is_pattern(folder):
        names = f"{address_name(folder)}/{names}".rstrip("/")
        folder = parent_address(folder)
    if is_remote(pattern):
        fits = PathPattern(names).matches
        return folder, [info for info in list_files(folder) if fits(info.key)]
    top = local_path(folder) or "."
    if not os.path.isdir(top):
        return folder, []
    infos = []
    for path, entry in walk_files(top, names):
        try:
            infos.append(object_info(path, entry.stat()))
        except FileNotFoundError as error:
            raise DatasetNotFoundError(f"{os.path.join(top, path)}: no such file") from error
    return folder, sorted(infos)


def has_files(address: LocalPath) -> bool:
    """Return whether there is a file below a folder, at any depth."""
    store, key = open_store(address)
    return store.has_any(key)


def describe_missing(address: LocalPath) -> str:
    """Return a description of a missing object in a store that can list, with similar names.

    Raises:
        DatasetNotFoundError: If not even the bucket exists.
        StorageError: If the store cannot be reached, or cannot list.
    """
    store, key = open_store(address)
    if not key and not store.has_any():
        return f"{redact(os.fspath(address))} is empty"
    folder, _, name = key.rpartition("/")
    while folder and not store.has_any(folder):
        folder, _, name = folder.rpartition("/")
    names, parent = store.names_in(folder), store.place(folder).rstrip("/")
    close = nearest(name, names, cutoff=0.75)
    there = f"which has {list_names(names)}" if names else "which is empty"
    end = f"did you mean {close!r}?" if close else there
    return f"{redact(os.fspath(address))} does not exist: no {name!r} in {parent}, {end}"


def delete_file(address: LocalPath) -> None:
    """Delete a file, if it exists."""
    store, key = open_store(address)
    store.delete(key)
