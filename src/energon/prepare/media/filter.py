"""Which files are images, audio or video, and are looked at for media metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from energon.errors import ConfigError
from energon.formats.signature import guess_extension
from energon.formats.tables.media_table import Strategy

MediaKind = Literal["image", "av"]

IMAGES = frozenset(
    {
        *("bmp", "gif", "ico", "j2k", "jp2", "jpx", "jpeg", "jpg", "png", "tif", "tiff", "webp"),
        "avif",
    }
)
AV = frozenset(
    {
        *("aac", "avi", "flac", "flv", "m4a", "m4v", "mkv", "mov", "mp3", "mp4", "ogg", "opus"),
        *("wav", "webm"),
    }
)


@dataclass(frozen=True)
class MediaFilter:
    """How media files are told from others.

    Args:
        strategy: "EXTENSION" by their names, "HEADER" by their first bytes (and where these say
            nothing, by name), "GLOB" by patterns for their names.
        patterns: For "GLOB": patterns separated by commas, in which * stands for any text.

    Raises:
        ConfigError: If patterns are missing, or not wanted.
    """

    strategy: Strategy
    patterns: str | None = None

    def __post_init__(self) -> None:
        if (self.strategy == "GLOB") != bool(self.patterns):
            raise ConfigError(
                f"media filter {self.strategy} with patterns {self.patterns!r}: GLOB, and nothing "
                'else, needs patterns like "*.jpg,*.mp4"'
            )

    def may_match(self, name: str) -> bool:
        """Return whether a file has to be looked at, by its name alone."""
        if self.strategy == "GLOB":
            patterns = (self.patterns or "").split(",")
            return any(fnmatchcase(name, pattern.strip()) for pattern in patterns)
        return self.strategy == "HEADER" or _kind_of(_extension(name)) is not None

    def kind(self, name: str, head: Callable[[], bytes]) -> MediaKind | None:
        """Return what a file is; `head` reads its first bytes."""
        by_name = _kind_of(_extension(name))
        if self.strategy == "EXTENSION" or (self.strategy == "GLOB" and by_name is not None):
            return by_name
        return _kind_of(guess_extension(head())) or by_name


def _extension(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _kind_of(extension: str | None) -> MediaKind | None:
    if extension in IMAGES:
        return "image"
    return "av" if extension in AV else None
