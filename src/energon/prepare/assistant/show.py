"""Show samples in the terminal: values in a few words, and images as text."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import EnergonError
from energon.prepare.assistant.fields import SeenSample

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

TEXT_LETTERS = 200
IMAGE_COLUMNS = 32
IMAGE_ROWS = 12


def show_sample(sample: SeenSample) -> Table:
    """Return a table of the parts of a sample: name, size, and content."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{sample.shard}: {printable(sample.key)}"), title_justify="left")
    table.add_column("part", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("content")
    for part, size in sample.sizes.items():
        content: Any = Text("too large to show")
        if part in sample.decoded:
            content = preview(sample.decoded[part])
        table.add_row(Text(printable(part)), f"{size:,}", content)
    return table


def preview(value: Any) -> Any:
    """Return a few lines about a value: a text, or an image in colored blocks."""
    from rich.console import Group
    from rich.text import Text

    if isinstance(value, EnergonError):
        return Text(printable(f"cannot be decoded: {value}"), style="red")
    if _is_rgb_image(value):
        height, width, _ = value.shape
        return Group(Text(f"image, {width} by {height} pixels"), text_thumbnail(value))
    return Text(describe_value(value))


def describe_value(value: Any) -> str:
    """Return one line about a value.

    Example:
        >>> describe_value({"caption": "a cat", "boxes": [[1, 2, 3, 4]]})
        'json {"caption": "a cat", "boxes": [[1, 2, 3, 4]]}'
        >>> describe_value(b"12345")
        "5 bytes that begin with b'12345'"
    """
    if isinstance(value, str):
        return _shortened(json.dumps(value, ensure_ascii=False))
    if isinstance(value, bytes):
        return f"{len(value)} bytes that begin with {value[:16]!r}"
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype}, {_shape(value)}"
    if isinstance(value, int | float | bool | None):
        return repr(value)
    if isinstance(value, dict | list):
        return _structure(value)
    if hasattr(value, "get_metadata"):
        return _shortened(_media(value))
    return _shortened(printable(repr(value)))


def text_thumbnail(image: NDArray[np.uint8]) -> Text:
    """Return an image (H, W, 3) in half blocks, two pixels per character height."""
    from PIL import Image
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    height, width, _ = image.shape
    scale = min(IMAGE_COLUMNS / width, 2 * IMAGE_ROWS / height, 1.0)
    columns = max(1, round(width * scale))
    rows = max(1, round(height * scale / 2))
    small = np.asarray(Image.fromarray(image).resize((columns, 2 * rows)))
    text = Text(no_wrap=True)
    for upper, lower in zip(small[::2].tolist(), small[1::2].tolist(), strict=True):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
        text.append("\n")
    return text


def printable(text: str) -> str:
    """Return a text without characters that would move the cursor or change colors."""
    return "".join(
        "\ufffd" if unicodedata.category(letter) in ("Cc", "Cs") else letter for letter in text
    )


def _structure(value: Any) -> str:
    kind = "json"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        kind, text = type(value).__name__, repr(value)
    return _shortened(f"{kind} {printable(text)}")


def _media(decoder: Any) -> str:
    try:
        about = decoder.get_metadata()
    except EnergonError as error:
        return f"cannot be decoded: {error}"
    known = [
        f"{name.replace('_', ' ')} {getattr(about, name)}"
        for name in about.__dataclass_fields__
        if getattr(about, name) is not None
    ]
    return ", ".join(known)


def _shape(value: NDArray[Any]) -> str:
    return " by ".join(map(str, value.shape)) or "one value"


def _shortened(text: str) -> str:
    text = printable(text)
    return text if len(text) <= TEXT_LETTERS else text[: TEXT_LETTERS - 1] + "…"


def _is_rgb_image(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[2:] == (3,)


def show_samples(samples: Sequence[SeenSample]) -> list[Table]:
    """Return a table for each sample."""
    return [show_sample(sample) for sample in samples]
