"""Handlers that decode fields by their extension: images, audio, video, and a program's own.

A decoding handler is a function of a key (a dot and the name of the field) and the data. It
returns None for fields it does not know, `Continue` to pass on other data under another key, and
otherwise the result. Handlers with a method `claims` are asked once per field name, instead of
being called for every field.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from energon.decode import images
from energon.decode.images import ImageSpec, decode_image, image_spec
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, DecodeError, needs_extra
from energon.io.address import redact

DecodingHandler = Callable[[str, Any], Any]

IMAGE_EXTENSIONS: list[str] = sorted(images.IMAGE_EXTENSIONS)
"""Extensions of images. Programs may change the list before they create handlers."""


class DecodingError(DecodeError):
    """A field cannot be decoded; the message names the field and the sample.

    Args:
        url: Address of the shard; alone, the whole message, as torch's DataLoader passes it when
            it raises a worker's error again.
        key: Key of the sample.
        k: Name of the field.
        sample: The sample as it was read.
        problem: What is wrong with the field.

    Example:
        >>> error = DecodingError(key="a", k="png")
        >>> error.key, error.k
        ('a', 'png')
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        k: str | None = None,
        sample: Any = None,
        *,
        problem: str = "cannot be decoded",
    ) -> None:
        where = f" of {redact(url)}" if url else ""
        described = f"field {k!r} of sample {key!r}{where} {problem}"
        super().__init__(url if url and key is None and k is None else described)
        self.url = url
        self.key = key
        self.k = k
        self.sample = sample
        self.problem = problem

    def __reduce__(self) -> Any:
        # Not the sample, which may be large: another process that catches this gets its key.
        return partial(DecodingError, self.url, self.key, self.k, problem=self.problem), ()


@dataclass(frozen=True)
class Continue:
    """Returned by a handler for later handlers to continue with.

    Example:
        >>> Continue("txt", b"unpacked")
        Continue(key='txt', data=b'unpacked')
    """

    key: str
    data: Any


@dataclass(frozen=True)
class ExtensionHandler:
    """Decodes fields with certain extensions, see `handle_extension`."""

    extensions: tuple[str, ...]
    f: Callable[[Any], Any]

    def claims(self, key: str) -> bool:
        """Return whether this handler decodes fields of this name."""
        found = key.lower().split(".")
        return any(found[-len(own) :] == own for own in map(_split, self.extensions))

    def compiled(self, key: str) -> Callable[[Any], Any]:
        """Return the function that decodes fields that it claims."""
        return self.f

    def __call__(self, key: str, data: Any) -> Any:
        return self.f(data) if self.claims(key) else None


def call_extension_handler(
    key: str, data: Any, f: Callable[[Any], Any], extensions: Collection[str]
) -> Any:
    """Return `f(data)` if the key ends in one of the extensions, else None."""
    return ExtensionHandler(tuple(extensions), f)(key, data)


def _split(extension: str) -> list[str]:
    return extension.split(".")


def handle_extension(extensions: str, f: Callable[[Any], Any]) -> ExtensionHandler:
    """Return a handler that decodes fields by their extension.

    Args:
        extensions: Extensions separated by spaces. "png" matches all fields that end in it,
            "seg.png" those that end in both, ".png" only fields of exactly that name.
        f: Decodes the bytes.

    Example:
        >>> handler = handle_extension("upper", lambda data: data.decode().upper())
        >>> handler("left.upper", b"text"), handler("txt", b"text")
        ('TEXT', None)
    """
    names = tuple(extensions.lower().split())
    if not names:
        raise ConfigError("handle_extension needs at least one extension")
    return ExtensionHandler(names, f)


@dataclass(frozen=True)
class ImageHandler:
    """Decodes images.

    Args:
        imagespec: The output format, see `energon.decode.images.IMAGE_SPECS`.
        extensions: Extensions of images; None for the usual ones.

    Example:
        >>> with open("photos/shard-0.tar", "rb") as stream:
        ...     png = stream.read()[512:]
        >>> ImageHandler("rgb8")("png", png).shape
        (24, 32, 3)
    """

    imagespec: str
    extensions: Collection[str] | None = None
    _spec: ImageSpec = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        chosen = IMAGE_EXTENSIONS if self.extensions is None else self.extensions
        object.__setattr__(self, "extensions", frozenset(chosen))
        object.__setattr__(self, "_spec", image_spec(self.imagespec))

    def claims(self, key: str) -> bool:
        """Return whether fields of this name are images."""
        return key.rpartition(".")[2].lower() in (self.extensions or ())

    def compiled(self, key: str) -> Callable[[bytes], Any]:
        """Return the function that decodes images."""
        return partial(decode_image, spec=self._spec)

    def __call__(self, key: str, data: bytes) -> Any:
        return decode_image(data, self._spec) if self.claims(key) else None


def imagehandler(imagespec: str, extensions: Collection[str] | None = None) -> ImageHandler:
    """Return a handler that decodes images, see `ImageHandler`.

    Example:
        >>> imagehandler("pil")("txt", b"no image")
    """
    return ImageHandler(imagespec, extensions)


class _GzFilter:
    """Decompresses fields that end in gz, for later handlers to continue with.

    Example:
        >>> import gzip
        >>> gzfilter("txt.gz", gzip.compress(b"text")).data
        b'text'
    """

    def claims(self, key: str) -> bool:
        """Return whether fields of this name are compressed."""
        return key.endswith(".gz")

    def __call__(self, key: str, data: bytes) -> Any:
        if not key.endswith(".gz"):
            return None
        return Continue(key[:-3], _GUNZIP.decode("part.gz", data))

    def __reduce__(self) -> str:
        return "gzfilter"


_GUNZIP = SampleDecoder("rgb")
gzfilter = _GzFilter()


VIDEO_EXTENSIONS = frozenset(
    {"mp4", "ogv", "mjpeg", "avi", "mov", "h264", "mpg", "webm", "wmv", "mkv"}
)
AUDIO_EXTENSIONS = frozenset({"flac", "mp3", "sox", "wav", "m4a", "ogg", "wma", "opus", "aac"})


class _MediaHandler:
    """Decodes fields with certain extensions."""

    name: str
    extensions: frozenset[str]

    def claims(self, key: str) -> bool:
        """Return whether fields of this name are decoded."""
        return key.rpartition(".")[2].lower() in self.extensions

    def __call__(self, key: str, data: bytes) -> Any:
        if not self.claims(key):
            return None
        from energon.decode.av_container import check_claims, decoding

        with decoding():
            check_claims(io.BytesIO(data))
            return self.decode(data)

    def decode(self, data: bytes) -> Any:
        """Return the decoded content of a file."""
        raise NotImplementedError

    def __reduce__(self) -> str:
        return self.name


class _VideoHandler(_MediaHandler):
    """Decodes videos to frames, audio, and a dict of `video_fps` and `audio_fps`.

    Frames are uint8 (time, height, width, 3), audio is float32 (channels, samples).

    Example:
        >>> with open("clip.mp4", "rb") as stream:
        ...     frames, sound, rates = torch_video("mp4", stream.read())
        >>> frames.shape, rates["video_fps"]
        (torch.Size([20, 24, 32, 3]), 10.0)
    """

    name = "torch_video"
    extensions = VIDEO_EXTENSIONS

    def decode(self, data: bytes) -> Any:
        with needs_extra("torch", "videos as tensors need torch"):
            import torch

        from energon.decode.av_video import VideoReader

        reader = VideoReader(io.BytesIO(data))
        try:
            frames = torch.from_numpy(np.stack(reader.all().frames))
            info: dict[str, Any] = {"video_fps": reader.frames_per_second}
        finally:
            reader.close()
        audio, rate = _audio(data)
        if audio is None:
            return frames, torch.empty((0, 0)), info
        return frames, torch.from_numpy(audio), {**info, "audio_fps": rate}


class _AudioHandler(_MediaHandler):
    """Decodes audio to a tensor (channels, samples) of float32 from -1 to 1, and its rate.

    With torchaudio if it is installed, as webdataset does, otherwise with PyAV.

    Example:
        >>> torch_audio("txt", b"no audio")
    """

    name = "torch_audio"
    extensions = AUDIO_EXTENSIONS

    def decode(self, data: bytes) -> Any:
        with needs_extra("torch", "audio as tensors needs torch"):
            import torch
        try:
            import torchaudio

            return torchaudio.load(io.BytesIO(data))
        except ImportError:
            pass  # torchaudio, or the TorchCodec that it decodes with, is not installed

        from energon.decode.av_audio import AudioReader

        reader = AudioReader(io.BytesIO(data))
        try:
            return torch.from_numpy(reader.all().copy()), reader.rate
        finally:
            reader.close()


def _audio(data: bytes) -> tuple[Any, int]:
    """Return the audio of a video, or None if it has none."""
    from energon.decode.av_audio import AudioReader

    try:
        reader = AudioReader(io.BytesIO(data))
    except DecodeError:
        return None, 0
    try:
        return reader.all().copy(), reader.rate
    finally:
        reader.close()


torch_video = _VideoHandler()
torch_audio = _AudioHandler()
