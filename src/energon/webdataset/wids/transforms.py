"""Decode the fields of samples that are streams."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from energon.webdataset.autodecode import Decoder

Sample = dict[str, Any]


def decoding(images: str, allowed: frozenset[str] = frozenset()) -> Callable[[Sample], Sample]:
    """Return a function that decodes samples.

    Args:
        images: "pil" for images of Pillow, "numpy" for arrays of uint8.
        allowed: Whether pickles may be unpickled.
    """
    return _Decoding(Decoder("pil" if images == "pil" else "rgb8", allow=allowed))


class _Decoding:
    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __call__(self, sample: Sample) -> Sample:
        fields = {name[1:]: value.getvalue() for name, value in sample.items() if _is_stream(value)}
        about = {name: value for name, value in sample.items() if name.startswith("__")}
        decoded = self._decoder.decode({**about, **fields})
        return {
            name: decoded[name[1:]] if _is_stream(value) else value
            for name, value in sample.items()
        }


def _is_stream(value: Any) -> bool:
    return isinstance(value, io.BytesIO)
