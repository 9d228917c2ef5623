"""A prepared dataset as a tree of files: its samples by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from energon.sources.browse.samples import BrowsedSamples, SamplePlace
from energon.sources.browse.tree import (
    MARK,
    BrowsedFile,
    BrowsedFolder,
    TreeEntry,
    escape_name,
    mark_name,
    unescape_name,
)

BrowsedEntry = BrowsedFolder | BrowsedFile


@dataclass(frozen=True)
class _KeyFolder(ABC):
    """A folder of samples whose keys begin alike; names of entries say what they stand for."""

    samples: BrowsedSamples

    @abstractmethod
    def _children(self) -> Iterator[tuple[str, BrowsedEntry]]: ...

    @abstractmethod
    def _find(self, raw: str) -> BrowsedEntry | None: ...

    def entries(self) -> Iterator[TreeEntry]:
        """Yield files and folders."""
        return (
            TreeEntry(name, not isinstance(found, BrowsedFile)) for name, found in self._children()
        )

    def find(self, name: str) -> BrowsedEntry | None:
        """Return a file or folder by name."""
        raw = unescape_name(name)
        if raw is not None:
            return self._find(raw)
        if MARK not in name:
            return None
        return next((found for own, found in self._children() if own == name), None)


@dataclass(frozen=True)
class FlatFolder(_KeyFolder):
    """The samples whose keys begin with `prefix`, as files `KEY.PART`."""

    prefix: str = ""

    def _find(self, raw: str) -> BrowsedEntry | None:
        folder = f"{self.prefix}{raw}/"
        if self.samples.is_nested and any(True for _ in self.samples.below(folder)):
            return FlatFolder(self.samples, folder)
        key, dot, part = raw.partition(".")
        place = self.samples.find(self.prefix + key) if dot and key else None
        return None if place is None else self.samples.parts(place).get(part)

    def _children(self) -> Iterator[tuple[str, BrowsedEntry]]:
        folders = _folders(self.samples, self.prefix)
        for name in folders:
            yield escape_name(name), FlatFolder(self.samples, f"{self.prefix}{name}/")
        for name, place in self.samples.below(self.prefix):
            if place is None:
                continue
            mark = _mark(self.samples, place)
            for part, file in self.samples.parts(place).items():
                own = f"{name}.{part}"
                yield _named(own, mark or ("file" if own in folders else None)), file


@dataclass(frozen=True)
class SampleFolder(_KeyFolder):
    """The samples whose keys begin with `prefix`, as folders `KEY` with files `PART`."""

    prefix: str | None = ""
    """None for a sample alone, without those whose keys lie below its own."""
    place: SamplePlace | None = None
    """The sample whose parts are in this folder, if there is one."""

    def _find(self, raw: str) -> BrowsedEntry | None:
        inner = self._inner(raw)
        if inner is not None:
            return inner
        return None if self.place is None else self.samples.parts(self.place).get(raw)

    def _inner(self, name: str) -> SampleFolder | None:
        """Return the folder of a sample, of those below it, or of both."""
        nested = self.samples.is_nested
        if self.prefix is None or (self.prefix and not nested):
            return None
        key = self.prefix + name
        place = self.samples.find(key)
        if place is None and not (nested and any(True for _ in self.samples.below(f"{key}/"))):
            return None
        return SampleFolder(self.samples, f"{key}/", place)

    def _children(self) -> Iterator[tuple[str, BrowsedEntry]]:
        parts = {} if self.place is None else self.samples.parts(self.place)
        taken = set()
        if self.prefix is not None and (self.samples.is_nested or not self.prefix):
            folders = _folders(self.samples, self.prefix)
            for name in folders:
                key = self.prefix + name
                place = self.samples.find(key)
                yield escape_name(name), SampleFolder(self.samples, f"{key}/", place)
            for name, place in self.samples.below(self.prefix):
                if place is None:
                    continue
                mark = _mark(self.samples, place)
                taken |= {name} & parts.keys()
                if mark is not None:
                    yield _named(name, mark), SampleFolder(self.samples, None, place)
                elif name not in folders:
                    inner = SampleFolder(self.samples, f"{self.prefix}{name}/", place)
                    yield escape_name(name), inner
            taken |= folders.keys() & parts.keys()
        for part, file in parts.items():
            yield _named(part, "file" if part in taken else None), file


def _folders(samples: BrowsedSamples, prefix: str) -> dict[str, None]:
    """Return the names of folders of keys below the beginning of one, each once."""
    if not samples.is_nested:
        return {}
    return dict.fromkeys(name for name, place in samples.below(prefix) if place is None)


def _mark(samples: BrowsedSamples, place: SamplePlace) -> str | None:
    """Return what tells a sample from those before it that have the same key."""
    count = samples.repeated.get(place)
    return None if count is None else str(count + 1)


def _named(name: str, mark: str | None) -> str:
    escaped = escape_name(name)
    return escaped if mark is None else mark_name(escaped, mark)
