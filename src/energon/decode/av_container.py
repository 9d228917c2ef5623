"""Open audio and video in memory with PyAV, and decode parts of samples with it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from energon.errors import ConfigError, DecodeError, EnergonError, needs_extra
from energon.formats.media import Piece, count_claimed_packets, read_headers
from energon.limits import IMAGE_PIXELS, MEDIA_PACKETS, check_limit

if TYPE_CHECKING:
    from av.container import InputContainer


MediaStream = IO[bytes]


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
        self._place = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; maybe fewer than there are."""
        for start, content in self._pieces if size > 0 else ():
            if start <= self._place < start + len(content):
                data = content[self._place - start :][:size]
                self._place += len(data)
                return data
        self._stream.seek(self._place)
        data = self._stream.read(size)
        self._place += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position and return it."""
        if whence == 1:
            offset, whence = self._place + offset, 0
        self._place = self._stream.seek(offset, whence)
        return self._place

    def tell(self) -> int:
        """Return the position."""
        return self._place


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


def check_riff(stream: IO[bytes]) -> None:
    """Raise DecodeError if an AVI or WAV file is shorter than it claims; decoders ignore that."""
    stream.seek(0)
    head = stream.read(8)
    size = stream.seek(0, 2)
    # A file that is being streamed says 0 or 2^32 - 1.
    said = int.from_bytes(head[4:8], "little")
    if head[:4] == b"RIFF" and size < said + 8 < 1 << 32:
        raise DecodeError(f"the file has {size} of {said + 8} bytes")


AUDIO_EXTENSIONS = frozenset(
    {
        *("mp3", "wav", "flac", "m4a", "aac", "ogg", "oga", "opus"),
        *("aif", "aiff", "aifc"),
    }
)
AV_EXTENSIONS = AUDIO_EXTENSIONS | {
    *("mp4", "m4v", "mov", "mkv", "webm", "avi", "flv", "mpg", "mpeg", "3gp", "ogv"),
}

AV_SPECS = ("AVDecoder", "torch", "pyav")


def check_av_spec(name: str) -> None:
    """Raise ConfigError unless there is a specification of that name."""
    if name not in AV_SPECS:
        raise ConfigError(f"av_decode={name!r}: expected one of {', '.join(AV_SPECS)}")


def decode_av(data: bytes, spec: str, *, with_audio: bool) -> Any:
    """Return a file in the form that the specification names.

    Raises:
        DecodeError: If the form is "torch" or "pyav" and the file is damaged.
        MissingExtraError: If PyAV is not installed.
    """
    from energon.decode.av import AVDecoder

    if spec == "pyav":
        check_claims(io.BytesIO(data))
        return open_container(io.BytesIO(data))
    decoder = AVDecoder(io.BytesIO(data))
    return decoder if spec == "AVDecoder" else decoder.get_frames(with_audio)
