"""Look up media metadata by file name."""

from __future__ import annotations

from threading import Lock

from energon.errors import ConfigError, NoSuchFileError
from energon.formats.meta.info import META
from energon.formats.meta.media import MediaMetadata
from energon.formats.tables.media_table import MediaTable
from energon.io.epath import AnyPath
from energon.sources.files.locate import local_copy


class MediaLookup:
    """The media metadata of a dataset or folder, opened with the first question.

    May be used by many threads, and pickled.

    Args:
        folder: The dataset or folder.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.folder = folder
        self._table: MediaTable | None = None
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[MediaLookup], tuple[AnyPath]]:
        return MediaLookup, (self.folder,)

    def get(self, name: str) -> MediaMetadata:
        """Return the metadata of a file.

        Raises:
            ConfigError: If there are no media metadata at all.
            NoSuchFileError: If there are none of this file.
        """
        if self._table is None:
            with self._lock:
                self._table = self._table or self._open()
        found = self._table.get(name)
        if found is None:
            raise NoSuchFileError(
                f"{self.folder} has no media metadata of {name!r}: there is no such file, or it "
                "was no media file, or damaged, when `energon prepare-media` looked at it"
            )
        return found

    def _open(self) -> MediaTable:
        index = self.folder / META / "index.sqlite"
        if not index.is_file():
            raise ConfigError(
                f"{self.folder} has no media metadata; run `energon prepare-media {self.folder} "
                "--media-metadata-by-extension`"
            )
        return MediaTable(local_copy(index))
