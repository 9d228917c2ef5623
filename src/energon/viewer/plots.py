"""Plots as SVG, in the colors of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

WIDTH, HEIGHT = 640, 160
_LEFT, _BOTTOM = 8, 20
HUES = 8


def bars(values: Sequence[float], labels: Sequence[str], *, title: str) -> Markup:
    """Return a bar for each value; what each stands for is shown when it is pointed at."""
    most = max(values, default=0) or 1
    width = (WIDTH - _LEFT) / max(1, len(values))
    body = Markup()
    for number, (value, label) in enumerate(zip(values, labels, strict=True)):
        height = (HEIGHT - _BOTTOM) * value / most
        x, y = _LEFT + number * width, HEIGHT - _BOTTOM - height
        body += Markup(
            '<rect class="hue0" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
            "<title>{}: {:,}</title></rect>"
        ).format(x, y, max(1.0, width - 1), height, label, value)
    return _plot(body, title, labels[:1], labels[-1:])


def shares(series: Mapping[str, Sequence[float]], marks: Sequence[str], *, title: str) -> Markup:
    """Return shares over time, one above the other.

    Args:
        series: For each name its share between one mark and the next.
        marks: What the marks are called.
        title: What the plot shows.
    """
    count = len(marks) - 1
    body, below = Markup(), [0.0] * max(0, count)
    for number, (name, values) in enumerate(series.items()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        points = [*_edges(above, count), *reversed(_edges(below, count))]
        body += Markup('<polygon class="hue{}" points="{}"><title>{}</title></polygon>').format(
            number % HUES, " ".join(f"{x:.1f},{y:.1f}" for x, y in points), name
        )
        below = above
    return _plot(body, title, marks[:1], marks[-1:])


def _edges(values: Sequence[float], count: int) -> list[tuple[float, float]]:
    step = (WIDTH - _LEFT) / max(1, count)
    corners = []
    for number, value in enumerate(values):
        y = (HEIGHT - _BOTTOM) * (1 - value)
        corners += [(_LEFT + number * step, y), (_LEFT + (number + 1) * step, y)]
    return corners


def _plot(body: Markup, title: str, first: Sequence[str], last: Sequence[str]) -> Markup:
    y = HEIGHT - 5
    text = Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>')
    ends = Markup().join(
        [
            *(text.format(_LEFT, y, "start", each) for each in first),
            *(text.format(WIDTH, y, "end", each) for each in last),
        ]
    )
    plot = '<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}</svg>'
    return Markup(plot).format(WIDTH, HEIGHT, title, body, ends)
