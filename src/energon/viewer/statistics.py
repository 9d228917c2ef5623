"""Properties of samples, measured on a fixed number of evenly spaced ones."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
from markupsafe import Markup

from energon.decode.documents import decode_json
from energon.errors import EnergonError
from energon.inspect.part_facts import part_facts
from energon.inspect.where import LENGTH
from energon.viewer.plots import Bar, histogram, ranking, short_number, ticks
from energon.viewer.shown import ShownLeaf

SEEN_SAMPLES = 500
SEEN_SHARDS = 72
"""Up to this many shards are opened, each of which may be remote or without an index."""
BARS = 24
MAX_LABEL_LETTERS = 34
MAX_VALUE_LETTERS = 100
TOP_VALUES = 12
MAX_FIELDS = 40
MAX_SEEN_FIELDS = 1000
"""Up to this many are counted, of which the most frequent are shown."""
MAX_JSON_BYTES = 1 << 20
_WORDS = {
    "size": "bytes",
    "width": "width in pixels",
    "height": "height in pixels",
    "ratio": "aspect ratio",
    "duration": "seconds",
    "fps": "frames per second",
    "rate": "sampling rate",
    "text": "label",
}
_PARTS = "parts of a sample"


class Plotted(NamedTuple):
    """A plot of a property of samples."""

    name: str
    facts: str
    """Range and median of numbers; of other values, how many different ones there are."""
    plot: Markup


class _Text(NamedTuple):
    """A text in JSON."""

    beginning: str
    length: int

    @classmethod
    def of(cls, text: str) -> _Text:
        return cls(text[:MAX_VALUE_LETTERS], len(text))


class _Field(NamedTuple):
    """A property: its title, and its name in conditions, "" if it has none."""

    title: str
    condition: str


def statistics(leaf: ShownLeaf, base: str) -> tuple[int, list[Plotted]]:
    """Return how many samples of a dataset were checked, and plots of their properties.

    Bars link to their samples, in the gallery at the address `base`.
    """
    numbers = _spread(leaf)
    found: defaultdict[_Field, list[Any]] = defaultdict(list)
    for number in numbers:
        for name, value in _values(leaf, number):
            if name in found or len(found) < MAX_SEEN_FIELDS:
                found[name].append(value)
    # A part that only a few samples have must not displace one that nearly all have.
    frequent = sorted(found, key=lambda field: (field.title != _PARTS, -len(found[field])))
    fields = sorted(frequent[:MAX_FIELDS], key=lambda field: (field.title != _PARTS, field.title))
    return len(numbers), [_plot(field, found[field], base) for field in fields]


def _spread(leaf: ShownLeaf) -> list[int]:
    """Return the numbers of the samples to check, evenly spaced over evenly spaced shards."""
    total, shards = len(leaf), leaf.shards
    if total <= SEEN_SAMPLES or len(shards) <= SEEN_SHARDS:
        places = np.linspace(0, total - 1, min(SEEN_SAMPLES, total))
    else:
        chosen = np.linspace(0, len(shards) - 1, SEEN_SHARDS).astype(int).tolist()
        share = SEEN_SAMPLES // SEEN_SHARDS + 1
        edges = [(shards[n].start, shards[n].stop - 1) for n in chosen]
        places = np.concatenate([np.linspace(low, high, share) for low, high in edges])
        places = places[:SEEN_SAMPLES]
    return [int(place) for place in np.unique(places.astype(int))]


def _values(leaf: ShownLeaf, number: int) -> Iterator[tuple[_Field, Any]]:
    try:
        parts = leaf.sample(number).parts
    except EnergonError:
        return
    yield _Field(_PARTS, ""), " ".join(sorted(part.label for part in parts))
    for part in parts:
        yield _Field(f"{part.label}: bytes", f"{part.name}.size"), part.file.size
        try:
            if part.name.lower() in ("cls", "cls2"):
                text = part.file.read()[:100].decode("utf-8", "replace").strip()
                yield _Field(f"{part.label}: label", f"{part.name}.text"), text
            elif _is_json(part.name) and part.file.size <= MAX_JSON_BYTES:
                yield from _fields(part.label, part.name, decode_json(part.file.read()))
            else:
                for name, value in part_facts(part.name, part.file).items():
                    word = _WORDS.get(name, name)
                    if name == "length":
                        word = "entries" if part.name.lower().endswith("npy") else "characters"
                    yield _Field(f"{part.label}: {word}", f"{part.name}.{name}"), value
        except (EnergonError, ValueError):
            yield _Field(f"{part.label}: damaged", ""), "damaged"


def _is_json(name: str) -> bool:
    return name.lower().endswith(("json", "jsn"))


def _fields(label: str, part: str, value: Any) -> Iterator[tuple[_Field, Any]]:
    if isinstance(value, bool | int | float | str):
        yield _Field(label, f"{part}.value"), _Text.of(value) if isinstance(value, str) else value
    elif isinstance(value, dict):
        for name, each in list(value.items())[:MAX_FIELDS]:
            condition = f"{part}.{name}" if len(name) < MAX_VALUE_LETTERS else ""
            field = _Field(f"{label}.{name[:MAX_VALUE_LETTERS]}", condition)
            if isinstance(each, bool | int | float):
                yield field, each
            elif isinstance(each, str):
                yield field, _Text.of(each)


def _plot(field: _Field, values: list[Any], base: str) -> Plotted:
    """Return a histogram of numbers, or a ranking of the most frequent of other values.

    Of texts that are nearly all different, such as captions, a histogram of their lengths.
    """
    texts = [value for value in values if isinstance(value, _Text)]
    different = len({text.beginning for text in texts})
    if len(texts) == len(values) and different > max(TOP_VALUES, len(texts) // 2):
        condition = f"{field.condition}.{LENGTH}" if field.condition else ""
        field = _Field(f"{field.title}: characters", condition)
        values = [text.length for text in texts]
    else:
        values = [value.beginning if isinstance(value, _Text) else value for value in values]
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values) and len(set(numbers)) > TOP_VALUES:
        finite = np.array(numbers, np.float64)
        finite = finite[np.isfinite(finite)]
        counts, edges = np.histogram(finite, BARS)
        steps = list(pairwise(edges.tolist()))
        bars = [
            Bar(
                f"{short_number(low)} to {short_number(high)}",
                count,
                _link(base, field, low, high, n == BARS - 1),
            )
            for n, (count, (low, high)) in enumerate(zip(counts.tolist(), steps, strict=True))
        ]
        marks = ticks(float(edges[0]), float(edges[-1]))
        if sum(map(len, marks)) > MAX_LABEL_LETTERS:  # they would overlap
            marks = marks[::2]
        facts = f"{marks[0]} to {marks[-1]}, median {short_number(float(np.median(finite)))}"
        return Plotted(field.title, facts, histogram(bars, marks, title=field.title))
    counted = Counter(values)
    top = counted.most_common(TOP_VALUES)
    if len(numbers) == len(values):
        top.sort()
    bars = [Bar(_said(value), count, _equals(base, field, value)) for value, count in top]
    facts = f"{len(counted):,} different" if len(counted) > 1 else ""
    return Plotted(field.title, facts, ranking(bars, title=field.title))


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return short_number(value) if isinstance(value, int | float) else str(value)


def _link(base: str, field: _Field, low: float, high: float, is_last: bool) -> str:
    if not field.condition:
        return ""
    sign = "<=" if is_last else "<"
    return _where(base, f"{field.condition}>={low!r}", f"{field.condition}{sign}{high!r}")


def _equals(base: str, field: _Field, value: Any) -> str:
    if field.title == _PARTS:
        return _where(base, *(f"has:{name}" for name in str(value).split()))
    if not field.condition:
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return _where(base, f"{field.condition}={text}")


def _where(base: str, *terms: str) -> str:
    where = " ".join(map(shlex.quote, terms))
    return f"{base}?{urlencode({'where': where}, errors='replace')}"
