"""Open audio and video in memory with PyAV, and decode parts of samples with it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from energon.errors import ConfigError, DecodeError, EnergonError, needs_extra
from energon.formats.media import (
    Piece,
    count_claimed_packets,
    count_missing_bytes,
    read_headers,
)
from energon.limits import IMAGE_PIXELS, MEDIA_PACKETS, check_limit

if TYPE_CHECKING:
    from fractions import Fraction

    from av.container import InputContainer
    from av.stream import Stream

MediaStream = IO[bytes]

TICKS_PER_SECOND = 1_000_000
"""The unit of the time stamps of containers, and of streams that do not say."""


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


def open_container(stream: MediaStream) -> InputContainer:
    """Return the container in `stream`, which is rewound first.

    Raises:
        DecodeError: If it is not a container.
        MissingExtraError: If PyAV is not installed.
    """
    av = import_av()
    stream.seek(0)
    # A playlist may name files of this machine, and servers; nothing of it is opened.
    options = {"protocol_whitelist": "none", **codec_options()}
    with decoding():
        # Metadata may have any encoding, and is not used.
        container: InputContainer = av.open(stream, "r", metadata_errors="ignore", options=options)
    return container


def codec_options() -> dict[str, str]:
    """Return the options that keep codecs from allocating frames that are too large.

    Codecs round sizes up, so the limit is not exact.
    """
    return {"max_pixels": str(2 * IMAGE_PIXELS.value)}


@contextmanager
def decoding() -> Iterator[None]:
    """Turn any failure on damaged or oversized audio or video into a DecodeError.

    FFmpeg and PyAV raise errors of many kinds, and their attributes may be None or 0.
    """
    try:
        yield
    except (EnergonError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, import_av().error.FFmpegError):
            # The stream could not be read, which is not the fault of its content.
            raise
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        raise DecodeError(f"not a complete audio or video file: {kind}{error}") from error


def as_stream(data: MediaStream | bytes) -> MediaStream:
    """Return a stream over `data`, which is not copied."""
    if isinstance(data, bytes | bytearray | memoryview):
        return io.BytesIO(data)
    if not hasattr(data, "seek"):
        raise DecodeError(
            f"{data!r:.100}: expected the bytes of an audio or video file, or the file, opened "
            'with open(path, "rb")'
        )
    return data


class StreamView:
    """A stream with its own position over a shared stream.

    Args:
        stream: The shared stream.
        pieces: Known pieces of it, which are not read again.
    """

    def __init__(self, stream: IO[bytes], pieces: Sequence[Piece] = ()) -> None:
        self._stream = stream
        self._pieces = pieces
        self._offset = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; maybe fewer than there are."""
        for start, content in self._pieces if size > 0 else ():
            if start <= self._offset < start + len(content):
                data = content[self._offset - start :][:size]
                self._offset += len(data)
                return data
        self._stream.seek(self._offset)
        data = self._stream.read(size)
        self._offset += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position and return it."""
        if whence == 1:
            offset, whence = self._offset + offset, 0
        self._offset = self._stream.seek(offset, whence)
        return self._offset

    def tell(self) -> int:
        """Return the position."""
        return self._offset


def check_claims(stream: IO[bytes]) -> list[Piece]:
    """Raise DecodeError if a file claims too many packets; call it before opening.

    Decoders build an index of all claimed packets, whether they exist or not.

    Returns:
        The pieces read of a file that is not in memory, for `StreamView`.
    """
    with decoding():
        pieces = read_headers(stream)
        claimed = sum(count_claimed_packets(piece.content) for piece in pieces[1:])
    check_limit(claimed, MEDIA_PACKETS, f"the file claims to have {claimed} packets")
    return [] if isinstance(stream, io.BytesIO) else pieces


def check_size(stream: IO[bytes], *, after_header: bool = True) -> None:
    """Raise DecodeError if a file is shorter than it states, which decoders ignore.

    Args:
        stream: The file.
        after_header: See `count_missing_bytes`.
    """
    missing = count_missing_bytes(stream, after_header=after_header)
    if missing:
        size = stream.seek(0, os.SEEK_END)
        raise DecodeError(f"the file has {size} of {size + missing} bytes")


def tick_seconds(stream: Stream) -> Fraction:
    """Return the unit of the time stamps of a stream in seconds."""
    from fractions import Fraction

    return Fraction(stream.time_base or Fraction(1, TICKS_PER_SECOND))


def clock_start(container: InputContainer) -> Fraction:
    """Return the time stamp, in seconds, of the first frame or sample: where time begins.

    That of a segment cut out of a longer file is seldom 0.
    """
    from fractions import Fraction

    starts = [
        # The audio before 0 is not heard: it only starts the decoder.
        max(stream.start_time, 0 if stream.type == "audio" else stream.start_time)
        * tick_seconds(stream)
        for stream in (*container.streams.video[:1], *container.streams.audio[:1])
        if stream.start_time is not None
    ]
    return min(starts, default=Fraction(0))


def stated_stop(container: InputContainer, stream: Stream) -> Fraction | None:
    """Return the time stamp, in seconds, at which a stream ends; None if no header states it."""
    if stream.duration:
        return ((stream.start_time or 0) + stream.duration) * tick_seconds(stream)
    # FLV counts from the first packet in decoding order.
    if not container.duration or len(container.streams) > 1 or container.format.name == "flv":
        return None
    return container_stop(container)


def container_stop(container: InputContainer) -> Fraction:
    """Return the time stamp, in seconds, at which a file ends according to its header, or 0."""
    from fractions import Fraction

    duration = Fraction(container.duration or 0, TICKS_PER_SECOND)
    # Matroska states when the file ends, all others how long it lasts.
    return duration if is_matroska(container) else clock_start(container) + duration


def is_matroska(container: InputContainer) -> bool:
    """Return whether a file is a Matroska or WebM file."""
    return container.format.name == "matroska,webm"


AUDIO_EXTENSIONS = frozenset(
    {
        *("mp3", "wav", "flac", "m4a", "aac", "ogg", "oga", "opus"),
        *("aif", "aiff", "aifc"),
    }
)
AV_EXTENSIONS = AUDIO_EXTENSIONS | {
    *("mp4", "m4v", "mov", "mkv", "webm", "avi", "flv", "mpg", "mpeg", "3gp", "ogv"),
    *("ts", "mts", "m2ts"),
}

AV_SPECS = ("AVDecoder", "torch", "pyav")


def check_av_spec(name: str) -> None:
    """Raise ConfigError unless there is a specification of that name."""
    if name not in AV_SPECS:
        raise ConfigError(f"av_decode={name!r}: expected one of {', '.join(AV_SPECS)}")
