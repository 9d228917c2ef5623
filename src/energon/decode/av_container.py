"""Open audio and video files that are in memory, with PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from energon.errors import DecodeError, MissingExtraError

if TYPE_CHECKING:
    from av.container import InputContainer

EXTENSIONS = frozenset(
    {
        *("mp4", "m4v", "mov", "mkv", "webm", "avi", "flv", "mpg", "mpeg", "3gp", "ogv"),
        *("mp3", "wav", "flac", "m4a", "aac", "ogg", "oga", "opus"),
    }
)

Stream = IO[bytes]


def import_av() -> Any:
    """Return PyAV.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        import av
        import av.container
        import av.error
    except ImportError as error:
        raise MissingExtraError("audio and video need PyAV; install energon-loader[av]") from error
    return av


def open_container(stream: Stream) -> InputContainer:
    """Return the container in `stream`, which begins there anew.

    Raises:
        DecodeError: If there is none.
        MissingExtraError: If PyAV is not installed.
    """
    av = import_av()
    stream.seek(0)
    with av_errors():
        # Metadata may be in any encoding, and is not looked at.
        container: InputContainer = av.open(stream, "r", metadata_errors="ignore")
    return container


@contextmanager
def av_errors() -> Iterator[None]:
    """Raise DecodeError where FFmpeg fails on the data."""
    av = import_av()
    try:
        yield
    except av.error.FFmpegError as error:
        raise DecodeError(f"no whole audio or video file: {error}") from error


def as_stream(data: Stream | bytes) -> Stream:
    """Return a stream over `data`, which is not copied."""
    return io.BytesIO(data) if isinstance(data, bytes | bytearray | memoryview) else data
