"""Show samples in the terminal: values in a few words, and images as text."""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Any

import numpy as np

from energon.errors import EnergonError
from energon.messages import bytes_in_words
from energon.prepare.assistant.fields import SeenSample
from energon.samples.notebook import recording_in_words
from energon.samples.terminal_images import half_blocks

if TYPE_CHECKING:
    from rich.table import Table

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
        lines = half_blocks(value, IMAGE_COLUMNS, IMAGE_ROWS)
        return Group(
            Text(f"image, {width} by {height} pixels"),
            Text.from_ansi("\n".join(lines), no_wrap=True),
        )
    return Text(describe_value(value))


def describe_value(value: Any) -> str:
    """Return one line about a value.

    Example:
        >>> describe_value({"caption": "a cat", "boxes": [[1, 2, 3, 4]]})
        'json {"caption": "a cat", "boxes": [[1, 2, 3, 4]]}'
        >>> describe_value(b"12345")
        "5 bytes, b'12345'"
    """
    if isinstance(value, str):
        return _shortened(json.dumps(value, ensure_ascii=False))
    if isinstance(value, bytes):
        return bytes_in_words(value)
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype}, {' by '.join(map(str, value.shape)) or 'one value'}"
    if isinstance(value, int | float | bool | None):
        return repr(value)
    if isinstance(value, dict | list):
        return _structure(value)
    return _shortened(recording_in_words(value) or repr(value))


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


def _shortened(text: str) -> str:
    text = printable(text)
    return text if len(text) <= TEXT_LETTERS else text[: TEXT_LETTERS - 1] + "…"


def _is_rgb_image(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[2:] == (3,)
