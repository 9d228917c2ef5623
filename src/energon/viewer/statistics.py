"""What samples are like, seen from some of them at equal distances, so that it costs the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup

from energon.decode.documents import decode_json
from energon.errors import EnergonError
from energon.viewer.parts import extension_of, part_kind
from energon.viewer.plots import bars
from energon.viewer.shown import ShownLeaf

SEEN_SAMPLES = 500
BARS = 24
TOP_VALUES = 12
MAX_FIELDS = 40
MAX_JSON_BYTES = 1 << 20


def statistics(leaf: ShownLeaf) -> tuple[int, list[tuple[str, Markup]]]:
    """Return how many samples of a dataset were looked at, and plots of what they are like."""
    count = min(SEEN_SAMPLES, len(leaf))
    numbers = np.linspace(0, len(leaf) - 1, count).astype(int).tolist()
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for number in dict.fromkeys(numbers):
        for name, value in _values(leaf, number):
            if name in found or len(found) < MAX_FIELDS:
                found[name].append(value)
    return count, [(name, _plot(name, values)) for name, values in sorted(found.items())]


def _values(leaf: ShownLeaf, number: int) -> Iterator[tuple[str, Any]]:
    try:
        parts = leaf.sample(number).parts
    except EnergonError:
        return
    yield "parts of a sample", " ".join(sorted(part.label for part in parts))
    for part in parts:
        yield f"{part.label}: bytes", part.file.size
        kind = part_kind(extension_of(part.name))
        try:
            if kind == "image":
                width, height = _image_size(part.file.open())
                yield f"{part.label}: width in pixels", width
                yield f"{part.label}: height in pixels", height
                yield f"{part.label}: width to height", width / max(1, height)
            elif part.name.lower() in ("cls", "cls2"):
                yield f"{part.label}: class", part.file.read()[:100].decode("utf-8", "replace")
            elif part.name.lower().endswith(("json", "jsn")) and part.file.size <= MAX_JSON_BYTES:
                yield from _fields(part.label, decode_json(part.file.read()))
        except (EnergonError, ValueError):
            yield f"{part.label}: damaged", "damaged"


def _fields(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in list(value.items())[:MAX_FIELDS]:
            if isinstance(each, bool | int | float):
                yield f"{label}.{name[:100]}", each
            elif isinstance(each, str):
                yield f"{label}.{name[:100]}", each[:100]


def _image_size(stream: Any) -> tuple[int, int]:
    from PIL import Image

    with stream:
        try:
            with Image.open(stream) as image:
                return image.size
        except Exception as error:  # Pillow raises whatever the data make it
            raise ValueError("no image") from error


def _plot(name: str, values: list[Any]) -> Markup:
    """Return a histogram of numbers, or how often the most frequent of other values come."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values) and len(set(numbers)) > TOP_VALUES:
        finite = np.array(numbers, np.float64)
        finite = finite[np.isfinite(finite)]
        counts, edges = np.histogram(finite, BARS)
        labels = [f"{low:.6g} to {high:.6g}" for low, high in pairwise(edges.tolist())]
        return bars(counts.tolist(), labels, title=name)
    top = Counter(str(value) for value in values).most_common(TOP_VALUES)
    return bars([count for _, count in top], [text for text, _ in top], title=name)
