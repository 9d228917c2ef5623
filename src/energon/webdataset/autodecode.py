"""Decode the fields of samples by their extensions, see `decoding_handlers`."""

from __future__ import annotations

import io
import os
import pickle
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from energon.decode import images
from energon.decode.images import IMAGE_SPECS, decode_image, image_spec
from energon.decode.sample_decoder import DECODERS, SampleDecoder
from energon.decode.values import decode_pth
from energon.errors import ConfigError, DecodeError, EnergonError, SecurityError, needs_extra
from energon.io.address import redact
from energon.limits import refusal
from energon.messages import bytes_in_words, describe_error
from energon.webdataset import security
from energon.webdataset.names import __getattr__ as __getattr__
from energon.webdataset.pipeline import DataPipeline
from energon.webdataset.stages.mapping import Apply
from energon.webdataset.utils import identity

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


class FieldHandler:
    """Decodes fields by their names. Subclasses define `function`."""

    def function(self, key: str) -> Callable[[Any], Any] | None:
        """Return the function that decodes the data of fields with this name, or None."""
        raise NotImplementedError

    def __call__(self, key: str, data: Any) -> Any:
        function = self.function(key)
        return None if function is None else function(data)


@dataclass(frozen=True)
class ExtensionHandler(FieldHandler):
    """Decodes fields with certain extensions, see `handle_extension`."""

    extensions: tuple[str, ...]
    f: Callable[[Any], Any]

    def function(self, key: str) -> Callable[[Any], Any] | None:
        parts = key.lower().split(".")
        endings = (extension.split(".") for extension in self.extensions)
        return self.f if any(parts[-len(own) :] == own for own in endings) else None


def call_extension_handler(
    key: str, data: Any, f: Callable[[Any], Any], extensions: Collection[str]
) -> Any:
    """Return `f(data)` if the key ends in one of the extensions, else None."""
    return ExtensionHandler(tuple(extensions), f)(key, data)


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
class ImageHandler(FieldHandler):
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
    _decode: Callable[[bytes], Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        chosen = IMAGE_EXTENSIONS if self.extensions is None else self.extensions
        object.__setattr__(self, "extensions", frozenset(chosen))
        object.__setattr__(self, "_decode", partial(decode_image, spec=image_spec(self.imagespec)))

    def function(self, key: str) -> Callable[[bytes], Any] | None:
        is_image = key.rpartition(".")[2].lower() in (self.extensions or ())
        return self._decode if is_image else None


def imagehandler(imagespec: str, extensions: Collection[str] | None = None) -> ImageHandler:
    """Return a handler that decodes images, see `ImageHandler`.

    Example:
        >>> imagehandler("pil")("txt", b"no image")
    """
    return ImageHandler(imagespec, extensions)


def gzfilter(key: str, data: bytes) -> Any:
    """Decompress a field that ends in gz, for later handlers to continue with.

    Example:
        >>> import gzip
        >>> gzfilter("txt.gz", gzip.compress(b"text")).data
        b'text'
    """
    return Continue(key[:-3], _GUNZIP.decode("part.gz", data)) if key.endswith(".gz") else None


_GUNZIP = SampleDecoder("rgb")


VIDEO_EXTENSIONS = frozenset(
    {"mp4", "ogv", "mjpeg", "avi", "mov", "h264", "mpg", "webm", "wmv", "mkv"}
)
AUDIO_EXTENSIONS = frozenset({"flac", "mp3", "sox", "wav", "m4a", "ogg", "wma", "opus", "aac"})


def torch_video(key: str, data: bytes) -> Any:
    """Decode a video to frames, audio, and a dict of `video_fps` and `audio_fps`.

    Frames are uint8 (time, height, width, 3), audio is float32 (channels, samples).

    Example:
        >>> with open("clip.mp4", "rb") as stream:
        ...     frames, sound, rates = torch_video("mp4", stream.read())
        >>> frames.shape, rates["video_fps"]
        (torch.Size([20, 24, 32, 3]), 10.0)
    """
    return _decode_media(key, data, VIDEO_EXTENSIONS, _decode_video)


def torch_audio(key: str, data: bytes) -> Any:
    """Decode audio to a tensor (channels, samples) of float32 from -1 to 1, and its rate.

    With torchaudio if it is installed, as webdataset does, otherwise with PyAV.

    Example:
        >>> torch_audio("txt", b"no audio")
    """
    return _decode_media(key, data, AUDIO_EXTENSIONS, _decode_audio)


def _decode_media(
    key: str, data: bytes, extensions: Collection[str], decode: Callable[[bytes], Any]
) -> Any:
    if key.rpartition(".")[2].lower() not in extensions:
        return None
    from energon.decode.av_container import check_claims, decoding

    with decoding():
        check_claims(io.BytesIO(data))
        return decode(data)


def _decode_video(data: bytes) -> Any:
    with needs_extra("torch", "videos as tensors need torch"):
        import torch

    from energon.decode.av import AVDecoder

    media = AVDecoder(data)
    clips: Any = media.get_video().video_clips
    frames = clips[0].permute(0, 2, 3, 1)
    info: dict[str, Any] = {"video_fps": media.get_video_fps()}
    try:
        rate = media.get_audio_samples_per_second()
    except DecodeError:
        return frames, torch.empty((0, 0)), info  # the video has no audio
    sounds: Any = media.get_audio().audio_clips
    return frames, sounds[0], {**info, "audio_fps": rate}


def _decode_audio(data: bytes) -> Any:
    with needs_extra("torch", "audio as tensors needs torch"):
        import torch  # noqa: F401 - needed by both
    try:
        import torchaudio

        return torchaudio.load(io.BytesIO(data))
    except ImportError:  # torchaudio, or the TorchCodec that it decodes with, is not installed
        from energon.decode.av import AVDecoder

        media = AVDecoder(data)
        sounds: Any = media.get_audio().audio_clips
        return sounds[0], media.get_audio_samples_per_second()


imagespecs: dict[str, tuple[str, str | None, str]] = {
    name: (
        spec.library,
        None if spec.library == "pil" else "float" if spec.floats else "uint8",
        spec.mode.lower(),
    )
    for name, spec in IMAGE_SPECS.items()
}
"""Names of image formats: library, type of the values, and channels."""

pytorch_weights_only = True
"""Whether only tensors are loaded from `.pth` fields; if False, this process unpickles them."""


def torch_loads(data: bytes, *, allow: Collection[str] = ()) -> Any:
    """Return the value that `torch.save` has written: tensors always, other objects if allowed.

    Raises:
        SecurityError: If it contains other objects, and "pickle" is not allowed.

    Example:
        >>> import io, torch
        >>> file = io.BytesIO()
        >>> torch.save(torch.arange(3), file)
        >>> torch_loads(file.getvalue())
        tensor([0, 1, 2])
    """
    return _load_torch(data, security.resolve(allow))


def _load_torch(data: bytes, allowed: Collection[str]) -> Any:
    """Load a file of torch with permissions resolved earlier; see `security.resolve`."""
    security.check_lock("torch", allowed)
    trusted = "pickle" in allowed or not pytorch_weights_only
    if trusted and os.environ.get("WDS_PYTORCH_WEIGHTS_ONLY", "0") != "1":
        return decode_pth(data, trusted=True)
    try:
        return decode_pth(data, trusted=False)
    except pickle.UnpicklingError as error:
        raise refusal(
            "pickle",
            "the data hold more than tensors, and unpickling runs any code that they contain",
        ) from error


UNPICKLING = "the field is pickled, and unpickling runs any code that it contains"


def unpickle_loads(data: bytes, *, allow: Collection[str] = ()) -> Any:
    """Return the object that is pickled in the data, if that is allowed.

    Raises:
        SecurityError: If it is not allowed.
    """
    return _load_pickle(data, security.resolve(allow))


def _load_pickle(data: bytes, allowed: Collection[str]) -> Any:
    """Unpickle data with permissions resolved earlier; see `security.resolve`."""
    security.require("pickle", allowed, UNPICKLING)
    return pickle.loads(data)


npy_loads = DECODERS["npy"]
npz_loads = DECODERS["npz"]
msgpack_loads = DECODERS["msg"]
cbor_loads = DECODERS["cbor"]
tenbin_loads = DECODERS["ten"]


_BUILT_IN: dict[str, Callable[[bytes], Any]] = {
    **DECODERS,
    **dict.fromkeys(("pkl", "pickle", "pyd"), unpickle_loads),
    "pth": torch_loads,
}


class _Registry(UserDict[str, Callable[[bytes], Any]]):
    """A dict that counts its changes."""

    version = 0

    def __setitem__(self, extension: str, decode: Callable[[bytes], Any]) -> None:
        super().__setitem__(extension, decode)
        self.version += 1

    def __delitem__(self, extension: str) -> None:
        super().__delitem__(extension)
        self.version += 1

    def changes(self) -> dict[str, Callable[[bytes], Any] | None]:
        """Return the entries that differ from the initial ones; None stands for removed ones."""
        names = {*self, *_BUILT_IN}
        return {n: self.get(n) for n in names if self.get(n) is not _BUILT_IN.get(n)}


decoders = _Registry(_BUILT_IN)
"""Functions that decode the bytes of a field, by extension. Programs may change them."""


@dataclass(frozen=True)
class BasicHandler(FieldHandler):
    """Decodes text, numbers, JSON, arrays and so on by their extension, see `decoders`.

    Args:
        allowed: What is allowed, see `security.resolve`.
        changes: Entries of the registry of the process that has pickled the handler.
    """

    allowed: frozenset[str] = frozenset()
    changes: Mapping[str, Callable[[bytes], Any] | None] = field(default_factory=dict)

    def function(self, key: str) -> Callable[[bytes], Any] | None:
        extension = key.rpartition(".")[2]
        changed = extension in self.changes
        function = self.changes[extension] if changed else decoders.get(extension)
        if function is torch_loads:
            return partial(_load_torch, allowed=self.allowed)
        if function is unpickle_loads:
            return partial(_load_pickle, allowed=self.allowed)
        return function

    def __reduce__(self) -> tuple[Any, ...]:
        # Other processes have the initial registry.
        return BasicHandler, (self.allowed, {**decoders.changes(), **self.changes})


def basichandlers(key: str, data: bytes) -> Any:
    """Decode a field by its extension, with what is allowed at the time of the call.

    Example:
        >>> basichandlers("cls", b"7"), basichandlers("unknown", b"7")
        (7, None)
    """
    return BasicHandler(security.resolve())(key, data)


default_pre_handlers: list[DecodingHandler] = [gzfilter]
default_post_handlers: list[DecodingHandler] = [basichandlers]


class Decoder:
    """Decodes the fields of a sample: called with a sample, it returns the decoded sample.

    Called with anything else, it is a stage over it: `Decoder(f)(dataset)`.

    Args:
        handlers: A list of handlers or names of image formats ("rgb", "torchrgb8", "pil", ...).
            Older programs pass them as separate arguments.
        rest: `pre`, `post`, `only` and `partial` after a list of handlers; further handlers after
            a single one.
        pre: Handlers before these; None decompresses `.gz`.
        post: Handlers after these; None decodes text, numbers, JSON and arrays.
        only: Fields to decode, as a list or separated by spaces; None for all.
        partial: Whether to leave fields that are not bytes unchanged; otherwise they are errors.
        allow: "pickle" permits pickled fields.

    Example:
        >>> Decoder([])({"__key__": "a", "json": b"[1]", "txt": b"text"})
        {'__key__': 'a', 'json': [1], 'txt': 'text'}
    """

    def __init__(
        self,
        handlers: Any = (),
        *rest: Any,
        pre: Sequence[DecodingHandler] | None = None,
        post: Sequence[DecodingHandler] | None = None,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        allow: Collection[str] = (),
    ) -> None:
        if not isinstance(handlers, list | tuple):
            handlers, rest = [handlers, *rest], ()
        options: tuple[Any, ...] = (pre, post, only, partial)
        pre, post, only, partial = (*rest, *options[len(rest) :])
        allowed = security.resolve(allow)
        before = default_pre_handlers if pre is None else pre
        after = default_post_handlers if post is None else post
        self.handlers = tuple(_handler(each, allowed) for each in (*before, *handlers, *after))
        names = only.split() if isinstance(only, str) else only
        self.only = None if names is None else frozenset(names)
        self.partial = partial
        self._plan: dict[str, Any] = {}
        self._version = decoders.version

    def __call__(self, sample: Any) -> Any:
        """Return a sample with its fields decoded."""
        if type(sample) is dict or isinstance(sample, Mapping):
            return self.decode(sample)
        if hasattr(sample, "__next__") or not hasattr(sample, "__iter__"):
            raise ConfigError(f"a decoder decodes samples or pipelines, got {sample!r}")
        pipeline = sample if hasattr(sample, "compose") else DataPipeline(sample)
        return pipeline.compose(Apply(self))

    def decode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample with its fields decoded.

        Raises:
            DecodingError: If a field is damaged.
            SecurityError: If a field is pickled, and that is not allowed.
        """
        if self._version != decoders.version:
            self._plan, self._version = {}, decoders.version
        plan, decoded = self._plan, {}
        for name, data in sample.items():
            try:
                step = plan[name]
            except KeyError:
                step = plan[name] = self._step_of(name)
            if type(data) is bytes:
                try:
                    decoded[name] = step(data)
                except SecurityError:
                    raise
                except Exception as error:
                    raise _failed(_why(error, data), name, sample) from error
            elif self.partial or step is _text or step is _unchanged:
                decoded[name] = data
            else:
                raise _failed(
                    f"holds {type(data).__name__} instead of bytes; is it decoded twice? Pass "
                    "partial=True to leave such fields alone",
                    name,
                    sample,
                )
        return decoded

    def decode1(self, key: str, data: bytes) -> Any:
        """Return the content of one field, decoded by its name."""
        return _ask_in_turn(self.handlers, "." + key, data)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": {}, "_version": -1}

    def _step_of(self, name: str) -> Any:
        """Return the function that decodes the bytes of fields with this name."""
        if name.startswith("__"):
            return _text
        if self.only is not None and name not in self.only:
            return _unchanged
        key = "." + name
        for number, handler in enumerate(self.handlers):
            function = _function_of(handler, key)
            if function is None or (handler is gzfilter and not key.endswith(".gz")):
                continue
            if type(handler) in (ImageHandler, BasicHandler):
                return function
            # It may pass on other data under any key, so later handlers are called too.
            return partial(_ask_in_turn, self.handlers[number:], key)
        return identity


def _ask_in_turn(handlers: Sequence[DecodingHandler], key: str, data: Any) -> Any:
    """Return the value of the first handler that decodes the data; the data, if none does."""
    for handler in handlers:
        function = _function_of(handler, key)
        result = None if function is None else function(data)
        if isinstance(result, Continue):
            key, data = result.key, result.data
        elif result is not None or (function is not None and _is_by_name(handler)):
            return result  # None is a result, as for JSON
    return data


def _is_by_name(handler: Any) -> bool:
    """Return whether a handler decides by the name of a field; subclasses of programs may not."""
    return bool(type(handler).__call__ is FieldHandler.__call__)


def _function_of(handler: Any, key: str) -> Callable[[Any], Any] | None:
    """Return the function that decodes the data of a field, or decides whether to; or None."""
    by_name: bool = _is_by_name(handler)
    return handler.function(key) if by_name else partial(handler, key)


def _handler(handler: Any, allowed: frozenset[str]) -> DecodingHandler:
    if isinstance(handler, str):
        return imagehandler(handler)
    if handler is basichandlers:
        return BasicHandler(allowed)
    if not callable(handler):
        raise ConfigError(
            f"decode got {handler!r}; expected functions of key and data, or names of what "
            'images become, like "rgb" or "torchrgb"'
        )
    return cast("DecodingHandler", handler)


def _failed(problem: str, name: str, sample: Mapping[str, Any]) -> DecodingError:
    key, url = sample.get("__key__", ""), sample.get("__url__")
    return DecodingError(url, key, name, sample, problem=problem)


def _why(error: Exception, data: bytes) -> str:
    if isinstance(error, EnergonError):
        return f"cannot be decoded: {error}"
    return f"cannot be decoded: {bytes_in_words(data)}: {describe_error(error)}"


def _unchanged(data: bytes) -> bytes:
    """Return the bytes of a field that is not selected for decoding."""
    return data


def _text(data: bytes) -> str | bytes:
    """Return the text of a metadata field; or its bytes, if they are not text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


default_decoder = Decoder()
