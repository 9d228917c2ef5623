"""Prepare media metadata from programs, under former names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from energon.prepare.engines import Engine
from energon.prepare.media.prepare import prepare_media
from energon.prepare.media.probe import MediaFilter


class MediaFilterStrategy(StrEnum):
    """How media files are told from others."""

    EXTENSION = "EXTENSION"
    HEADER = "HEADER"
    GLOB = "GLOB"


@dataclass(frozen=True)
class MediaFilterConfig:
    """Which files are looked at for media metadata.

    Args:
        strategy: How they are told from others.
        patterns: For GLOB: patterns of their names.
    """

    strategy: MediaFilterStrategy
    patterns: Sequence[str] = ()

    @classmethod
    def parse(cls, glob: str | None, header: bool, extension: bool) -> MediaFilterConfig:
        """Return what options of a command say, of which one has to be set."""
        if (glob is not None) + header + extension != 1:
            raise ValueError("exactly one of glob, header and extension has to be set")
        if glob is not None:
            return cls(MediaFilterStrategy.GLOB, [each.strip() for each in glob.split(",")])
        return cls(MediaFilterStrategy.HEADER if header else MediaFilterStrategy.EXTENSION)

    def as_filter(self) -> MediaFilter:
        """Return the filter that `energon.prepare` takes."""
        return MediaFilter(self.strategy.value, ",".join(self.patterns) or None)

    def should_consider_all(self) -> bool:
        """Return whether every file has to be looked at."""
        return self.strategy is MediaFilterStrategy.HEADER

    def should_consider_media(self, name: str) -> bool:
        """Return whether a file has to be looked at, by its name."""
        return self.as_filter().may_match(name)


def as_filter(given: MediaFilter | MediaFilterConfig | None) -> MediaFilter | None:
    """Return the filter that `energon.prepare` takes."""
    return given.as_filter() if isinstance(given, MediaFilterConfig) else given


def prepare_filesystem_dataset(
    root_path: str | os.PathLike[str],
    media_filter: MediaFilter | MediaFilterConfig,
    *,
    progress: Any = None,
    workers: int = 16,
    index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
) -> int:
    """Note sizes and durations of the media files of a folder.

    Args:
        root_path: The folder.
        media_filter: Which files.
        progress: Has no effect.
        workers: Processes that read files.
        index_sqlite_tmp_path: Has no effect.

    Returns:
        Of how many files they are known.
    """
    chosen = as_filter(media_filter)
    assert chosen is not None
    return prepare_media(root_path, chosen, engine=Engine(num_workers=workers)).stored
