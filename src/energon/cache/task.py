"""A file that is fetched to a cache, and how far it is."""

from __future__ import annotations

import threading
from enum import Enum
from typing import Any

from energon.cache.form import Content
from energon.samples.source_info import SourceInfo
from energon.sources.file_store import FileStore


class Step(Enum):
    """How far a file is on its way to the disk."""

    QUEUED = 0
    FETCHING = 1
    FETCHED = 2  # in memory, on its way to the disk
    KEPT = 3
    ABSENT = 4  # not in the cache: to be read from the store


class Task:
    """A file that is wanted, and how far it is."""

    __slots__ = ("content", "fetched", "key", "name", "source", "step", "store", "users")

    def __init__(self, store: FileStore[Any] | None, name: str, key: str) -> None:
        self.store = store
        self.name = name
        self.key = key
        self.step = Step.QUEUED
        self.content: Content | None = None
        self.source: SourceInfo | None = None
        self.fetched = threading.Event()
        self.users = 0
