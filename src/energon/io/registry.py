"""From an address to the store that answers for it.

Stores are made when they are first needed and kept for the life of the process, with their
connections; a forked child makes its own.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from threading import Lock

from energon.errors import ConfigError
from energon.io.address import Address, local_path, scheme_of, split_address
from energon.io.backends.base import Backend
from energon.io.backends.local import LocalBackend
from energon.io.settings import StorageSettings
from energon.io.store import Store

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
    "hf": "backends.hugging_face:hugging_face",
    "ais": "backends.aistore:aistore",
    "msc": "profiles:profile",
    "rclone": "profiles:profile",
}
"""Where the maker of backends for a scheme is: file and function."""

_COUNTED = ("requests", "bytes_read", "retries", "stalls", "hedged", "changed", "failed")

_stores: dict[str, Store] = {}
_taken: Counter[str] = Counter()
_lock = Lock()


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
    return _store(parts.root, lambda: _make(parts)), parts.key


def all_statistics() -> dict[str, dict[str, float]]:
    """Return the statistics of every store that this process has used, by its root."""
    return {store.origin: store.statistics.snapshot() for store in _stores.values()}


def take_counts() -> dict[str, int]:
    """Return what was counted since the last call, for statistics.

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


def _make(parts: Address) -> Backend:
    # Whoever opens no store need not wait for what stores need.
    from energon.io.backends.aistore import goes_to_aistore

    scheme = "ais" if goes_to_aistore(parts.scheme) else parts.scheme
    where = _MAKERS.get(scheme, "backends.libraries:fsspec_backend")
    module, _, name = where.partition(":")
    make: Callable[[Address], Backend] = getattr(import_module(f"energon.io.{module}"), name)
    return make(parts)


def forget_stores() -> None:
    """Make stores again when they are next needed, with what the environment says then."""
    with _lock:
        _stores.clear()
        _taken.clear()


def _start_afresh() -> None:
    """Drop what belongs to the parent: threads and connections do not survive a fork."""
    global _lock
    _stores.clear()
    _taken.clear()
    _lock = Lock()


os.register_at_fork(after_in_child=_start_afresh)
