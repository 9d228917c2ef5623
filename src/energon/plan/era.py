"""End an era of a run, that is, a part with fixed lanes, to continue with other lanes.

Lanes do not read at the same pace where hooks skip samples, so what they have drawn from a source
is not quite its first D draws. Those who come after them begin with draw D, D being how many were
made: so the position is kept to the sample, and every epoch that begins later is exact. What was
drawn behind D comes again, and as many before D are left out: those are counted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from energon.plan.dealt import Deal
from energon.plan.recipe import WHOLE, PlanRecipe
from energon.plan.rows import StreamPlan, WindowPlan


class EndedEra(NamedTuple):
    """How a run continues with other lanes."""

    recipe: PlanRecipe
    """Its order, for any number of lanes from now on."""
    again: Mapping[str, int]
    """For each source, how many of the samples that come next were delivered before."""
    left_out: Mapping[str, int]
    """For each source, how many samples are left out of the epochs in progress."""


def end_era(
    recipe: PlanRecipe,
    rows: Mapping[int, int],
    *,
    streams: int | None,
    stripe: int,
    changes: Mapping[int, tuple[int, ...]] | None = None,
) -> EndedEra:
    """Return how a run continues after it has completed some rows of all its lanes.

    Args:
        recipe: Its order until now.
        rows: For each lane, how many of its rows are done with.
        streams: How many streams the lanes share from now on; None for as many as there are.
        stripe: Consecutive rows of a stream that go to the same lane from now on.
        changes: For each lane, at which rows of its stream the mix was changed.
    """
    lanes = len(rows)
    deal = recipe.deal(lanes)
    done = [
        _Done(recipe, deal, stream, rows, (changes or {}).get(stream, ()))
        for stream in range(deal.streams)
    ]
    names = recipe.source_names if recipe.kind == "blend" else [WHOLE]
    before = recipe.eras[-1]["draws"] if recipe.eras else {}
    draws = {
        name: before.get(name, 0) + sum(each.count(source) for each in done)
        for source, name in enumerate(names)
    }
    again = {
        name: sum(each.count_behind(source, draws[name]) for each in done)
        for source, name in enumerate(names)
    }
    era = {
        "samples": (recipe.eras[-1]["samples"] if recipe.eras else 0) + sum(rows.values()),
        "draws": {**before, **draws},
        "streams": deal.streams,
    }
    goes_on = replace(recipe, streams=streams, stripe=stripe, eras=(*recipe.eras, era), past=())
    return EndedEra(goes_on, again, dict(again))


class _Done:
    """The draws of the lanes of a stream in an era.

    Args:
        recipe: The order.
        deal: Which lanes share which stream.
        stream: Which stream.
        rows: For each lane, how many of its rows are done with.
        changes: At which rows of the stream the mix was changed.
    """

    def __init__(
        self,
        recipe: PlanRecipe,
        deal: Deal,
        stream: int,
        rows: Mapping[int, int],
        changes: tuple[int, ...],
    ) -> None:
        self._stream = stream
        whole = recipe.of_streams(deal.streams).with_changes(stream, changes)
        plan, lanes = recipe(deal.lanes), deal.lanes_of(stream)
        # All before `start` is done with; behind it, what some lanes have come further.
        starts = [int(plan.stream_rows(v, np.array([rows[v]], np.int64))[0]) for v in lanes]
        start = min(starts)
        single = [
            plan.stream_rows(v, np.arange(plan.rows_before(v, start), rows[v], dtype=np.int64))
            for v in lanes
        ]
        rows_done = np.concatenate(single)
        if isinstance(whole, WindowPlan):
            first = whole.window_of(stream, start)
            rest = np.arange(first, start, dtype=np.int64)
            rows_done = whole.unmixed(stream, np.concatenate((rest, rows_done)))
            start = first
        self._plan: StreamPlan = whole.plan if isinstance(whole, WindowPlan) else whole
        self._counts = self._plan.drawn(stream, start)
        self._source, self._numbers = self._plan.numbers(stream, rows_done)

    def count(self, source: int) -> int:
        """Return how often a source was drawn from."""
        return int(self._counts[source]) + int((self._source == source).sum())

    def count_behind(self, source: int, total: int) -> int:
        """Return how many of these draws are beyond the first `total` of the run."""
        before = self._plan.quota(self._stream, source, total)
        behind = (self._source == source) & (self._numbers >= total)
        return max(0, int(self._counts[source]) - before) + int(behind.sum())
