"""What a sample holds, as something that a terminal can show."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import EnergonError
from energon.prepare.assistant.fields import (
    SeenSample,
    is_required,
    own_fields,
    part_names,
    suggest,
)
from energon.samples.field_map import FieldMap

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


_TEMPLATE = '''"""Makes a {type} of the parts of a sample.

Runs only where the program allows code of datasets: allow=("code",), or ENERGON_ALLOW=code.
"""


def sample_loader(raw: dict) -> dict:
    """Return the fields of the sample. `raw` has its parts, decoded: {parts}."""
    return {{
        "__key__": raw["__key__"],
{fields}
    }}


def part_filter(part: str) -> bool:
    """Return whether a part is read at all."""
    return part in {wanted!r}
'''


def loader_template(sample_type: type, samples: Sequence[SeenSample]) -> str:
    """Return code to start from: what each field most likely is, and None where that is unclear."""
    lines = []
    wanted: set[str] = set()
    for field in own_fields(sample_type):
        way = suggest(field.name, samples)
        if way is not None:
            access = FieldMap.parse({field.name: way}).accesses[field.name][0]
            wanted.add(access.part)
            value = "raw" + "".join(f"[{_step(step)}]" for step in (access.part, *access.steps))
            lines.append(f"        {field.name!r}: {value},")
        elif is_required(field):
            lines.append(f"        {field.name!r}: None,  # say here what it is")
    names = part_names(samples)
    return _TEMPLATE.format(
        type=sample_type.__name__,
        parts=", ".join(ascii(name) for name in names),
        fields="\n".join(lines).replace("'", '"'),
        wanted=tuple(name for name in names if name in wanted or not wanted),
    )


def _step(step: str) -> str:
    return step if step.lstrip("-").isdigit() else repr(step)


TEXT_LETTERS = 200
IMAGE_COLUMNS = 32
IMAGE_ROWS = 12


def show_sample(sample: SeenSample) -> Table:
    """Return a table of the parts of a sample: name, size, and what is in it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{sample.shard}: {printable(sample.key)}"), title_justify="left")
    table.add_column("part", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("content")
    for part, size in sample.sizes.items():
        content: Any = Text("too large to be shown")
        if part in sample.decoded:
            content = preview(sample.decoded[part])
        table.add_row(Text(printable(part)), f"{size:,}", content)
    return table


def preview(value: Any) -> Any:
    """Return a few lines about a value: a text, or an image in coloured blocks."""
    from rich.console import Group
    from rich.text import Text

    if isinstance(value, EnergonError):
        return Text(printable(f"cannot be decoded: {value}"), style="red")
    if _is_image(value):
        height, width, _ = value.shape
        return Group(Text(f"image, {width} by {height} pixels"), thumbnail(value))
    return Text(describe(value))


def describe(value: Any) -> str:
    """Return one line about a value.

    Example:
        >>> describe({"caption": "a cat", "boxes": [[1, 2, 3, 4]]})
        'json {"caption": "a cat", "boxes": [[1, 2, 3, 4]]}'
        >>> describe(b"12345")
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


def thumbnail(image: NDArray[np.uint8]) -> Text:
    """Return an image (H, W, 3) in half blocks, two pixels in the height of a letter."""
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
    """Return a text without characters that would move the cursor or change colours."""
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


def _is_image(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[2:] == (3,)


def show_samples(samples: Sequence[SeenSample]) -> list[Table]:
    """Return a table for each sample."""
    return [show_sample(sample) for sample in samples]
