"""Draw what a planned run will read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from energon.counting import counted
from energon.errors import ConfigError
from energon.extra import needs_extra
from energon.inspect.plan_report import Floats, counts_over_time, shares_of, summary
from energon.inspect.planned_run import PlannedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 120
MAX_DRAWN = 12
"""Datasets that are drawn by themselves; the others, of which less is read, are put together."""
_REST_COLOR = "#c7c7c7"


class _Group(NamedTuple):
    """Datasets that are drawn as one."""

    name: str
    leaves: list[int]
    color: Any


def draw_run(run: PlannedRun, about: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw shares and epochs over a run, and how each dataset is read and mixed.

    Args:
        run: The run.
        about: What `describe_run` said of it.
        path: Where to; the ending says as what: .png, .svg or .pdf.

    Raises:
        ConfigError: If the ending is that of no picture, or the file cannot be written.
        MissingExtraError: If matplotlib is not installed.
    """
    with needs_extra("plot", "plots need matplotlib"):
        from matplotlib.figure import Figure
    marks, counts = counts_over_time(run, batches=about["batches"], points=POINTS)
    groups = _groups(run.names, counts[-1])
    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(_title(about), fontsize=11)
    (shares, reads), (epochs, mixing) = figure.subplots(2, 2, width_ratios=(3, 2))
    _draw_shares(shares, marks, counts, groups)
    _draw_epochs(epochs, marks, counts / [len(leaf.source) for leaf in run.leaves], groups)
    _draw_reads(reads, about, groups)
    _draw_mixing(mixing, about, groups)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be drawn: {error}") from error


def _groups(names: Sequence[str], drawn: Floats) -> list[_Group]:
    from matplotlib import colormaps

    order = np.argsort(-drawn, kind="stable").tolist()
    colors = [color for color in colormaps["tab20"].colors if len(set(color)) > 1]  # type: ignore[attr-defined]
    own = sorted(order[:MAX_DRAWN])
    groups = [_Group(names[leaf], [leaf], colors[n]) for n, leaf in enumerate(own)]
    rest = sorted(order[MAX_DRAWN:])
    return [*groups, _Group(counted(len(rest), "other"), rest, _REST_COLOR)] if rest else groups


def _title(about: Mapping[str, Any]) -> str:
    shared = sum(each["samples"] for each in about["shared_samples"])
    lines = [
        summary(about),
        f"each rank reads {about['rank']['bytes'] / 1e9:,.2f} GB with "
        f"{counted(about['rank']['requests'], 'request', grouped=True)}; "
        f"{counted(shared, 'sample is', 'samples are', grouped=True)} in several datasets",
    ]
    return "\n".join(lines)


def _draw_shares(
    axes: Axes, marks: Sequence[int], counts: Floats, groups: Sequence[_Group]
) -> None:
    shares = shares_of(counts) * 100
    columns = [shares[:, group.leaves].sum(axis=1) for group in groups]
    # A share holds between two marks, so it is drawn as a step.
    steps = [np.repeat(column, 2) for column in columns]
    places = np.repeat(marks, 2)[1:-1]
    axes.stackplot(places, steps, colors=[group.color for group in groups])
    axes.set(title="share of each dataset (%)", xlim=(0, marks[-1]), ylim=(0, 100))
    axes.set_xlabel("batches of all ranks")


def _draw_epochs(
    axes: Axes, marks: Sequence[int], epochs: Floats, groups: Sequence[_Group]
) -> None:
    for group in groups:
        if len(group.leaves) == 1:
            axes.plot(marks, epochs[:, group.leaves[0]], color=group.color)
    axes.set(title="epochs", xlim=(0, marks[-1]), ylim=(0, None))
    axes.set_xlabel("batches of all ranks")
    axes.grid(alpha=0.3)


def _draw_reads(axes: Axes, about: Mapping[str, Any], groups: Sequence[_Group]) -> None:
    leaves = [*about["leaves"].values()]
    world_size = about["topology"]["world_size"]
    sums = [
        [sum(leaves[leaf][key] for leaf in group.leaves) / world_size for group in groups]
        for key in ("bytes", "requests")
    ]
    megabytes = [count / 1e6 for count in sums[0]]
    bars = _draw_bars(axes, groups, megabytes)
    axes.bar_label(bars, [f" {count:,.0f} requests" for count in sums[1]], fontsize=8)
    axes.set(title="MB that each rank reads", xlim=(0, max(megabytes, default=0) * 1.35 or 1))


def _draw_mixing(axes: Axes, about: Mapping[str, Any], groups: Sequence[_Group]) -> None:
    leaves = [*about["leaves"].values()]
    scores = [
        shuffle["neighbour_distance"]
        if len(group.leaves) == 1 and (shuffle := leaves[group.leaves[0]]["shuffle"])
        else 0
        for group in groups
    ]
    bars = _draw_bars(axes, groups, scores)
    labels = [f"{score:.2f}" if score else "-" for score in scores]
    axes.bar_label(bars, labels, label_type="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set(title="mixing (1: as a perfect shuffle)", xlim=(0, max(1.2, *scores) * 1.15))


def _draw_bars(axes: Axes, groups: Sequence[_Group], values: Sequence[float]) -> Any:
    names = [group.name for group in groups]
    bars = axes.barh(range(len(groups)), values, color=[group.color for group in groups])
    axes.set_yticks(range(len(groups)), names, fontsize=8)
    axes.invert_yaxis()
    return bars
