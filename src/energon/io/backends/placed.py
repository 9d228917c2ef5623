"""A backend whose objects lie somewhere else: below a folder of a bucket, or in many buckets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from energon.io.backends.base import Backend, ObjectInfo


class PlacedKey(NamedTuple):
    """Where a key really is."""

    backend: Backend
    key: str


class PlacedBackend:
    """Passes everything on to where `find` says.

    Args:
        origin: The root for messages.
        find: Returns the place of a key. Keys of one folder lie in one place.
    """

    can_range = True
    can_list = True

    def __init__(self, origin: str, find: Callable[[str], PlacedKey]) -> None:
        self.origin = origin
        self._find = find

    def get(self, key: str, start: int, stop: int, version: str | None) -> bytes:
        backend, inner = self._find(key)
        return backend.get(inner, start, stop, version)

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        backend, inner = self._find(key)
        return backend.stream(inner, start, version)

    def head(self, key: str) -> ObjectInfo:
        backend, inner = self._find(key)
        return backend.head(inner)._replace(key=key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        backend, inner = self._find(prefix)
        for found in backend.list(inner):
            below = found.key[len(inner) :].lstrip("/")
            yield found._replace(key=f"{prefix}/{below}" if prefix else below)

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        backend, inner = self._find(key)
        backend.put(inner, content)

    def delete(self, key: str) -> None:
        backend, inner = self._find(key)
        backend.delete(inner)


def below_folder(origin: str, backend: Backend, folder: str) -> PlacedBackend:
    """Return the objects of `backend` that lie below a folder."""
    folder = folder.strip("/")

    def find(key: str) -> PlacedKey:
        return PlacedKey(backend, "/".join(filter(None, (folder, key))))

    return PlacedBackend(origin, find)


def by_bucket(origin: str, open_bucket: Callable[[str], Backend]) -> PlacedBackend:
    """Return the objects of many buckets; the first part of a key names one."""
    opened: dict[str, Backend] = {}

    def find(key: str) -> PlacedKey:
        bucket, _, inner = key.partition("/")
        if bucket not in opened:
            opened[bucket] = open_bucket(bucket)
        return PlacedKey(opened[bucket], inner)

    return PlacedBackend(origin, find)
