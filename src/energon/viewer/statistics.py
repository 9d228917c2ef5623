"""Properties of samples, and plots of them as SVG.

Measures are plotted for all samples, since they are read from indexes; other properties for a fixed
number of evenly spaced samples. Each plot names its samples.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from energon.decode.values import decode_json
from energon.errors import EnergonError
from energon.inspect.where import LENGTH, part_facts
from energon.messages import counted, short_number
from energon.sources.measures import of_present
from energon.viewer.shown import ShownLeaf, ShownSample

WIDTH, HEIGHT = 360, 140
HUES = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 4, 4, 20, 34
_ROW, _NAMES = 21, 122


class Bar(NamedTuple):
    """One bar of a plot."""

    label: str
    value: float
    href: str = ""
    """The address that it links to; "" if none."""


def histogram(bars: Sequence[Bar], ticks: Sequence[str], *, title: str, unit: str) -> Markup:
    """Return a histogram above evenly spaced marks, in numbers of samples by a `unit`."""
    most = max((bar.value for bar in bars), default=0) or 1
    width = (WIDTH - _LEFT - _RIGHT) / max(1, len(bars))
    high = HEIGHT - _TOP - _BOTTOM
    axis = '<line class="axis" x1="0" y1="{0}" x2="{1}" y2="{0}"/>'
    body = Markup(axis).format(HEIGHT - _BOTTOM, WIDTH)
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
    last = len(ticks) - 1
    for number, tick in enumerate(ticks):
        x = _LEFT + (WIDTH - _LEFT - _RIGHT) * number / max(1, last)
        anchor = "start" if number == 0 else "end" if number == last else "middle"
        body += _text(x, HEIGHT - _BOTTOM + 14, anchor, tick)
    body += _text(WIDTH / 2, HEIGHT - 3, "middle", unit)
    body += _text(_LEFT, 12, "start", f"up to {counted(int(most), 'sample', grouped=True)}")
    return _svg(body, title, HEIGHT)


def ranking(bars: Sequence[Bar], *, title: str, unit: str) -> Markup:
    """Return horizontal bars, each with its label and its value, above the unit of the values."""
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
    body += _text(_NAMES, 18 + _ROW * len(bars), "start", unit)
    return _svg(body, title, 24 + _ROW * len(bars))


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


def packed(packs: Sequence[tuple[Sequence[int], int]]) -> Markup:
    """Return packed sequences as bars, divided into their samples and padding.

    Args:
        packs: For each packed sequence, the lengths of its samples, and of its padding.
    """
    longest = max((sum(lengths) + pad for lengths, pad in packs), default=0) or 1
    scale = (WIDTH - 60) / longest
    body = Markup()
    for number, (lengths, pad) in enumerate(packs):
        y, x = 4 + number * _ROW, 0.0
        bars = [
            (f"hue{n % (HUES - 2)}", f"sequence {n}", length) for n, length in enumerate(lengths)
        ]
        for style, name, length in (*bars, ("padding", "padding", pad)):
            if length:
                body += Markup(
                    '<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}">'
                    "<title>{}: {:,}</title></rect>"
                ).format(style, x, y, max(0.5, length * scale - 0.5), _ROW - 4, name, length)
                x += length * scale
        full = sum(lengths) / ((sum(lengths) + pad) or 1)
        body += _text(x + 6, y + 14, "start", f"{100 * full:.1f} %")
    title = "packed sequences, and the share of each that is not padding"
    return _svg(body, title, 8 + _ROW * len(packs))


def ticks(low: float, high: float, count: int = 5) -> list[str]:
    """Return the labels of evenly spaced marks from one number to another.

    Example:
        >>> ticks(0, 2000), ticks(0.4, 0.99, 3)
        (['0', '500', '1,000', '1,500', '2,000'], ['0.4', '0.695', '0.99'])
    """
    return [short_number(value) for value in np.linspace(low, high, count).tolist()]


def _pointed(bar: Bar, shape: Markup) -> Markup:
    title = Markup("<title>{}: {:,}</title>").format(bar.label, bar.value)
    group = Markup('<a href="{0}">{1}{2}</a>' if bar.href else "<g>{1}{2}</g>")
    return group.format(bar.href, title, shape)


def _edges(values: Sequence[float], count: int) -> list[tuple[float, float]]:
    step = WIDTH / max(1, count)
    steps = enumerate(values)
    return [((n + end) * step, HEIGHT * (1 - value)) for n, value in steps for end in (0, 1)]


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
_UNITS = {
    "width": "pixels",
    "height": "pixels",
    "ratio": "width / height",
    "duration": "seconds",
    "fps": "frames per second",
    "rate": "Hz",
    "seconds": "seconds",
}
_PARTS = "parts of a sample"
PLOT_SECONDS = 6.0
"""Measures are plotted for all samples until this much time has passed, later ones for some."""


class Plotted(NamedTuple):
    """A plot of a property of samples."""

    name: str
    facts: str
    """Range and median of numbers; of other values, how many different ones there are."""
    plot: Markup
    basis: str
    """Which samples it shows."""


class Text(NamedTuple):
    """A text in JSON."""

    beginning: str
    length: int

    @classmethod
    def of(cls, text: str) -> Text:
        return cls(text[:MAX_VALUE_LETTERS], len(text))


class Property(NamedTuple):
    """A property of samples."""

    title: str
    condition: str
    """Its name in conditions; "" if it has none."""
    unit: str = ""


def statistics(leaf: ShownLeaf, base: str) -> list[Plotted]:
    """Return plots of the properties of the samples of a dataset.

    Bars link to their samples, in the gallery at the address `base`.
    """
    numbers = _spread(leaf)
    values: defaultdict[Property, list[Any]] = defaultdict(list)
    for number in numbers:
        with suppress(EnergonError):
            for name, value in properties(leaf.sample(number)):
                if name in values or len(values) < MAX_SEEN_FIELDS:
                    values[name].append(value)
    measured = dict(_measured(leaf, base, numbers))
    others = {each: of for each, of in values.items() if measure_of(each) not in measured}
    # A part that only a few samples have must not displace one that nearly all have.
    frequent = sorted(others, key=lambda field: (field.title != _PARTS, -len(others[field])))
    plots = [
        _plotted(field, others[field], base)._replace(basis=_basis(len(numbers), len(leaf)))
        for field in frequent[: max(0, MAX_FIELDS - len(measured))]
    ]
    return sorted([*plots, *measured.values()], key=lambda each: (each.name != _PARTS, each.name))


def measure_of(field: Property) -> str:
    """Return the name of the measure that has the values of a property, if there is one."""
    return field.title.replace(": ", ":").removesuffix(".json")


def _measured(leaf: ShownLeaf, base: str, numbers: Sequence[int]) -> Iterator[tuple[str, Plotted]]:
    """Yield the measures, by name: of all samples, while there is time."""
    end = time.monotonic() + PLOT_SECONDS
    for name in leaf.measures[:MAX_FIELDS]:
        with suppress(EnergonError):  # a column with gaps is none, and a stored measure may be old
            whole = time.monotonic() < end
            values = leaf.measure_all(name) if whole else np.empty(0)
            if len(values) < len(leaf):
                values, whole = leaf.measure(name, np.array(numbers)), False
            kind = name.rpartition(":")[2]
            basis = _basis(len(values), len(leaf))
            shown = of_present(name, values)
            if len(shown) < len(values):
                basis += f", {len(values) - len(shown):,} of which have no such part"
            if len(shown):
                field = Property(name.replace(":", ": "), "", _UNITS.get(kind, kind))
                link = partial(_ranked, base, name, values) if whole else lambda *_: ""
                different, counts = np.unique(shown, return_counts=True)
                if len(different) > TOP_VALUES:
                    plot = _distribution(field, shown, link)
                else:
                    pairs = zip(different.tolist(), counts.tolist(), strict=True)
                    plot = _ranking(field, Counter(dict(pairs)), link)
                yield name, plot._replace(basis=basis)


def _ranked(base: str, name: str, values: NDArray[Any], low: float, *_: Any) -> str:
    """Return the address of the samples from one of a measure on, in its order."""
    before = int((values < low).sum())
    return f"{base}?{urlencode({'view': 'table', 'sort': name, 'from': before})}"


def _basis(seen: int, total: int) -> str:
    if seen == total:
        return "the only sample" if total == 1 else f"all {total:,} samples"
    return f"{seen:,} of {total:,} samples, evenly spread"


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


def properties(sample: ShownSample) -> Iterator[tuple[Property, Any]]:
    """Yield the properties of a sample with their values: numbers, labels, instances of `Text`."""
    yield Property(_PARTS, ""), " ".join(sorted(part.label for part in sample.parts))
    for part in sample.parts:
        yield Property(f"{part.label}: bytes", f"{part.name}.size", "bytes"), part.file.size
        is_json = part.name.lower().endswith(("json", "jsn"))
        try:
            if part.name.lower() in ("cls", "cls2"):
                text = part.file.read()[:100].decode("utf-8", "replace").strip()
                yield Property(f"{part.label}: label", f"{part.name}.text"), text
            elif is_json and part.file.size <= MAX_JSON_BYTES:
                yield from _fields(part.label, part.name, decode_json(part.file.read()))
            else:
                is_array = part.name.lower().endswith("npy")
                for name, value in part_facts(part.name, part.file).items():
                    title, unit = name, _UNITS.get(name, "")
                    if name == LENGTH:
                        title = unit = "entries" if is_array else "characters"
                    yield Property(f"{part.label}: {title}", f"{part.name}.{name}", unit), value
        except (EnergonError, ValueError):
            yield Property(f"{part.label}: damaged", ""), "damaged"


def _fields(label: str, part: str, value: Any) -> Iterator[tuple[Property, Any]]:
    if isinstance(value, bool | int | float | str):
        yield Property(label, f"{part}.value"), Text.of(value) if isinstance(value, str) else value
    elif isinstance(value, dict):
        for name, each in list(value.items())[:MAX_FIELDS]:
            condition = f"{part}.{name}" if len(name) < MAX_VALUE_LETTERS else ""
            field = Property(f"{label}.{name[:MAX_VALUE_LETTERS]}", condition)
            if isinstance(each, bool | int | float):
                yield field, each
            elif isinstance(each, str):
                yield field, Text.of(each)


def _plotted(field: Property, values: list[Any], base: str) -> Plotted:
    """Return a histogram of numbers, or a ranking of the most frequent of other values.

    Of texts that are nearly all different, such as captions, a histogram of their lengths.
    """
    texts = [value for value in values if isinstance(value, Text)]
    different = len({text.beginning for text in texts})
    if len(texts) == len(values) and different > max(TOP_VALUES, len(texts) // 2):
        condition = f"{field.condition}.{LENGTH}" if field.condition else ""
        field = Property(f"{field.title}: characters", condition, "characters")
        values = [text.length for text in texts]
    else:
        values = [value.beginning if isinstance(value, Text) else value for value in values]
    if all(map(is_numeric, values)) and len(set(values)) > TOP_VALUES:
        return _distribution(field, np.array(values, np.float64), partial(_between, base, field))
    return _ranking(field, Counter(values), partial(_equals, base, field))


def _ranking(field: Property, counts: Counter[Any], link: Callable[[Any], str]) -> Plotted:
    """Return bars of the most frequent values, numbers in their order."""
    top = counts.most_common(TOP_VALUES)
    if all(map(is_numeric, counts)):
        top.sort()
    bars = [Bar(value_in_words(value), count, link(value)) for value, count in top]
    facts = f"{len(counts):,} different" if len(counts) > 1 else ""
    return Plotted(field.title, facts, ranking(bars, title=field.title, unit="samples"), "")


def _distribution(
    field: Property, values: NDArray[np.float64], link: Callable[[float, float, bool], str]
) -> Plotted:
    """Return a histogram of numbers; `link` returns where a bar leads."""
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, BARS)
    steps = list(pairwise(edges.tolist()))
    bars = [
        Bar(f"{short_number(low)} to {short_number(high)}", n, link(low, high, high == edges[-1]))
        for n, (low, high) in zip(counts.tolist(), steps, strict=True)
    ]
    marks = ticks(float(edges[0]), float(edges[-1]))
    if sum(map(len, marks)) > MAX_LABEL_LETTERS:  # they would overlap
        marks = marks[::2]
    facts = f"{marks[0]} to {marks[-1]}, median {short_number(float(np.median(finite)))}"
    plot = histogram(bars, marks, title=field.title, unit=field.unit or field.title)
    return Plotted(field.title, facts, plot, "")


def is_numeric(value: Any) -> bool:
    """Return whether a value is a number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def value_in_words(value: Any) -> str:
    """Return a number, a label or a text as the pages show it."""
    if is_numeric(value):
        return short_number(value)
    if isinstance(value, Text):
        return value.beginning
    return str(value).lower() if isinstance(value, bool) else str(value)


def _between(base: str, field: Property, low: float, high: float, is_last: bool) -> str:
    if not field.condition:
        return ""
    sign = "<=" if is_last else "<"
    return _where(base, f"{field.condition}>={low!r}", f"{field.condition}{sign}{high!r}")


def _equals(base: str, field: Property, value: Any) -> str:
    if field.title == _PARTS:
        return _where(base, *(f"has:{name}" for name in str(value).split()))
    if not field.condition:
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return _where(base, f"{field.condition}={text}")


def _where(base: str, *terms: str) -> str:
    where = " ".join(map(shlex.quote, terms))
    return f"{base}?{urlencode({'where': where}, errors='replace')}"
