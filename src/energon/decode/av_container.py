"""Open audio and video files that are in memory, with PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from energon.errors import DecodeError
from energon.extra import needs_extra

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
    with needs_extra("av", "audio and video need PyAV"):
        import av
        import av.container
        import av.error
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


class StreamView:
    """A stream with a place of its own, over one that others read, too."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._place = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        self._stream.seek(self._place)
        data = self._stream.read(size)
        self._place += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place and return it."""
        if whence == 1:
            offset, whence = self._place + offset, 0
        self._place = self._stream.seek(offset, whence)
        return self._place

    def tell(self) -> int:
        """Return the place."""
        return self._place


def check_riff(stream: IO[bytes]) -> None:
    """Raise DecodeError if an AVI or WAV file is shorter than it says; decoders do not mind."""
    stream.seek(0)
    head = stream.read(8)
    size = stream.seek(0, 2)
    # A file that is being streamed says 0 or 2^32 - 1.
    said = int.from_bytes(head[4:8], "little")
    if head[:4] == b"RIFF" and size < said + 8 < 1 << 32:
        raise DecodeError(f"the file has {size} of {said + 8} bytes")
