"""Decode the fields of samples by their extensions, see `decoding_handlers`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from energon.allow import refusal
from energon.decode.arrays import decode_pth
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, DecodeError, SecurityError
from energon.webdataset import security
from energon.webdataset.reexport import reexport
from energon.webdataset.stages.decoding_handlers import (
    Continue,
    DecodingHandler,
    ImageHandler,
    gzfilter,
    handle_extension,
    imagehandler,
)
from energon.webdataset.stages.media_handlers import torch_audio, torch_video

__all__ = [
    "BasicHandler",
    "Continue",
    "Decoder",
    "DecodingError",
    "ImageHandler",
    "basichandlers",
    "decoders",
    "gzfilter",
    "handle_extension",
    "imagehandler",
    "pytorch_weights_only",
    "torch_audio",
    "torch_loads",
    "torch_video",
]

PICKLED = frozenset({"pkl", "pickle", "pyd", "pth"})
_NUMBERS = frozenset({"cls", "cls2", "index", "inx", "id", "count"})
_TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn"})
_ARRAYS = frozenset({"npy", "npz", "ten", "tb", "mp", "msg", "cbor"})
BASIC = PICKLED | _NUMBERS | _TEXTS | _ARRAYS
"""Extensions that are decoded unless told otherwise."""


class DecodingError(DecodeError):
    """A field cannot be decoded; says which one, and of which sample."""

    def __init__(self, message: str, *, url: str | None = None, key: str = "", k: str = "") -> None:
        super().__init__(message)
        self.url = url
        self.key = key
        self.k = k


@dataclass(frozen=True)
class BasicHandler:
    """Decodes text, numbers, JSON, arrays and the like by their extension, see `BASIC`.

    Args:
        allowed: Whether pickles are among them.
    """

    allowed: frozenset[str] = frozenset()
    _decoder: SampleDecoder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_decoder", SampleDecoder("rgb", allow=self.allowed))

    def claims(self, key: str) -> bool:
        """Return whether fields of that name are decoded."""
        return key.rpartition(".")[2] in BASIC

    def __call__(self, key: str, data: bytes) -> Any:
        extension = key.rpartition(".")[2]
        if extension not in BASIC:
            return None
        if extension == "pth":
            return load_torch(data, self.allowed)
        if extension in PICKLED:
            security.require(
                "pickle",
                self.allowed,
                f"a {key} field is pickled, and unpickling runs any code that it holds",
            )
        return self._decoder.decode(key, data)


def basichandlers(key: str, data: bytes) -> Any:
    """Decode a field by its extension, with what is allowed at the time of the call."""
    return BasicHandler(security.resolve())(key, data)


def _decode_as(extension: str, data: bytes) -> Any:
    return basichandlers(f".{extension}", data)


class Decoder:
    """Decodes the fields of a sample; a sample given to it comes back decoded.

    Called with anything that is no sample, it is a stage over it: `Decoder(f)(dataset)`.

    Args:
        handlers: Handlers, or names of what images become ("rgb", "torchrgb8", "pil", ...).
        pre: Handlers before these; None means unpacking of `.gz`.
        post: Handlers after these; None means text, numbers, JSON, arrays.
        only: Fields to decode, as a list or with spaces between them; None means all.
        partial: Whether fields that are not bytes are left alone; else they are an error.
        allow: "pickle" lets pickled fields be unpickled.
    """

    def __init__(
        self,
        *handlers: Any,
        pre: Sequence[DecodingHandler] | None = None,
        post: Sequence[DecodingHandler] | None = None,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        allow: Collection[str] = (),
    ) -> None:
        if len(handlers) == 1 and isinstance(handlers[0], list | tuple):
            handlers = tuple(handlers[0])
        allowed = security.resolve(allow)
        self.handlers: tuple[DecodingHandler, ...] = (
            *([gzfilter] if pre is None else pre),
            *(imagehandler(each) if isinstance(each, str) else each for each in handlers),
            *([BasicHandler(allowed)] if post is None else post),
        )
        for each in self.handlers:
            if not callable(each):
                raise ConfigError(
                    f"decode got {each!r}; expected functions of key and data, or names of what "
                    'images become, like "rgb" or "torchrgb"'
                )
        self.only = only if only is None else frozenset(_words(only))
        self.partial = partial
        self._plan: dict[str, tuple[DecodingHandler, ...]] = {}

    def __call__(self, sample: Any) -> Any:
        """Return a sample with its fields decoded."""
        if not isinstance(sample, Mapping):
            from energon.webdataset.compat import apply_decoder

            return apply_decoder(self, sample)
        return self.decode(sample)

    def decode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample with its fields decoded.

        Raises:
            DecodingError: If a field is damaged.
            SecurityError: If a field is pickled, and that is not allowed.
        """
        decoded = {}
        for name, data in sample.items():
            handlers = self._plan.get(name)
            if handlers is None:
                handlers = self._plan[name] = self._handlers_for(name)
            decoded[name] = self._value(name, data, handlers, sample) if handlers else data
        return decoded

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": {}}

    def _handlers_for(self, name: str) -> tuple[DecodingHandler, ...]:
        """Return the handlers that have to be asked about a field."""
        if name.startswith("__"):
            return (_decode_text,)
        if self.only is not None and name not in self.only:
            return ()
        key = "." + name
        for number, handler in enumerate(self.handlers):
            if not hasattr(handler, "claims") or (handler is gzfilter and handler.claims(key)):
                # It may hand other data on under any key: those after it have to be asked.
                return self.handlers[number:]
            if handler.claims(key):
                return (handler,)
        return ()

    def _value(
        self,
        name: str,
        data: Any,
        handlers: tuple[DecodingHandler, ...],
        sample: Mapping[str, Any],
    ) -> Any:
        if not isinstance(data, bytes):
            if self.partial or name.startswith("__"):
                return data
            raise self._error(
                f"holds {type(data).__name__} instead of bytes; is it decoded twice? Pass "
                "partial=True to leave such fields alone",
                name,
                sample,
            )
        key = "." + name
        try:
            for handler in handlers:
                result = handler(key, data)
                if isinstance(result, Continue):
                    key, data = result.key, result.data
                elif result is not None or _definite(handler, key):
                    return result
        except SecurityError:
            raise
        except Exception as error:
            raise self._error(f"cannot be decoded: {error}", name, sample) from error
        return data

    def _error(self, what: str, name: str, sample: Mapping[str, Any]) -> DecodingError:
        key, url = sample.get("__key__", ""), sample.get("__url__")
        where = f" of {url}" if url else ""
        return DecodingError(
            f"field {name!r} of sample {key!r}{where} {what}", url=url, key=key, k=name
        )


def _definite(handler: DecodingHandler, key: str) -> bool:
    """Return whether None is what the handler has made of the data, like the null of JSON."""
    claims = getattr(handler, "claims", None)
    return claims is not None and claims(key)


def _decode_text(key: str, data: bytes) -> str | bytes:
    """Return the text of a field for metadata. Programs put other bytes there, too."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _words(names: str | Iterable[str]) -> list[str]:
    return names.split() if isinstance(names, str) else list(names)


pytorch_weights_only = True
"""Whether only tensors are loaded from `.pth` fields. Set to False, this process unpickles them."""


def torch_loads(data: bytes, *, allow: Collection[str] = ()) -> Any:
    """Return what torch.save has written: tensors always, other objects only if allowed.

    Raises:
        SecurityError: If it holds other objects, and "pickle" is not allowed.
    """
    return load_torch(data, security.resolve(allow))


def load_torch(data: bytes, allowed: Collection[str]) -> Any:
    """Do what `torch_loads` does, with what was allowed before; see `security.resolve`."""
    trusted = "pickle" in allowed or not pytorch_weights_only
    if trusted and os.environ.get("WDS_PYTORCH_WEIGHTS_ONLY", "0") != "1":
        return decode_pth(data, trusted=True)
    try:
        return decode_pth(data, trusted=False)
    except pickle.UnpicklingError as error:
        raise refusal(
            "pickle",
            "the data hold more than tensors, and unpickling runs any code that they hold",
        ) from error


decoders: dict[str, Callable[[bytes], Any]] = {
    extension: partial(_decode_as, extension) for extension in sorted(BASIC)
}
"""Functions that decode the bytes of a field, by extension."""


npy_loads = decoders["npy"]
npz_loads = decoders["npz"]
msgpack_loads = decoders["msg"]
cbor_loads = decoders["cbor"]
tenbin_loads = decoders["ten"]
unpickle_loads = decoders["pickle"]

default_pre_handlers = [gzfilter]
default_post_handlers = [basichandlers]

__getattr__ = reexport(__name__, {"IMAGE_EXTENSIONS": "stages.decoding_handlers"})
