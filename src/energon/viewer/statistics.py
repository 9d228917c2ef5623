"""Properties of samples, measured on a fixed number of evenly spaced ones, and plots as SVG."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
from markupsafe import Markup

from energon.decode.documents import decode_json
from energon.errors import EnergonError
from energon.inspect.part_facts import part_facts
from energon.inspect.where import LENGTH
from energon.viewer.shown import ShownLeaf

WIDTH, HEIGHT = 360, 140
HUES = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 4, 4, 8, 18
_ROW, _NAMES = 21, 122


class Bar(NamedTuple):
    """One bar of a plot."""

    label: str
    value: float
    href: str = ""
    """The address that it links to; "" if none."""


def histogram(bars: Sequence[Bar], ticks: Sequence[str], *, title: str) -> Markup:
    """Return a histogram above evenly spaced marks."""
    most = max((bar.value for bar in bars), default=0) or 1
    width = (WIDTH - _LEFT - _RIGHT) / max(1, len(bars))
    high = HEIGHT - _TOP - _BOTTOM
    body = _line(0, HEIGHT - _BOTTOM, WIDTH)
    for number, bar in enumerate(bars):
        height = high * bar.value / most
        x = _LEFT + number * width
        # The whole column can be clicked, because a bar may be a pixel high.
        column = Markup('<rect class="hit" x="{:.1f}" y="0" width="{:.1f}" height="{}"/>').format(
            x, width, HEIGHT - _BOTTOM
        )
        shape = Markup(
            '<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="1.5"/>'
        ).format(x + 0.5, HEIGHT - _BOTTOM - height, max(1.0, width - 1), height)
        body += _pointed(bar, column + shape)
    places = [
        _LEFT + (WIDTH - _LEFT - _RIGHT) * n / max(1, len(ticks) - 1) for n in range(len(ticks))
    ]
    for number, (x, tick) in enumerate(zip(places, ticks, strict=True)):
        anchor = "start" if number == 0 else "end" if number == len(ticks) - 1 else "middle"
        body += _text(x, HEIGHT - 4, anchor, tick)
    return _svg(body, title, HEIGHT)


def ranking(bars: Sequence[Bar], *, title: str) -> Markup:
    """Return horizontal bars, each with its label and its value."""
    most = max((bar.value for bar in bars), default=0) or 1
    body = Markup()
    for number, bar in enumerate(bars):
        y = 4 + number * _ROW
        width = (WIDTH - _NAMES - 45) * bar.value / most
        label = bar.label if len(bar.label) <= 16 else bar.label[:15] + "…"
        row = Markup('<rect class="hit" x="0" y="{}" width="{}" height="{}"/>').format(
            y, WIDTH, _ROW
        )
        row += _text(_NAMES - 8, y + 15, "end", label or "(empty)")
        row += Markup('<rect class="bar" x="{}" y="{}" width="{:.1f}" height="{}" rx="2"/>').format(
            _NAMES, y + 3, max(1.0, width), _ROW - 6
        )
        row += _text(_NAMES + width + 6, y + 15, "start", f"{bar.value:,}")
        body += _pointed(bar, row)
    return _svg(body, title, 8 + _ROW * len(bars))


def shares(series: Mapping[str, Sequence[float]], marks: Sequence[str], *, title: str) -> Markup:
    """Return shares over time as stacked areas.

    Args:
        series: By name, the shares between each mark and the next.
        marks: The labels of the marks.
        title: What the plot shows.
    """
    count = len(marks) - 1
    body, below = Markup(), [0.0] * max(0, count)
    for number, (name, values) in enumerate(series.items()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        points = [*_edges(above, count), *reversed(_edges(below, count))]
        first, last = (f"{100 * values[end]:.1f} %" for end in (0, -1)) if values else ("", "")
        body += Markup(
            '<polygon class="hue{}" points="{}"><title>{}: {} → {}</title></polygon>'
        ).format(number % HUES, " ".join(f"{x:.1f},{y:.1f}" for x, y in points), name, first, last)
        below = above
    # The plot is stretched to the width of the page, so its marks are text below it.
    ends = Markup("<p><span>{}</span><span>{}</span></p>").format(marks[0], marks[-1])
    return _svg(body, title, HEIGHT, 'preserveAspectRatio="none"') + ends


def packed(rows: Sequence[Sequence[int]], pads: Sequence[int]) -> Markup:
    """Return packed sequences as bars, divided into their samples and padding.

    Args:
        rows: For each packed sequence, the lengths of its samples.
        pads: For each packed sequence, the length of its padding.
    """
    longest = max((sum(row) + pad for row, pad in zip(rows, pads, strict=True)), default=0) or 1
    scale = (WIDTH - 60) / longest
    body = Markup()
    for number, (row, pad) in enumerate(zip(rows, pads, strict=True)):
        y, x = 4 + number * _ROW, 0.0
        for position, length in enumerate([*row, pad]):
            is_padding = position == len(row)
            if not length:
                continue
            name = "padding" if is_padding else f"sequence {position}"
            body += Markup(
                '<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}">'
                "<title>{}: {:,}</title></rect>"
            ).format(
                "padding" if is_padding else f"hue{position % (HUES - 2)}",
                *(x, y, max(0.5, length * scale - 0.5), _ROW - 4, name, length),
            )
            x += length * scale
        full = sum(row) / ((sum(row) + pad) or 1)
        body += _text(x + 6, y + 14, "start", f"{100 * full:.1f} %")
    return _svg(
        body, "packed sequences, and the share of each that is not padding", 8 + _ROW * len(rows)
    )


def ticks(low: float, high: float, count: int = 5) -> list[str]:
    """Return the labels of evenly spaced marks from one number to another.

    Example:
        >>> ticks(0, 2000), ticks(0.4, 0.99, 3)
        (['0', '500', '1,000', '1,500', '2,000'], ['0.4', '0.695', '0.99'])
    """
    return [short_number(value) for value in np.linspace(low, high, count).tolist()]


def short_number(value: float) -> str:
    """Return a number with three significant digits, or all digits before the decimal point."""
    if abs(value) >= 1_000_000_000:
        return f"{value:.3g}"
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _pointed(bar: Bar, shape: Markup) -> Markup:
    title = Markup("<title>{}: {:,}</title>").format(bar.label, bar.value)
    if not bar.href:
        return Markup("<g>{}{}</g>").format(title, shape)
    return Markup('<a href="{}">{}{}</a>').format(bar.href, title, shape)


def _edges(values: Sequence[float], count: int) -> list[tuple[float, float]]:
    step = WIDTH / max(1, count)
    corners = []
    for number, value in enumerate(values):
        y = HEIGHT * (1 - value)
        corners += [(number * step, y), ((number + 1) * step, y)]
    return corners


def _line(x: float, y: float, width: float) -> Markup:
    return Markup('<line class="axis" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(x, y, x + width, y)


def _text(x: float, y: float, anchor: str, text: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _svg(body: Markup, title: str, height: int, attributes: str = "") -> Markup:
    plot = '<svg class="plot" viewBox="0 0 {} {}" role="{}" aria-label="{}" {}>{}</svg>'
    role = "group" if "<a " in body else "img"  # no link in an image can be reached
    return Markup(plot).format(WIDTH, height, role, title, Markup(attributes), body)


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
    values: defaultdict[_Field, list[Any]] = defaultdict(list)
    for number in numbers:
        for name, value in _values(leaf, number):
            if name in values or len(values) < MAX_SEEN_FIELDS:
                values[name].append(value)
    # A part that only a few samples have must not displace one that nearly all have.
    frequent = sorted(values, key=lambda field: (field.title != _PARTS, -len(values[field])))
    fields = sorted(frequent[:MAX_FIELDS], key=lambda field: (field.title != _PARTS, field.title))
    return len(numbers), [_plotted(field, values[field], base) for field in fields]


def _spread(leaf: ShownLeaf) -> list[int]:
    """Return the numbers of the samples to check, evenly spaced over evenly spaced shards."""
    total, shards = len(leaf), leaf.shards
    if total <= SEEN_SAMPLES or len(shards) <= SEEN_SHARDS:
        numbers = np.linspace(0, total - 1, min(SEEN_SAMPLES, total))
    else:
        chosen = np.linspace(0, len(shards) - 1, SEEN_SHARDS).astype(int).tolist()
        share = SEEN_SAMPLES // SEEN_SHARDS + 1
        edges = [(shards[n].start, shards[n].stop - 1) for n in chosen]
        numbers = np.concatenate([np.linspace(low, high, share) for low, high in edges])
        numbers = numbers[:SEEN_SAMPLES]
    return [int(number) for number in np.unique(numbers.astype(int))]


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


def _plotted(field: _Field, values: list[Any], base: str) -> Plotted:
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
