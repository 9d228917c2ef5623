"""Paths of files anywhere, as programs know them."""

from __future__ import annotations

from pathlib import Path

from energon.io import epath as core


class _AnyEPath(type):
    """Makes all paths of the core count as instances."""

    def __instancecheck__(cls, found: object) -> bool:
        return isinstance(found, core.EPath)


class EPath(core.EPath, metaclass=_AnyEPath):
    """The path of a file or folder on any store, see `energon.EPath`."""

    __slots__ = ()

    @property
    def display_name(self) -> str:
        """The last part of the path."""
        return self.name


NVDATASET_CACHE_DIR: EPath | Path | None = None
"""May be set by programs, and has no effect: docs/storage.md says where energon keeps files."""
