"""Plots as SVG, in the colors of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

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
    return _plot(body, title, HEIGHT)


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
    return _plot(body, title, 8 + _ROW * len(bars))


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
    return _plot(body, title, HEIGHT, 'preserveAspectRatio="none"') + ends


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
        for place, length in enumerate([*row, pad]):
            is_padding = place == len(row)
            if not length:
                continue
            name = "padding" if is_padding else f"sequence {place}"
            body += Markup(
                '<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}">'
                "<title>{}: {:,}</title></rect>"
            ).format(
                "padding" if is_padding else f"hue{place % (HUES - 2)}",
                *(x, y, max(0.5, length * scale - 0.5), _ROW - 4, name, length),
            )
            x += length * scale
        full = sum(row) / ((sum(row) + pad) or 1)
        body += _text(x + 6, y + 14, "start", f"{100 * full:.1f} %")
    return _plot(
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


def _plot(body: Markup, title: str, height: int, attributes: str = "") -> Markup:
    plot = '<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}" {}>{}</svg>'
    return Markup(plot).format(WIDTH, height, title, Markup(attributes), body)
