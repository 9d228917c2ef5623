"""Change the lanes or batch size of a saved run, or complete a state that has those of one rank.

States continue exactly with the number of lanes they were saved with. Another number of lanes is
for world sizes that do not divide it: the position in every dataset is kept to the sample, the
number of the next batch to within one per new lane. Samples held back for packing or groups count
as unread.

An era of a run is a part with fixed lanes. Lanes do not read at the same pace where hooks skip
samples, so what they have drawn from a source is not quite its first D draws. Those who come after
them begin with draw D, D being how many were made: so the position is kept to the sample, and every
epoch that begins later is exact. What was drawn behind D comes again, and as many before D are left
out: those are counted here.

For another batch size, each batch becomes several *parts*, which are consecutive batches of the run
from then on, so the samples of a global batch stay together. A trainer that takes as many more
batches for each step therefore gets the same samples in it. Each part is a batch of a lane of its
own, and parts can be divided again, or joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from energon.errors import ConfigError, StateError
from energon.loader.state import (
    COVERS,
    MAX_LANES,
    LanePosition,
    batches_of_lanes,
    read_positions,
    reports_damage,
)
from energon.messages import counted
from energon.plan.dealt import Deal
from energon.plan.open_windows import rows_of_open_windows, unpacked_rows
from energon.plan.recipe import WHOLE, PlanRecipe
from energon.plan.rows import Plan, StreamPlan, WindowPlan
from energon.stages.base import State, unpack_some


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


StateAt = Callable[[int, Sequence[int]], State]
"""Returns the state of a lane before a row, given the rows at which its mix has changed."""


class Relaned(NamedTuple):
    """A state with another number of lanes, and the cost of the change."""

    state: State
    again: int
    """Samples of the epochs in progress that may be repeated."""
    left_out: int
    """Samples of these epochs that may be missed."""

    def describe(self) -> str:
        """Describe the lanes, and what the change costs."""
        lanes = counted(self.state["lanes"], "lane")
        if not (self.again or self.left_out):
            return f"{lanes}; no sample is repeated or missed"
        return (
            f"{lanes}; of the epochs in progress, up to {counted(self.again, 'sample')} may be "
            f"repeated and up to {self.left_out:,} may be missed; all later epochs are exact"
        )


@reports_damage()
def relane(state: State, lanes: int, *, streams: int | None = None) -> Relaned:
    """Return a merged state of all lanes, converted to another number of lanes.

    Args:
        state: The merged state.
        lanes: The new number.
        streams: How many streams the lanes share; None for one each, see `DealtPlan`.

    Raises:
        StateError: If lanes are missing, or the pipeline has no plan.
    """
    old, fingerprint = state["lanes"], state["fingerprint"]
    positions = read_positions(state, range(old))
    recipe = PlanRecipe.from_json(fingerprint)
    deal = recipe.deal(old)
    rows: dict[int, int] = {}
    changes: dict[int, tuple[int, ...]] = {}
    num_held = 0
    for lane, position in positions.items():
        rows[lane], changed, held = _rows_done(position, fingerprint)
        num_held += held
        stream = deal.stream_of(lane)
        changes[stream] = max(changed, changes.get(stream, ()), key=len)
    ended = end_era(
        recipe,
        rows,
        streams=streams,
        stripe=(fingerprint["batch_size"] or 1) * recipe.parts,
        changes=changes,
    )
    skip_rows: Mapping[int, list[int]] = {}
    if "balance" in fingerprint:
        # Which samples lanes have exchanged follows from costs, of which a state has only the name.
        num_held += 0 if "window_rows" in fingerprint else rows_of_open_windows(fingerprint, rows)
    else:
        skip_rows = _moved(positions, rows, recipe, changes, ended.recipe(lanes))
    relaned = with_lanes(state, recipe, ended.recipe, _positions(positions, lanes, skip_rows))
    for name in ("micro_batches", "window_rows"):
        relaned["fingerprint"].pop(name, None)
    return Relaned(
        relaned,
        sum(ended.again.values()) + num_held,
        sum(ended.left_out.values()) + num_held,
    )


def add_lanes_of_other_ranks(
    state: State, rank: int, world_size: int, state_at: StateAt, *, batch_rows: int | None
) -> State | None:
    """Return the state of one rank with the lanes of all; None if these cannot be estimated.

    All ranks have delivered equally many batches.

    Args:
        state: The state.
        rank: Its rank.
        world_size: How many ranks saved one.
        state_at: Returns the state of a lane in which no sample waits for others.
        batch_rows: Rows of each batch; None to estimate them from the lanes of this rank.
    """
    if "window_rows" in state["fingerprint"]:
        return None  # which packs a lane has had does not follow from their number
    own = read_positions(state, map(int, state["positions"]))
    done = {lane: _rows_done(position, state["fingerprint"]) for lane, position in own.items()}
    rows = sum(row for row, _, _ in done.values())
    batches = sum(position.batches for position in own.values())
    per_batch = Fraction(rows, batches or 1) if batch_rows is None else Fraction(batch_rows)
    if any(changes for _, changes, _ in done.values()):
        return None  # the rows at which the mix changed differ from stream to stream
    of_epoch = sum(position.epoch_batches for position in own.values())
    first = batches_of_lanes(state, rank, world_size, before=of_epoch)
    positions = {}
    for lane, count in batches_of_lanes(state, rank, world_size).items():
        row = round(count * per_batch)
        positions[str(lane)] = LanePosition(
            batches=count,
            epoch_batches=count - first[lane],
            state=state_at(row, ()) if row else None,
            ended=all(position.ended for position in own.values()),
        ).to_json()
    return {**state, "positions": {**positions, **state["positions"]}}


def divide_lanes(state: State, times: int, state_at: StateAt) -> State:
    """Return a merged state of all lanes, each of which becomes several that take turns.

    So the batches of the run and their order stay the same. Samples that wait for others count as
    unread.

    Args:
        state: The merged state.
        times: How many lanes each of them becomes.
        state_at: Returns the state of a lane in which no sample waits for others.

    Raises:
        StateError: If there would be too many lanes, or the pipeline has no plan.
    """
    fingerprint, lanes = state["fingerprint"], state["lanes"]
    if "balance" in fingerprint:
        raise StateError(
            f"the {lanes} lanes of the run exchange samples, so that the costs of its batches are "
            "equal, and cannot be divided; load it with as many lanes"
        )
    if lanes * times > MAX_LANES:
        raise StateError(f"{lanes:,} lanes would become {lanes * times:,}, more than {MAX_LANES:,}")
    recipe = PlanRecipe.from_json(fingerprint)
    turns = Deal(times, 1, recipe.lane_stripe)
    positions = {}
    for lane, position in read_positions(state, range(lanes)).items():
        row, changes, _ = _rows_done(position, fingerprint)
        skipped = [turns.lane_of(0, row) for row in position.skip_rows]
        for turn in range(times):
            own_row = turns.rows_before(turn, row)
            before = position.batches - position.epoch_batches
            batches, first = (-(-(count - turn) // times) for count in (position.batches, before))
            positions[str(lane + lanes * turn)] = LanePosition(
                batches=batches,
                epoch_batches=batches - first,
                state=state_at(own_row, changes) if own_row or changes else None,
                skip_rows=tuple(row for owner, row in skipped if owner == turn),
                ended=position.ended,
            ).to_json()
    after = replace(recipe, streams=recipe.deal(lanes).streams)
    return with_lanes(state, recipe, after, positions)


def with_lanes(
    state: State, before: PlanRecipe, after: PlanRecipe, positions: Mapping[str, Any]
) -> State:
    """Return a merged state with another order, and with the positions of all of its lanes."""
    fingerprint, lanes = state["fingerprint"], len(positions)
    mix = {"mix": fingerprint["mix"]} if "mix" in fingerprint else {}
    kept = {name: value for name, value in fingerprint.items() if name not in before.to_json()}
    return {
        **{name: value for name, value in state.items() if name != COVERS},
        "lanes": lanes,
        "fingerprint": {**after.to_json(), **mix, **kept, "lanes": lanes},
        "positions": positions,
    }


def _moved(
    positions: Mapping[int, LanePosition],
    rows: Mapping[int, int],
    recipe: PlanRecipe,
    changes: Mapping[int, tuple[int, ...]],
    after: Plan,
) -> dict[int, list[int]]:
    """Return, by lane, the future rows that are to be skipped."""
    rows_by_lane: dict[int, list[int]] = {}
    plan, deal = recipe(len(positions)), recipe.deal(len(positions))
    for lane, position in positions.items():
        ahead = [row for row in position.skip_rows if row >= rows[lane]]
        if not ahead:
            continue
        changed = plan.with_changes(lane, changes[deal.stream_of(lane)])
        columns = (column.tolist() for column in changed.at(lane, np.array(ahead, np.int64)))
        for leaf, epoch, ordinal in zip(*columns, strict=True):
            with suppress(ConfigError):  # drawn with replacement
                if (lane_row := after.find(leaf, epoch, ordinal)) is not None:
                    new_lane, row = lane_row
                    rows_by_lane.setdefault(new_lane, []).append(row)
    return rows_by_lane


def _positions(
    positions: Mapping[int, LanePosition], lanes: int, skip_rows: Mapping[int, list[int]]
) -> dict[str, Any]:
    """Return new positions, as JSON, that amount to as many batches as the old ones together."""
    total = sum(position.batches for position in positions.values())
    of_epoch = sum(position.epoch_batches for position in positions.values())
    batches = (total + lanes // 2) // lanes
    ended = all(position.ended for position in positions.values())
    return {
        str(lane): LanePosition(
            batches=batches,
            epoch_batches=(of_epoch + lanes - 1 - lane) // lanes,
            skip_rows=tuple(skip_rows.get(lane, ())),
            ended=ended,
        ).to_json()
        for lane in range(lanes)
    }


def rows_read(saved: State | None) -> tuple[int, tuple[int, ...]]:
    """Return how many rows a lane has read, and the rows of its stream at which the mix changed."""
    if saved is None:
        return 0, ()
    (rows, changes), _ = unpack_some(saved, {"read": int, "changes": list})
    return rows, tuple(changes)


def _rows_done(
    position: LanePosition, fingerprint: Mapping[str, Any]
) -> tuple[int, tuple[int, ...], int]:
    """Return how many rows of a lane are done with, those of changes, and how many are held back.

    Rows of changes are rows of its stream at which the mix changed.
    """
    saved = position.saved_state()
    read, changes = rows_read(saved)
    held = min(read, _held(saved, fingerprint.get("packing_buffer_size") or 0))
    done, open_rows = unpacked_rows(fingerprint, read - held)
    return done, changes, held + open_rows


def _held(saved: Any, packing: int) -> int:
    """Return how many of the rows read by a lane are waiting for others."""
    if not isinstance(saved, Mapping):
        return 0
    waiting = saved.get("waiting")
    held = len(waiting) if isinstance(waiting, list) else 0
    if "carried" in saved and "group" in saved:
        held += packing
    return held + sum(_held(value, packing) for value in saved.values())


class IndivisibleError(StateError):
    """The batches of a saved run cannot be converted to another size."""


def rebatch(state: State, batch_size: int, state_at: StateAt) -> State:
    """Return a merged state of all lanes, converted to another batch size.

    Args:
        state: The merged state.
        batch_size: The new size.
        state_at: Returns the state of a lane in which no sample waits for others.

    Raises:
        IndivisibleError: If batches of this size are not parts of those of the run, or the samples
            of its next batches do not follow from their number. All ranks of a run find the same.
        StateError: If lanes are missing.
    """
    fingerprint = state["fingerprint"]
    if "balance" in fingerprint:
        raise IndivisibleError("lanes exchange the samples of whole batches")
    recipe, before = PlanRecipe.from_json(fingerprint), fingerprint["batch_size"]
    whole = before * recipe.parts
    if whole % batch_size or recipe.stripe != whole:
        raise IndivisibleError(f"batches of {batch_size} are not equal parts of those of {whole}")
    if state["lanes"] * before > MAX_LANES * batch_size:
        raise IndivisibleError(f"batches of {batch_size} would take too many lanes")
    lanes = [
        _LaneRows.of(position) for position in read_positions(state, range(state["lanes"])).values()
    ]
    common = lcm(before, batch_size)
    join, divide = Deal(common // before, 1, before), Deal(common // batch_size, 1, batch_size)
    plan = replace(recipe, parts=whole // common)(len(lanes) // join.lanes)
    joined = [
        _joined(lanes[lane * join.lanes :][: join.lanes], join, plan.num_rows(lane))
        for lane in range(plan.lanes)
    ]
    divided = [part for lane in joined for part in _divided(lane, divide)]
    positions = {str(v): each.position(state_at).to_json() for v, each in enumerate(divided)}
    changed = with_lanes(state, recipe, replace(recipe, parts=whole // batch_size), positions)
    changed["fingerprint"]["batch_size"] = batch_size
    return changed


class _LaneRows(NamedTuple):
    """How far a lane has come: `row` is the next one that it reads."""

    row: int
    batches: int
    epoch_batches: int
    changes: tuple[int, ...]
    skip_rows: tuple[int, ...]
    ended: bool

    @classmethod
    def of(cls, position: LanePosition) -> _LaneRows:
        """Return it from a saved position, in which no sample may wait for others."""
        saved = position.saved_state()
        row, changes = rows_read(saved)
        if not is_at_row(saved, row):
            raise IndivisibleError(
                "samples are buffered for packing or grouping, or a generator hook has not finished"
            )
        return cls(
            row,
            position.batches,
            position.epoch_batches,
            changes,
            position.skip_rows,
            position.ended,
        )

    def position(self, state_at: StateAt) -> LanePosition:
        """Return the position to be saved."""
        return LanePosition(
            batches=self.batches,
            epoch_batches=self.epoch_batches,
            state=state_at(self.row, self.changes) if self.row or self.changes else None,
            skip_rows=self.skip_rows,
            ended=self.ended,
        )


def is_at_row(saved: Any, row: int) -> bool:
    """Return whether the state of a stage says that it continues at a row, and nothing else."""
    if not isinstance(saved, Mapping):
        return saved in (0, None, [])
    return all(
        value == row if name in ("row", "read") else is_at_row(value, row)
        for name, value in saved.items()
        if name != "changes"
    )


def _divided(lane: _LaneRows, deal: Deal) -> Iterator[_LaneRows]:
    """Yield the lanes of the parts of each batch of a lane."""
    skipped = [deal.lane_of(0, row) for row in lane.skip_rows]
    for part in range(deal.lanes):
        row = deal.rows_before(part, lane.row)
        # The last batch of data that ends may be too small to have all parts.
        missing = max(0, lane.batches - -(-row // deal.stripe))
        yield lane._replace(
            row=row,
            batches=lane.batches - missing,
            epoch_batches=max(0, lane.epoch_batches - missing),
            skip_rows=tuple(row for owner, row in skipped if owner == part),
        )


def _joined(lanes: Sequence[_LaneRows], deal: Deal, end: int | None) -> _LaneRows:
    """Return the lane whose batches are those of some lanes, joined; `end` is where it ends."""
    row = sum(lane.row for lane in lanes)
    skipped: list[Any] = []
    for part, lane in enumerate(lanes):
        is_behind = lane.batches != lanes[0].batches and row != end
        if is_behind or lane.row != deal.rows_before(part, row):
            raise IndivisibleError(
                "some of the batches that would be joined were delivered already"
            )
        skipped += deal.stream_rows(part, np.array(lane.skip_rows, np.int64)).tolist()
    return lanes[0]._replace(row=row, skip_rows=tuple(sorted(skipped)))
