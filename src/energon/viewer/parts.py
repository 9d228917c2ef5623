"""How a part is shown on a page, by its name and its first bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import DecodeError, EnergonError
from energon.inspect.where import PartKind, av_metadata, npy_header, part_extension, part_kind
from energon.messages import counted, describe_error, escape_text, short_number
from energon.samples.display import as_array, describe_value
from energon.samples.field_map import Access, FieldMap
from energon.sources.tree import BrowsedFile
from energon.viewer.images import heat_map, is_deep
from energon.viewer.shown import ShownPart

Tokenizer = Callable[[list[int]], str | list[str]]
"""Turns a list of tokens into text, or into the text of each."""

MAX_TEXT_BYTES = 64 << 10
MAX_DECODED_BYTES = 64 << 20
MAX_VALUES = 2000
MAX_SHOWN_LEVELS = 40
MAX_SHOWN_ITEMS = 200
MAX_SHOWN_ARRAYS = 16
MAX_EXIF_TAGS = 50
MAX_RATIO = 50
"""Images with a more extreme aspect ratio are shown in full size."""
SHOWN_NUMBERS = 64
MAX_TOKENS = 2048
HEX_BYTES = 256
SNIPPET_TOKENS = 80
SNIPPET_LETTERS = 160
BOXES = "boxes"
"""Fields of sample types whose names end like this are boxes: x, y, width, height, confidence."""
MAX_BOXES = 500
MAX_BOX_BYTES = 4 << 20
_NO_TOKENS = re.compile("cu_seqlens|mask|position|length|offset|box", re.IGNORECASE)
_TOKENS = re.compile("token|input_?ids", re.IGNORECASE)
"""Names of lists of integers that are tokens; other lists may be anything."""


@dataclass
class ShownArray:
    """A summary of an array."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    facts: str
    first: str
    heat_map: str | None
    tokens: list[tuple[str, int]]
    """Text and number of each token, if there is a tokenizer and the array can be tokens."""


@dataclass
class PartView:
    """A part as the template of a sample shows it.

    Args:
        kind: How it is shown.
        extension: Its type.
        facts: Properties of it, by name.
        text: The text, if it is text.
        is_cut: Whether the text or the list of arrays is incomplete.
        html: A value as safe HTML.
        arrays: The arrays in it.
        problem: Why it cannot be shown.
        pixels: Width and height of an image.
        is_deep: Whether it is an image of more than 8 bits, which browsers draw too dark or bright.
        is_thin: Whether it is an image so thin that it would be a line if scaled to the page.
    """

    kind: PartKind
    extension: str
    facts: dict[str, str] = field(default_factory=dict)
    text: str = ""
    is_cut: bool = False
    html: Markup = field(default_factory=Markup)
    arrays: list[ShownArray] = field(default_factory=list)
    problem: str = ""
    pixels: tuple[int, int] | None = None
    is_deep: bool = False
    is_thin: bool = False


def view_part(name: str, file: BrowsedFile, tokenizer: Tokenizer | None = None) -> PartView:
    """Return how a part is shown. Errors are shown as well, not raised.

    Args:
        name: The name of the part.
        file: Its content.
        tokenizer: Turns tokens into text.
    """
    view = PartView("bytes", "")
    try:
        view.extension = part_extension(name, file)
        view.kind = part_kind(view.extension)
        packed = name.lower().endswith(".gz")
        if packed and view.kind not in ("text", "value", "arrays"):
            view.kind = "bytes"
        if not file.size:
            view.problem = "empty: 0 bytes"
        elif view.kind == "image":
            _show_image(view, file)
        elif view.kind in ("audio", "video"):
            view.facts = _av_facts(file)
        elif view.kind == "text" and not packed:
            view.text = _head(file, MAX_TEXT_BYTES).decode("utf-8", "replace")
            view.is_cut = file.size > MAX_TEXT_BYTES
        elif view.kind == "bytes":
            view.text, view.is_cut = hex_dump(_head(file, HEX_BYTES)), file.size > HEX_BYTES
        else:
            _show_value(view, name, _decoded(name, file), tokenizer)
    except (EnergonError, ValueError, OSError) as error:
        view.problem = str(error)
    return view


def snippet(name: str, file: BrowsedFile, tokenizer: Tokenizer | None = None) -> str:
    """Return a summary of a part for a gallery: the beginning of a text, the content of a value."""
    kind, length = part_kind(part_extension(name)), SNIPPET_LETTERS
    if kind == "text" and not name.lower().endswith(".gz"):
        return _head(file, 4 * length).decode("utf-8", "replace")[:length]
    try:
        if file.size > MAX_TEXT_BYTES:
            if not name.lower().endswith("npy"):
                return ""
            shape, dtype = npy_header(file)
            return f"{' x '.join(map(str, shape))} {dtype}"
        value = SampleDecoder().decode(name, file.read())
    except (EnergonError, ValueError):
        return ""
    if text := said_tokens(name, value, tokenizer):
        return text[:length]
    if isinstance(value, np.ndarray):
        return f"{describe_value(value)} [{_first(value)}]"[:length]
    if isinstance(value, Mapping):
        lines = (
            f"{each}: {said_tokens(each, of, tokenizer) or _short(of, 60)}"
            for each, of in value.items()
        )
        return "\n".join(lines)[:length]
    return "" if value is None else _short(value, length)


def hex_dump(data: bytes) -> str:
    r"""Return bytes as a table of hexadecimal numbers and letters.

    Example:
        >>> print(hex_dump(b"ab\x00"))
        000000  61 62 00                                         |ab.|
    """
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:06x}  {row.hex(' '):<48} |{letters}|")
    return "\n".join(lines)


def value_tree(value: Any, tokenizer: Tokenizer | None = None, name: str = "") -> Markup:
    """Return lists and dicts as collapsible HTML, down to a limited number of values and levels.

    Args:
        value: The value.
        tokenizer: Turns tokens into text.
        name: The name of the value, which may say that it has tokens.
    """
    return Markup("").join(_tree(value, 0, [MAX_VALUES], Markup(""), name, tokenizer))


def _decoded(name: str, file: BrowsedFile) -> Any:
    if file.size > MAX_DECODED_BYTES:
        raise ValueError(f"too large to be shown ({file.size} bytes); download the part")
    return SampleDecoder(image_decode="rgb8").decode(name, file.read())


def _show_value(view: PartView, name: str, value: Any, tokenizer: Tokenizer | None) -> None:
    arrays = list(_arrays(value)) if view.kind == "arrays" else []
    if arrays:
        view.arrays = [
            show_array(each, array, tokenizer_of(f"{name} {each}", tokenizer))
            for each, array in arrays[:MAX_SHOWN_ARRAYS]
        ]
        view.is_cut = len(arrays) > MAX_SHOWN_ARRAYS
    elif isinstance(value, str | int) and view.kind == "text":
        view.text = str(value)[:MAX_TEXT_BYTES]
    else:
        view.kind, view.html = "value", value_tree(value, tokenizer, name)


def _arrays(value: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    named: Any = [("", value)]
    if isinstance(value, Mapping):
        named = value.items()
    elif isinstance(value, list):
        named = ((str(number), each) for number, each in enumerate(value))
    for name, each in named:
        if isinstance(each, np.ndarray):
            yield name, each


def show_array(name: str, array: NDArray[Any], tokenizer: Tokenizer | None = None) -> ShownArray:
    """Return a summary of an array."""
    facts = ""
    if array.size and array.dtype.kind in "biuf":
        finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
        if finite.size:
            mean = finite.mean(dtype=np.float64)
            low, high = finite.min().item(), finite.max().item()
            facts = f"min {_digits(low)}, max {_digits(high)}, mean {mean:.6g}"
        if finite.size < array.size:
            facts += f"; {array.size - finite.size} not finite"
    shown = (_first(array), heat_map(array), _tokens(array, tokenizer))
    return ShownArray(name, array.shape, str(array.dtype), facts, *shown)


def _digits(value: float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}"


def _first(array: NDArray[Any]) -> str:
    """Return the first numbers of an array."""
    numbers = array.reshape(-1)[:SHOWN_NUMBERS].tolist()
    more = ", …" if array.size > SHOWN_NUMBERS else ""
    return ", ".join(f"{n:.6g}" if isinstance(n, float) else str(n) for n in numbers) + more


def tokenizer_of(name: str, tokenizer: Tokenizer | None) -> Tokenizer | None:
    """Return the tokenizer for a part or field of integers; None if its name says otherwise.

    Masks, positions and the boundaries of sequences are integers as well, but not tokens.
    """
    return None if _NO_TOKENS.search(name) else tokenizer


def _tokens(
    array: NDArray[Any], tokenizer: Tokenizer | None, count: int = MAX_TOKENS
) -> list[tuple[str, int]]:
    """Return text and number of the tokens in an array of integers, or in its first row.

    [] if it has none, or there is no tokenizer.
    """
    is_list = array.dtype.kind in "iu" and array.ndim in (1, 2) and array.size
    if tokenizer is None or not is_list:
        return []
    numbers = (array if array.ndim == 1 else array[0])[:count].tolist()
    try:
        return [("".join(tokenizer([number])), number) for number in numbers]
    except Exception as error:  # a function of the user, and numbers that may be none of its tokens
        return [(f"the tokenizer raised {describe_error(error)}", 0)]


def tokens_in(
    name: str, value: Any, tokenizer: Tokenizer | None, count: int = MAX_TOKENS
) -> list[tuple[str, int]]:
    """Return text and number of the tokens in an array, or in a list whose name says it has some.

    [] if it has none, or there is no tokenizer.
    """
    if tokenizer is None:
        return []
    array = as_array(value)
    if array is None and isinstance(value, list) and _TOKENS.search(name):
        shown = value[:count]
        array = np.array(shown) if all(type(each) is int for each in shown) else None
    return [] if array is None else _tokens(array, tokenizer_of(name, tokenizer), count)


def said_tokens(name: str, value: Any, tokenizer: Tokenizer | None) -> str:
    """Return the beginning of the text of the tokens in a value; "" if it has none."""
    return "".join(text for text, _ in tokens_in(name, value, tokenizer, SNIPPET_TOKENS))


def _tree(
    value: Any, level: int, left: list[int], name: Markup, key: str, tokenizer: Tokenizer | None
) -> Iterator[Markup]:
    """Yield the HTML of a value and everything in it, labeled `name`."""
    left[0] -= 1
    kind = ""
    if is_dataclass(value) and not isinstance(value, type):
        kind = f"{type(value).__name__}: "
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    tokens = tokens_in(key, value, tokenizer)
    if tokens:
        yield name + Markup('<span class="tokens">')
        yield from (
            Markup('<span title="{}">{}</span>').format(number, _safe(text))
            for text, number in tokens
        )
        yield Markup("</span>")
        return
    if not isinstance(value, Mapping | list | tuple) or not value:
        color = "number" if isinstance(value, int | float) else "other"
        color = "string" if isinstance(value, str) else color
        yield name + Markup('<span class="{}">{}</span>').format(color, _safe(_short(value, 2000)))
        return
    if level >= MAX_SHOWN_LEVELS:
        yield name + Markup('<span class="more">… deeper values are not shown</span>')
        return
    count = counted(len(value), "key" if isinstance(value, Mapping) else "value", grouped=True)
    opened = Markup(" open") if level < 2 and len(value) <= 50 else Markup("")
    yield Markup("<details{}><summary>{}{}{}</summary><ul>").format(opened, name, kind, count)
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for shown, (own, each) in enumerate(items):
        if shown >= MAX_SHOWN_ITEMS or left[0] <= 0:
            yield Markup('<li class="more">… {:,} more</li>').format(len(value) - shown)
            break
        yield Markup("<li>")
        label = Markup("<b>{}</b>: ").format(_safe(str(own)[:200]))
        yield from _tree(each, level + 1, left, label, str(own), tokenizer)
        yield Markup("</li>")
    yield Markup("</ul></details>")


def _short(value: Any, length: int = 200) -> str:
    array = as_array(value)
    if array is not None:
        text = f"{describe_value(array)}: {_first(array)}"
    elif isinstance(value, str):
        text = value
    elif value is None or isinstance(value, bool | Mapping | Sequence):
        text = json.dumps(value, ensure_ascii=False, default=repr)
    else:
        text = describe_value(value)
    return text if len(text) <= length else f"{text[:length]}…"


def shown_value(value: Any) -> str:
    """Return a number or text as it is, and one line about any other value."""
    if hasattr(value, "item") and not value.shape:
        return _short(value.item())
    return value if isinstance(value, str) else describe_value(value)


def _safe(text: str) -> Markup:
    return escape(escape_text(text))


def _head(file: BrowsedFile, size: int) -> bytes:
    return file.find().pread(file.offset, min(size, file.size)) if file.size else b""


def _show_image(view: PartView, file: BrowsedFile) -> None:
    from PIL import ExifTags, Image

    try:
        with file.open() as stream, Image.open(stream) as image:
            width, height = image.size
            view.pixels = image.size
            view.is_deep = is_deep(image.mode)
            view.is_thin = max(width, height) > MAX_RATIO * min(width, height)
            view.facts = {
                "size": f"{width} x {height} pixels",
                "mode": image.mode,
                "format": str(image.format),
            }
            if getattr(image, "is_animated", False):
                view.facts["frames"] = "several; loaders decode the first"
            tags = image.getexif()
            if tags.get(ExifTags.Base.Orientation, 1) != 1:
                view.facts["orientation"] = (
                    "EXIF says to rotate it; shown as stored, which is how loaders decode it"
                )
            for tag, value in list(tags.items())[:MAX_EXIF_TAGS]:
                view.facts[f"EXIF {ExifTags.TAGS.get(tag, tag)}"] = _short(value, 100)
    except Exception as error:  # Pillow raises whatever the data make it
        raise DecodeError(f"not a readable image: {error}".partition(" <")[0]) from error


def _av_facts(file: BrowsedFile) -> dict[str, str]:
    metadata = av_metadata(file)
    width, height = metadata.video_width, metadata.video_height
    size = f"{width} x {height} pixels" if width else None
    facts = {
        "duration": _with_unit(metadata.video_duration or metadata.audio_duration, "s"),
        "size": size,
        "frame rate": _with_unit(metadata.video_fps, "frames/s"),
        "sampling rate": _with_unit(metadata.audio_sample_rate, "Hz"),
        "channels": str(metadata.audio_channels) if metadata.audio_channels else None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _with_unit(value: float | None, unit: str) -> str | None:
    return None if value is None else f"{short_number(value)} {unit}"


class ShownBox(NamedTuple):
    """A box over an image, in pixels."""

    x: float
    y: float
    width: float
    height: float
    text: str
    """The field that it is from, and the text in it, if there is one."""


def boxes_of(parts: Sequence[ShownPart], field_map: Mapping[str, str]) -> dict[str, list[ShownBox]]:
    """Return the boxes of a sample by the name of its image part.

    Args:
        parts: The parts of the sample.
        field_map: The parts from which the fields of its type are taken.
    """
    if not any(name.endswith(BOXES) for name in field_map):
        return {}
    ways = FieldMap.parse(field_map).accesses
    values: dict[str, Any] = {part.name: None for part in parts}
    for part in parts:
        if part.kind in ("value", "arrays") and part.file.size <= MAX_BOX_BYTES:
            with suppress(EnergonError, ValueError):
                values[part.name] = SampleDecoder().decode(part.name, part.file.read())
    boxes: list[ShownBox] = []
    for name in ways:
        if name.endswith(BOXES):
            texts = _mapped(ways.get(f"{name.removesuffix(BOXES)}text", ()), values)
            boxes += _boxes(name, _mapped(ways[name], values), texts)
    for access in ways.get("image", ()) if boxes else ():
        with suppress(KeyError):
            return {access.part_in(values): boxes[:MAX_BOXES]}
    return {}


def _boxes(name: str, value: Any, texts: Any) -> list[ShownBox]:
    try:
        rows = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return []
    if rows.ndim != 2 or rows.shape[1] not in (4, 5) or not np.isfinite(rows).all():
        return []
    labels = texts if isinstance(texts, list) and len(texts) == len(rows) else [""] * len(rows)
    field = name.removesuffix(BOXES).rstrip("_")
    return [
        ShownBox(x, y, width, height, " ".join(filter(None, (field, str(label)))))
        for (x, y, width, height, *_), label in zip(rows.tolist(), labels, strict=True)
    ]


def _mapped(ways: Sequence[Access], values: Mapping[str, Any]) -> Any:
    """Return the first value that exists; None if there is none."""
    for access in ways:
        with suppress(LookupError, TypeError):
            return access.of(values)
    return None
