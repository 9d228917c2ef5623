"""Any value in one line of text: for `print`, notebooks, previews and the browser."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

from energon.errors import EnergonError
from energon.messages import bytes_in_words

META_FIELDS = ("__key__", "__restore_key__", "__subflavors__", "__sources__")


class ShortText(Repr):
    """Text of values in one line: of arrays and bytes their size, of the rest the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200
        self.maxdict = self.maxtuple
        self.maxlist = 3

    def repr1(self, x: Any, level: int) -> str:
        """Return the text of a value inside of others."""
        shape = getattr(x, "shape", None)
        if shape is not None and hasattr(x, "dtype"):
            device = str(getattr(x, "device", "cpu"))
            where = "" if device == "cpu" else f" on {device}"
            return f"{type(x).__name__} {tuple(shape)} {x.dtype}{where}"
        if isinstance(x, bytes | bytearray | memoryview):
            return bytes_in_words(x)
        return super().repr1(x, level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Return all fields of a batch, but only some entries of a dict inside of others."""
        if level < self.maxlevel:
            return super().repr_dict(x, level)
        shown = ((name, value) for name, value in x.items() if name not in META_FIELDS[1:])
        fields = (f"{name!r}: {self.repr1(value, level - 1)}" for name, value in shown)
        return f"{{{', '.join(fields)}}}"


SHORT = ShortText()


def short_text(batch: Any) -> str:
    """Return a batch or sample in one line, as `print` shows those that have a type.

    Samples without a type make batches that are plain dicts, so that PyTorch and JAX map over them.
    The text of a dict has all of its data.

    Example:
        >>> import numpy as np
        >>> short_text({"image": np.zeros((8, 3, 32, 32), np.uint8), "n": [1, 2]})
        "{'image': ndarray (8, 3, 32, 32) uint8, 'n': [1, 2]}"
    """
    return SHORT.repr(batch)


def describe_value(value: Any) -> str:
    """Return one line about a value; of a video or a sound its size, rate and duration.

    Example:
        >>> describe_value({"caption": "a cat", "boxes": [[1, 2, 3, 4]]})
        "{'caption': 'a cat', 'boxes': [[1, 2, 3, ...]]}"
    """
    return short_text(value) if not hasattr(value, "get_metadata") else _recording(value)


def _recording(value: Any) -> str:
    """Return size, rate and duration of a video or a sound; None if a value is neither."""
    try:
        metadata = value.get_metadata(get_video_frame_count=False)
    except EnergonError as error:
        return f"cannot be decoded: {error}"
    words = []
    if metadata.video_width is not None:
        words.append(f"video of {metadata.video_width} x {metadata.video_height} pixels")
        words += [f"{metadata.video_fps:g} frames/s"] if metadata.video_fps else []
    elif metadata.audio_sample_rate is not None:
        words.append("sound")
    if metadata.audio_sample_rate is not None:
        words.append(f"{metadata.audio_channels} x {metadata.audio_sample_rate:,} Hz")
    duration = metadata.video_duration or metadata.audio_duration
    return ", ".join([*words, f"{duration:.1f} s"] if duration else words)
