"""Show in a terminal or a notebook how far a run is, and whether its trainer waits."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from energon.errors import ConfigError
from energon.messages import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    Draw = Callable[[RenderableType], None]


REFRESH_SECONDS = 0.5
"""The display is redrawn at most this often."""
DRAWING_SHARE = 0.01
"""It is also redrawn so seldom that drawing takes no larger share of the time than this."""
MAX_DATASETS = 20
"""If there are more datasets, those with the largest shares are shown."""


class ReportingLoader(Protocol):
    """A loader that reports its progress."""

    def __iter__(self) -> Iterator[Any]: ...

    def stats(self, *, flat: bool = False) -> dict[str, Any]:
        """Return statistics since it was created."""

    def report(self) -> dict[str, Any]:
        """Return the samples that it has drawn from each dataset."""


def with_progress(
    loader: ReportingLoader,
    console: Console | None = None,
    *,
    show: Callable[[str], Callable[[str], None]] | None = None,
) -> Iterator[Any]:
    """Yield the batches of a loader, and draw its progress between them.

    No other thread draws, and nothing is drawn into a file: logs have the verdict.

    Args:
        loader: Provides the batches.
        console: Where to draw; None for standard error, or the notebook cell.
        show: Shows HTML in a notebook, and returns a function that replaces it; None uses IPython.
    """
    from rich.console import Console

    console = console or Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield from loader
        return
    opened = _in_cell(show or _show_in_cell) if console.is_jupyter else _in_terminal(console)
    with opened as draw:
        next_at = 0.0
        try:
            for batch in loader:
                begun = time.perf_counter()
                if begun >= next_at:
                    draw(_rendered(loader))
                    now = time.perf_counter()
                    next_at = now + max(REFRESH_SECONDS, (now - begun) / DRAWING_SHARE)
                yield batch
        finally:
            draw(_rendered(loader))


@contextmanager
def _in_terminal(console: Console) -> Iterator[Draw]:
    """Yield a function that draws in a terminal, over what it drew before."""
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        yield lambda drawn: live.update(drawn, refresh=True)


@contextmanager
def _in_cell(show: Callable[[str], Callable[[str], None]]) -> Iterator[Draw]:
    """Yield a function that draws in a notebook cell, where rich itself would need ipywidgets."""
    shown: list[Callable[[str], None]] = []

    def draw(drawn: RenderableType) -> None:
        page = _html(drawn)
        if shown:
            shown[0](page)
        else:
            shown.append(show(page))

    yield draw


def _show_in_cell(html: str) -> Callable[[str], None]:
    from IPython.display import HTML, display

    cell = display(HTML(html), display_id=True)
    return lambda html: cell.update(HTML(html))


def _html(drawn: RenderableType) -> str:
    from rich.console import Console

    console = Console(
        file=io.StringIO(), record=True, width=100, force_jupyter=False, highlight=False
    )
    console.print(drawn)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _rendered(loader: ReportingLoader) -> RenderableType:
    """Return the figures of the last minute, and the progress in each dataset."""
    from rich.console import Group
    from rich.table import Table

    stats = loader.stats()
    minute = stats["last_minute"]
    line = [
        counted(stats["batches"], "batch"),
        f"{minute['samples_per_second']:,.0f} samples/s",
        f"trainer waits {minute['wait_share']:.0%} of the time",
    ]
    for name, about in (("skipped", stats["skips"]), ("failed", stats["failures"])):
        if total := sum(each["count"] for each in about):
            line.append(f"{counted(total, 'sample')} {name}")
    table = Table("dataset", box=None, pad_edge=False)
    for name in ("epochs", "samples", "share"):
        table.add_column(name, justify="right")
    datasets = _datasets(loader)
    largest = sorted(datasets, key=lambda name: -datasets[name]["share"])[:MAX_DATASETS]
    for name in largest:
        about = datasets[name]
        table.add_row(
            name, f"{about['epochs']:.2f}", f"{about['samples']:,}", f"{about['share']:.1%}"
        )
    if len(largest) < len(datasets):
        table.add_row(f"… and {len(datasets) - len(largest)} more")
    return Group(" · ".join(line), *([table] if datasets else []))


def _datasets(loader: ReportingLoader) -> Mapping[str, Mapping[str, Any]]:
    try:
        datasets: Mapping[str, Mapping[str, Any]] = loader.report()["datasets"]
    except ConfigError:
        return {}  # a custom pipeline without such figures
    return datasets
