"""Media metadata from programs: which files are media files, and storing what their headers say."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from energon.compat.megatron.worker import note_ignored
from energon.errors import ConfigError
from energon.formats.media import MediaMetadata
from energon.io.epath import EPath, any_path, open_file
from energon.prepare.engines import Engine
from energon.prepare.media.prepare import prepare_media, prepare_remote_media
from energon.prepare.media.probe import MediaFilter, probe_stream


class MediaFilterStrategy(StrEnum):
    """How media files are recognized."""

    EXTENSION = "EXTENSION"
    HEADER = "HEADER"
    GLOB = "GLOB"


@dataclass(frozen=True)
class MediaFilterConfig:
    """Which files are checked for media metadata.

    Args:
        strategy: How they are recognized.
        patterns: For GLOB: patterns for their names.
    """

    strategy: MediaFilterStrategy
    patterns: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, glob: str | None, header: bool, extension: bool) -> MediaFilterConfig:
        """Return the configuration for options of a command, one of which must be set."""
        if sum(map(bool, (glob, header, extension))) != 1:
            raise ValueError("exactly one of glob, header and extension has to be set")
        if glob:
            return cls(MediaFilterStrategy.GLOB, [each.strip() for each in glob.split(",")])
        return cls(MediaFilterStrategy.HEADER if header else MediaFilterStrategy.EXTENSION)

    def as_filter(self) -> MediaFilter:
        """Return the filter that `energon.prepare` takes."""
        return MediaFilter(self.strategy.value, ",".join(self.patterns) or None)

    def should_consider_all(self) -> bool:
        """Return whether every file must be read."""
        return self.strategy is MediaFilterStrategy.HEADER

    def should_consider_media(self, name: str) -> bool:
        """Return whether a file must be read, judging by its name."""
        return self.as_filter().may_match(name)

    def extract_metadata(
        self, source: bytes | bytearray | IO[bytes] | Path | EPath, filename: str | None = None
    ) -> MediaMetadata | None:
        """Return the metadata of a file, or None if it is not selected.

        Args:
            source: Its content, the open file, or its path.
            filename: Its name, unless `source` has it.

        Raises:
            ConfigError: If the name is missing.
            DecodeError: If the file is damaged.
        """
        if isinstance(source, Path | EPath):
            with open_file(source) as file:
                return self.extract_metadata(file, source.name)
        if filename is None:
            raise ConfigError("content without a name: pass filename= as well")
        stream = io.BytesIO(source) if isinstance(source, bytes | bytearray) else source
        return probe_stream(stream, filename, self.as_filter())


INDEX_PLACE = "indexes are written where they belong"


def prepare_filesystem_dataset(
    root_path: str | os.PathLike[str],
    media_filter: MediaFilter | MediaFilterConfig,
    *,
    progress: Any = None,
    workers: int = 16,
    index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
) -> int:
    """Store the metadata of the media files of a folder.

    Args:
        root_path: The folder, local or in an object store.
        media_filter: Selects the files.
        progress: Has no effect, as is logged once.
        workers: Number of processes that read files.
        index_sqlite_tmp_path: Has no effect, as is logged once.

    Returns:
        Number of files with metadata.
    """
    note_ignored("files are not counted in advance", progress=progress is not None)
    note_ignored(INDEX_PLACE, index_sqlite_tmp_path=index_sqlite_tmp_path is not None)
    return store_media_metadata(root_path, media_filter, workers)


def store_media_metadata(
    path: str | os.PathLike[str],
    chosen: MediaFilter | MediaFilterConfig,
    workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Store the metadata of the media files of a dataset or folder, local or in an object store.

    Args:
        path: The dataset or folder.
        chosen: Selects the files.
        workers: Number of processes that read shards or files.
        progress: Called with the number of finished shards (or files), and the total.

    Returns:
        Number of files with metadata.
    """
    folder = any_path(path)
    kept = chosen.as_filter() if isinstance(chosen, MediaFilterConfig) else chosen
    if isinstance(folder, EPath):
        report = prepare_remote_media(folder.url, kept, num_workers=workers, progress=progress)
    else:
        report = prepare_media(folder, kept, engine=Engine(num_workers=workers), progress=progress)
    return report.stored
