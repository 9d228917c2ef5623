"""Handlers that decode fields by their extension.

A decoding handler is a function of a key, which is a dot and the name of the field, and the
data. It returns None for what it does not know, `Continue` to hand other data on under another
key, and the result else. Handlers that have a method `claims` are asked once per name of a field
instead of being called for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from energon.decode.images import EXTENSIONS, ImageSpec, decode_image, image_spec
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError

DecodingHandler = Callable[[str, Any], Any]

IMAGE_EXTENSIONS: list[str] = sorted(EXTENSIONS)
"""Fields that are images, for a program to change before it makes handlers."""


@dataclass(frozen=True)
class Continue:
    """What a handler returns for others to go on with."""

    key: str
    data: Any


@dataclass(frozen=True)
class ExtensionHandler:
    """Decodes fields whose last extensions are one of some, see `handle_extension`."""

    extensions: tuple[str, ...]
    f: Callable[[Any], Any]

    def claims(self, key: str) -> bool:
        """Return whether this one decodes fields of that name."""
        found = key.lower().split(".")
        return any(found[-len(wanted) :] == wanted for wanted in map(_split, self.extensions))

    def compiled(self, key: str) -> Callable[[Any], Any]:
        """Return what decodes fields that it claims."""
        return self.f

    def __call__(self, key: str, data: Any) -> Any:
        return self.f(data) if self.claims(key) else None


def call_extension_handler(
    key: str, data: Any, f: Callable[[Any], Any], extensions: Collection[str]
) -> Any:
    """Return what a function makes of the data if a key ends in one of some extensions."""
    return ExtensionHandler(tuple(extensions), f)(key, data)


def _split(extension: str) -> list[str]:
    return extension.split(".")


def handle_extension(extensions: str, f: Callable[[Any], Any]) -> ExtensionHandler:
    """Return a handler that decodes fields by their extension.

    Args:
        extensions: Extensions with spaces between them. "png" fits all fields that end in it,
            "seg.png" those that end in both, ".png" only fields of exactly that name.
        f: Makes a value of the bytes.
    """
    names = tuple(extensions.lower().split())
    if not names:
        raise ConfigError("handle_extension needs at least one extension")
    return ExtensionHandler(names, f)


@dataclass(frozen=True)
class ImageHandler:
    """Decodes images.

    Args:
        imagespec: What they become, see `energon.decode.images.IMAGE_SPECS`.
        extensions: Which fields are images; None means the usual extensions.
    """

    imagespec: str
    extensions: Collection[str] | None = None
    _spec: ImageSpec = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        chosen = IMAGE_EXTENSIONS if self.extensions is None else self.extensions
        object.__setattr__(self, "extensions", frozenset(chosen))
        object.__setattr__(self, "_spec", image_spec(self.imagespec))

    def claims(self, key: str) -> bool:
        """Return whether fields of that name are images."""
        return key.rpartition(".")[2].lower() in (self.extensions or ())

    def compiled(self, key: str) -> Callable[[bytes], Any]:
        """Return what decodes images."""
        return partial(decode_image, spec=self._spec)

    def __call__(self, key: str, data: bytes) -> Any:
        return decode_image(data, self._spec) if self.claims(key) else None


def imagehandler(imagespec: str, extensions: Collection[str] | None = None) -> ImageHandler:
    """Return a handler that decodes images, see `ImageHandler`."""
    return ImageHandler(imagespec, extensions)


class _GzFilter:
    """Unpacks fields that end in gz, for other handlers to go on with."""

    def claims(self, key: str) -> bool:
        """Return whether fields of that name are compressed."""
        return key.endswith(".gz")

    def __call__(self, key: str, data: bytes) -> Any:
        if not key.endswith(".gz"):
            return None
        return Continue(key[:-3], _GUNZIP.decode("part.gz", data))

    def __reduce__(self) -> str:
        return "gzfilter"


_GUNZIP = SampleDecoder("rgb")
gzfilter = _GzFilter()
