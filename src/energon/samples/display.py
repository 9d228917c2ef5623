"""Samples and batches for people: values in one line of text, HTML, and images for terminals.

Notebooks ask an object for its `_repr_html_`. Dicts, lists and tuples have none: for these, a
notebook is given a function, see `register_with_notebook`. It shows crude samples and batches of
them, which have keys, and what loaders have delivered, see `shown_in_notebooks`.
"""

from __future__ import annotations

import base64
import io
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from reprlib import Repr
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from energon.errors import EnergonError
from energon.messages import bytes_in_words, counted, escape_text
from energon.samples.provenance import SourceInfo

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
            on = "" if device == "cpu" else f" on {device}"
            return f"{type(x).__name__} {tuple(shape)} {x.dtype}{on}"
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


T = TypeVar("T")

NOTEBOOK_THUMBNAIL_PIXELS = 128
MAX_NOTEBOOK_IMAGES = 16
MAX_TEXT = 300
MAX_ITEMS = 8
MAX_SOURCES = 8
MAX_DELIVERED = 256
"""How many of the items that were delivered last are known."""

_PLAIN = (dict, list, tuple)
_delivered: deque[tuple[int, tuple[Any, ...]]] = deque(maxlen=MAX_DELIVERED)

_TABLE = (
    '<table style="text-align:left"><caption style="text-align:left"><b>{}</b></caption>{}</table>'
)
_ROW = (
    '<tr><th style="text-align:left;vertical-align:top">{}</th>'
    '<td style="text-align:left;overflow-wrap:anywhere">{}</td></tr>'
)


def sample_html(title: str, fields: Mapping[str, Any]) -> str:
    """Return a table of the fields of a sample or batch.

    Args:
        title: What it is.
        fields: By name. Arrays and tensors that can be images are shown as images.
    """
    shown = {name: value for name, value in fields.items() if value is not None}
    own = [(n, v) for n, v in shown.items() if not n.startswith("__")]
    rows = [("key", _text(shown["__key__"]))] if "__key__" in shown else []
    rows += [(name, value_html(value)) for name, value in own]
    subflavors = shown.get("__subflavors__")
    if any(subflavors) if isinstance(subflavors, list | tuple) else subflavors:
        rows.append(("subflavors", _text(subflavors)))
    if shown.get("__sources__"):
        sources = sources_in_words(shown["__sources__"])
        rows.append(("sources", "<br>".join(map(safe_html, sources))))
    elif "__shard__" in shown:
        rows.append(("shard", _text(shown["__shard__"])))
    return table_html(title, rows)


def register_with_notebook() -> None:
    """Let the notebook that this runs in show samples and batches as tables that are plain values.

    All other dicts, lists and tuples look as before; all of them do, if the user has chosen their
    look.
    """
    shell = _shell()
    if shell is not None:
        register_tables(shell.display_formatter.formatters["text/html"])


def register_tables(formatter: Any) -> None:
    """Give the HTML formatter of IPython a function for each kind of plain value without one."""
    for kind in _PLAIN:
        if kind not in formatter.type_printers:
            formatter.for_type(kind, _html_of_samples)


def shown_in_notebooks(items: Iterator[T]) -> Iterator[T]:
    """Return items of a loader; a notebook will show those that are plain values as tables."""
    return items if _shell() is None else map(_remember, items)


def _shell() -> Any:
    """Return the IPython that this runs in, or None."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def _remember(item: T) -> T:
    """Remember an item by its identity and names, so that its memory is not kept."""
    if isinstance(item, _PLAIN):
        _delivered.append((id(item), _names(item)))
    return item


def _names(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return tuple(value)
    return tuple(getattr(value, "_fields", range(len(value))))


def _html_of_samples(value: Any) -> str | None:
    """Return samples or a batch as tables; None for other values, which IPython then prints."""
    if own := getattr(type(value), "_repr_html_", None):
        # Of a subclass, which IPython does not ask if there is a function.
        html: str | None = own(value)
        return html
    if isinstance(value, dict) and "__key__" in value:
        keys = value["__key__"]
        is_batch = isinstance(keys, list)
        return sample_html(
            f"Batch of {counted(len(keys), 'sample')}" if is_batch else "Sample", value
        )
    names = _names(value)
    if (id(value), names) in _delivered:
        values = value.values() if isinstance(value, dict) else value
        title = f"{type(value).__name__} of {counted(len(names), 'value')}"
        return sample_html(title, dict(zip(map(str, names), values, strict=True)))
    if isinstance(value, dict):
        return None
    tables = [_html_of_samples(each) for each in value[:MAX_ITEMS] if _is_sample(each)]
    if not tables or len(tables) < min(len(value), MAX_ITEMS):
        return None
    more = len(value) - len(tables)
    return "".join([*map(str, tables), f"<p>and {more:,} more</p>" if more else ""])


def _is_sample(value: Any) -> bool:
    has_key = "__key__" in value if isinstance(value, dict) else hasattr(value, "__key__")
    return has_key and (isinstance(value, dict) or hasattr(type(value), "_repr_html_"))


def table_html(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and of what they have, which has to be HTML already."""
    return _TABLE.format(safe_html(title), "".join(_ROW.format(safe_html(n), v) for n, v in rows))


def value_html(value: Any) -> str:
    """Return a value as HTML: its images, the beginning of a text, or one line about it."""
    images = list(images_in(value))
    shown = "".join(image_html(each) for each in images[:MAX_NOTEBOOK_IMAGES])
    if len(images) > MAX_NOTEBOOK_IMAGES:
        shown += f" and {len(images) - MAX_NOTEBOOK_IMAGES} more"
    if images and isinstance(value, list | tuple):
        return shown
    return f"{shown}<div>{_text(value)}</div>" if images else _text(value)


def images_in(value: Any) -> Iterator[NDArray[np.uint8]]:
    """Yield the images in an array, a tensor, or a list of them, as (height, width, 3)."""
    values: Any = value[: MAX_NOTEBOOK_IMAGES + 1] if isinstance(value, list | tuple) else [value]
    array = as_array(value)
    if array is not None and array.ndim == 4:
        values = array  # either all are images, or none
    yield from (pixels for pixels in map(as_pixels, values) if pixels is not None)


def as_pixels(value: Any) -> NDArray[np.uint8] | None:
    """Return an array or tensor as pixels (height, width, 3), if it can be an image, else None.

    Colors may come first or last, as bytes or as numbers around 0 to 1. Planes without colors are
    images if they are bytes. Of a video, its first frame.
    """
    if hasattr(value, "first_frame"):
        with suppress(EnergonError):
            value = value.first_frame()
    array = as_array(value)
    if array is None or not array.size or array.dtype.kind not in "uf":
        return None
    if array.ndim == 2 and array.dtype == np.uint8:
        array = array[:, :, None]
    if array.ndim != 3:
        return None
    if array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.shape[2] not in (1, 3, 4) or (array.dtype.kind == "u" and array.dtype != np.uint8):
        return None
    if array.dtype != np.uint8:
        numbers = np.nan_to_num(array.astype(np.float32))
        low, high = min(0.0, float(numbers.min())), max(1.0, float(numbers.max()))
        # Normalized images lie on both sides of 0: all of their range is shown.
        array = ((numbers - low) / (high - low) * 255).astype(np.uint8)
    return np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array[:, :, :3]


def image_html(pixels: NDArray[np.uint8], size: int = NOTEBOOK_THUMBNAIL_PIXELS) -> str:
    """Return an image as an element that carries its data."""
    return f'<img src="{image_url(pixels, size)}" alt="image">'


def image_url(pixels: NDArray[np.uint8], size: int) -> str:
    """Return an image of at most this many pixels on each side as a `data:` address."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((size, size))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def safe_html(text: str) -> str:
    """Return text as HTML, without characters that steer terminals."""
    from html import escape  # not needed by programs that show nothing

    return escape(escape_text(text))


def _text(value: Any) -> str:
    """Return the beginning of a value as HTML; of lists, of their items."""
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        items = "".join(f"<li>{_text(each)}</li>" for each in value[:MAX_ITEMS])
        more = f"<li>and {len(value) - MAX_ITEMS} more</li>" if len(value) > MAX_ITEMS else ""
        return f'<ul style="margin:0">{items}{more}</ul>'
    text = value if isinstance(value, str) else describe_value(value)
    return safe_html(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…")


def sources_in_words(sources: Sequence[Any]) -> list[str]:
    """Return where samples come from: dataset, parts and shard of each source.

    A batch may have the sources of each of its samples, or those of all in one.
    """
    flat = [one for each in sources for one in (each if isinstance(each, list | tuple) else [each])]
    lines = [
        f"{each.dataset_path}: {', '.join(each.file_names)} in {each.shard_name}"
        for each in flat
        if isinstance(each, SourceInfo)
    ]
    if len(lines) > MAX_SOURCES:
        lines[MAX_SOURCES:] = [f"and {len(lines) - MAX_SOURCES} more"]
    return lines


def as_array(value: Any) -> NDArray[Any] | None:
    """Return an array, or the numbers of a tensor; None for other values, and arrays of objects."""
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        tensor = value.detach().cpu()
        value = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return value if isinstance(value, np.ndarray) and not value.dtype.hasobject else None


SHEET_PIXELS = 512
SHEET_TEXT = 2000

_SHEET = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1rem; }}
main {{ display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); }}
section {{ border: 1px solid #8888; border-radius: .4rem; padding: .6rem; }}
section, dd {{ overflow-wrap: anywhere; }}
h2 {{ font-size: 1rem; margin: 0 0 .4rem; }}
img {{ max-width: 100%; }}
dt {{ opacity: .7; font-size: .8rem; }}
dd {{ margin: 0 0 .3rem; white-space: pre-wrap; }}
</style></head><body>
<h1>{title}</h1>
<main>
"""


def contact_sheet(title: str, samples: Iterable[Mapping[str, Any]]) -> str:
    """Return HTML that shows the fields of samples; arrays that can be images as images."""
    parts = [_SHEET.format(title=safe_html(title))]
    for fields in samples:
        own = {name: value for name, value in fields.items() if not name.startswith("__")}
        shown = {name: _sheet_value(value) for name, value in own.items()}
        if fields.get("__sources__"):
            shown["sources"] = safe_html("\n".join(sources_in_words(fields["__sources__"])))
        rows = (f"<dt>{safe_html(name)}</dt><dd>{value}</dd>\n" for name, value in shown.items())
        head = f"<section><h2>{safe_html(str(fields['__key__']))}</h2><dl>\n"
        parts += [head, *rows, "</dl></section>\n"]
    return "".join([*parts, "</main></body></html>\n"])


def _sheet_value(value: Any) -> str:
    pixels = as_pixels(value)
    if pixels is None:
        text = value if isinstance(value, str) else describe_value(value)
        return safe_html(text[:SHEET_TEXT])
    height, width = pixels.shape[:2]
    is_recording = hasattr(value, "get_metadata")
    text = describe_value(value) if is_recording else f"{width} x {height} pixels"
    return f"{image_html(pixels, SHEET_PIXELS)}<br>{safe_html(text)}"


def half_blocks(pixels: NDArray[np.uint8], columns: int, rows: int) -> Iterator[str]:
    """Yield lines that draw an image: each character is two pixels, one above the other.

    Args:
        pixels: Of shape (height, width, 3).
        columns: Maximum number of characters in a line.
        rows: Maximum number of lines.
    """
    from PIL import Image

    height, width = pixels.shape[:2]
    scale = min(columns / width, 2 * rows / height, 1.0)
    size = max(1, round(width * scale)), 2 * max(1, round(height * scale / 2))
    small = np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize(size))
    for upper, lower in zip(small[::2].tolist(), small[1::2].tolist(), strict=True):
        cells = (
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m▀"
            for a, b in zip(upper, lower, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"
