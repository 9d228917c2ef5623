"""Describe, compare and edit saved states; an edited run continues exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError, StateError
from energon.inspect.saved_run import SavedRun
from energon.loader.relane import rows_read
from energon.loader.state import LanePosition, differences, read_positions, reports_damage
from energon.messages import counted, nearest
from energon.plan.balance import Balance, BalancedOrder
from energon.plan.blends.curve import Curve
from energon.plan.fill import Budget
from energon.plan.open_windows import drawn_rows, rows_of_whole_windows
from energon.plan.packs import PackedOrder
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import Plan, Rows
from energon.stages.base import State
from energon.stages.read import begin_changes, rows_of_changes

if TYPE_CHECKING:
    from energon.inspect.encoded_run import EncodedRun


def describe_position(state: State) -> Iterator[str]:
    """Yield lines that say where in each dataset a run is.

    Raises:
        StateError: If it is not the state of a plan.
    """
    with reports_damage():
        yield from _position(state)


def _position(state: State) -> Iterator[str]:
    fingerprint = state["fingerprint"]
    moves = _moves_ahead(state)
    for name, drawn in drawn_samples(state).items():
        samples = fingerprint["leaves"][name]["samples"]
        of = counted(samples, "sample", grouped=True)
        epoch, done = divmod(round(drawn), samples)
        then = f"; {_goes_on(state, name, moves[name])}" if name in moves else ""
        yield f"{name}: epoch {epoch:,}, after {done:,} of {of}; {drawn:,.0f} in all{then}"


def _goes_on(state: State, name: str, position: int) -> str:
    return f"then continues from {epoch_in_words(state, name, position)}, as edited"


def _moves_ahead(state: State) -> dict[str, int]:
    """Return the positions that an edit has set and some lanes have not reached yet, by dataset.

    What was mixed before the edit is read first.
    """
    past = state["fingerprint"].get("mix_before") or []
    moves: dict[str, int] = past[-1].get("then", {}) if past else {}
    if not moves:
        return {}
    for plan, stream, rows, changes in _streams(state):
        moved, unmoved = (
            plan.with_changes(stream, each).leaf_counts(stream, rows)
            for each in (changes, changes[:-1])
        )
        if (moved == unmoved).all():
            return moves
    return {}


def compare_states(first: State, second: State) -> Iterator[str]:
    """Yield lines that say how two states differ; none if they do not.

    Raises:
        StateError: If one is not the state of a plan.
    """
    with reports_damage():
        yield from _differences(first, second)


def _differences(first: State, second: State) -> Iterator[str]:
    fingerprints = [copy.deepcopy(each["fingerprint"]) for each in (first, second)]
    yield from _compare_weights(*fingerprints)
    for path, text in differences(*fingerprints):
        if path == "mix_before":  # the mixes themselves: that of today is compared already
            counts = [len(each["fingerprint"].get(path) or []) for each in (first, second)]
            yield f"changes of the mix: {counts[0]} became {counts[1]}"
            continue
        yield text.replace(": saved ", ": ", 1).replace(", now ", " became ", 1)
    if first["lanes"] != second["lanes"]:
        yield f"{counted(first['lanes'], 'lane')} became {second['lanes']}"
    batches = [sum(p.batches for p in _positions(state).values()) for state in (first, second)]
    if batches[0] != batches[1]:
        more = counted(abs(batches[1] - batches[0]), "batch", grouped=True)
        yield f"batches: {more} {'more' if batches[1] > batches[0] else 'fewer'}"
    drawn = [drawn_samples(state) for state in (first, second)]
    for name in dict.fromkeys([*drawn[0], *drawn[1]]):
        old, new = (round(each.get(name, 0)) for each in drawn)
        if old != new:
            more = counted(abs(new - old), "sample", grouped=True)
            yield (
                f"{name}: {more} {'further' if new > old else 'back'}, "
                f"{epoch_in_words(first, name, old)} became {epoch_in_words(second, name, new)}"
            )
    before, moves = _moves_ahead(first), _moves_ahead(second)
    yield from (f"{n}: {_goes_on(second, n, p)}" for n, p in moves.items() if before.get(n) != p)
    left_out = [sum(len(p.skip_rows) for p in _positions(s).values()) for s in (first, second)]
    if left_out[0] != left_out[1]:
        yield f"skipped rows: {left_out[0]} became {left_out[1]}"


def _compare_weights(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """Yield which datasets of a blend have other weights, and make these equal in `first`."""
    if not (first.get("mix") and second.get("mix")):
        return
    others = dict(mix_entries(second["mix"]))
    for name, entry in mix_entries(first["mix"]):
        weight = others.get(name, entry)["weight"]
        if weight != entry["weight"]:
            words = [weight_in_words(each) for each in (entry["weight"], weight)]
            yield f"{name}: weight {words[0]} became {words[1]}"
            entry["weight"] = weight


def weight_in_words(saved: Any) -> str:
    """Return a weight of a saved mix in words."""
    return "by size" if saved is None else curve_in_words(Curve.from_json(saved))


def curve_in_words(curve: Curve) -> str:
    """Return a weight over a run in words.

    Example:
        >>> from energon.plan.blends.curve import Point
        >>> curve_in_words(Curve((Point(0, 0), Point(1000, 1), Point(2000, 3, ramp=True))))
        '0; 1 from sample 1,000; ramp to 3 at sample 2,000'
    """
    unit = {"samples": "sample", "batches": "batch", "rows": "row"}[curve.unit]
    words = [f"{curve.points[0].value:g}"]
    for point in curve.points[1:]:
        at = f"{unit} {point.position:,}"
        words.append(
            f"ramp to {point.value:g} at {at}" if point.ramp else f"{point.value:g} from {at}"
        )
    return "; ".join(words)


def _positions(state: State) -> dict[int, LanePosition]:
    return read_positions(state, map(int, state["positions"]))


def epoch_in_words(state: State, name: str, drawn: int) -> str:
    """Return which epoch of a dataset this many samples reach, and where in it."""
    leaf = state["fingerprint"]["leaves"].get(name)
    if leaf is None:
        return "not read"
    epoch, done = divmod(drawn, leaf["samples"])
    return f"epoch {epoch:,} after {done:,} samples"


def drawn_samples(
    state: State, rows_of: Callable[[Mapping[str, Any], int], int] = drawn_rows
) -> dict[str, float]:
    """Return how many samples of each dataset the lanes have drawn.

    Args:
        state: The state of a run.
        rows_of: Returns how many rows of a lane count, given the fingerprint and how many it has
            read.
    """
    recipe = PlanRecipe.from_json(state["fingerprint"])
    drawn = np.zeros(len(recipe.leaves))
    for plan, stream, rows, changes in _streams(state, rows_of):
        drawn += plan.with_changes(stream, changes).leaf_counts(stream, rows)
    before: Mapping[str, int] = recipe.eras[-1]["draws"] if recipe.eras else {}
    return {
        leaf.uid: round(count) + before.get(leaf.uid, 0)
        for leaf, count in zip(recipe.leaves, drawn.tolist(), strict=True)
        if leaf.uid in state["fingerprint"]["leaves"]
    }


def _streams(
    state: State, rows_of: Callable[[Mapping[str, Any], int], int] = drawn_rows
) -> Iterator[tuple[Plan, int, int, tuple[int, ...]]]:
    """Yield each stream of a run: the plan, its number, the rows read, and its changes.

    Streams are used, since an edit that sets a position changes their counts.
    """
    recipe = PlanRecipe.from_json(state["fingerprint"])
    deal = recipe.deal(state["lanes"])
    plan = recipe.of_streams(deal.streams)
    positions = _positions(state)
    for stream in range(deal.streams):
        saved = [positions[n].saved_state() for n in deal.lanes_of(stream) if n in positions]
        begun = [each for each in saved if each is not None]
        changes = rows_of_changes(begun[0] if begun else None, len(recipe.past))
        rows = sum(rows_of(state["fingerprint"], each["read"]) for each in begun)
        yield plan, stream, rows, changes


def mix_entries(mix: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the datasets of a saved mix, at all levels, with what it says about them."""
    for name, entry in mix["blend"].items():
        if "of" in entry:
            yield from mix_entries(entry["of"])
        else:
            yield name, entry


_ROWS = frozenset({"row", "read"})


class EditedState(NamedTuple):
    """A state that was changed."""

    state: State
    changes: list[str]
    """What the change does, as lines of text."""


def skip_steps(
    state: State, steps: int, *, world_size: int, encoded: EncodedRun | None = None
) -> EditedState:
    """Return a state that continues this many steps later, as if they had been delivered.

    Args:
        state: A merged state of all lanes.
        steps: Number of batches that each rank skips.
        world_size: Number of ranks of the run.
        encoded: Makes the batches of these steps; None to skip rows without running hooks.

    Raises:
        StateError: If the data ends before that. Without `encoded`, also if it is unknown which
            samples these steps would have had, because hooks have skipped some before, or because
            samples are waiting to be packed or grouped.
    """
    with reports_damage():
        saved = read_positions(state, range(state["lanes"]))
        done = sum(position.batches for position in saved.values())
        target = done + steps * world_size
        after = _after_rows(state, saved, target) if encoded is None else {}
    if encoded is not None:  # errors of hooks are not damage
        after = encoded.skip(target - done)
    edited = {**state, "positions": {str(lane): each.to_json() for lane, each in after.items()}}
    with reports_damage():
        before, drawn = drawn_samples(state), drawn_samples(edited)
    samples = ", ".join(f"{name} {drawn[name] - before[name]:,.0f}" for name in drawn)
    return EditedState(
        edited,
        [
            f"step {done // world_size:,} becomes step {target // world_size:,}",
            f"{counted(target - done, 'batch', grouped=True)} skipped: {samples} samples",
        ],
    )


def _after_rows(
    state: State, positions: Mapping[int, LanePosition], target: int
) -> dict[int, LanePosition]:
    """Return the positions of lanes after `target` batches of a run whose hooks skip nothing."""
    lanes, fingerprint = state["lanes"], state["fingerprint"]
    batch_size = fingerprint["batch_size"] or 1
    begun = [p for p in positions.values() if p.saved_state() is not None]
    if not begun and fingerprint.get("eras"):
        raise StateError(
            "the number of lanes was changed, and the run has not taken a step since: run a "
            "step, or skip steps before `energon checkpoint redist`"
        )
    if not begun:
        raise StateError("the run has not begun, so it has no position to move; run a step first")
    # How many more rows lanes have read than their batches take.
    shifts = {rows_read(p.saved_state())[0] - p.batches * batch_size for p in begun}
    if (
        len(shifts) > 1
        or (not fingerprint.get("eras") and shifts != {0})
        or "window_rows" in fingerprint
    ):
        raise StateError(
            "hooks have skipped samples, or samples are packed, so which samples the next steps "
            "would have is known only after the hooks: pass the --task-encoder of the run"
        )
    (shift,) = shifts
    plan = PlanRecipe.from_json(fingerprint)(lanes)
    template = begun[0].saved_state()
    moved: dict[int, LanePosition] = {}
    for lane, position in positions.items():
        batches = max(0, -((lane - target) // lanes))
        row = batches * batch_size + shift
        end = plan.num_rows(lane)
        if position.ended or (end is not None and row >= end):
            raise StateError("cannot skip these steps: the data ends before that")
        saved = _at_row(position.saved_state() or template, row)
        moved[lane] = replace(position, batches=batches, state=saved, since=0)
    return moved


@reports_damage()
def change_mix(
    state: State, *, weights: Mapping[str, float], positions: Mapping[str, int]
) -> EditedState:
    """Return a state from which a blend continues with other weights or positions.

    The change takes effect at the first samples that no lane has read. Each later epoch of every
    dataset is exact, and so is the rest of an epoch in which a dataset was set.

    Args:
        state: A merged state of all lanes.
        weights: New weights by dataset name, which apply from then on.
        positions: By dataset name, after how many of its samples to continue, counted from the
            beginning of the run: two epochs of 100 samples are 200.

    Raises:
        ConfigError: If there is no such dataset, or a number is invalid.
        StateError: If the datasets are not blended by weight, or a position cannot be exact.
    """
    settings = state["fingerprint"]
    recipe = PlanRecipe.from_json(settings)
    before = recipe.mix_json()
    if before is None:
        raise StateError(
            "the run does not blend its datasets by weight: their samples are mixed as one line, "
            "so no dataset has its own weight or position"
        )
    mix = copy.deepcopy(settings["mix"])
    lines = [*_set_weights(mix, weights, recipe), *_moves(state, mix, positions, recipe)]
    if not any(entry["weight"] for _, entry in mix_entries(mix)):
        raise ConfigError("all weights would be 0, so nothing would be drawn; keep one above 0")
    past = (*recipe.past, {**settings["mix"], **({"then": dict(positions)} if positions else {})})
    fingerprint = {**settings, "mix": mix, "mix_before": list(past)}
    edited = PlanRecipe.from_json(fingerprint)
    if "balance" in settings:  # the new mix begins with a window, whatever its samples cost
        edited = replace(edited, balance=_windows(settings))
    saved = read_positions(state, range(state["lanes"]))
    begun = begin_changes(
        {lane: each.saved_state() for lane, each in saved.items()}, edited, state["lanes"]
    )
    # The new mix determines whether the data end here, too.
    changed = {
        str(lane): replace(each, state=begun[lane], ended=False).to_json()
        for lane, each in saved.items()
    }
    if weights:
        lines.append(
            "change the weights in the metadataset as well before you resume; otherwise the state "
            "is refused"
        )
    if window := settings.get("shuffle_window"):
        lines.append(f"up to {window:,} samples of each lane, which are already mixed, come first")
    return EditedState({**state, "fingerprint": fingerprint, "positions": changed}, lines)


def _windows(fingerprint: Mapping[str, Any]) -> BalancedOrder:
    """Return how the lanes of a run exchange samples, as far as it tells where windows begin."""
    saved = fingerprint["balance"]
    balance = Balance(cost=saved["cost"], window=saved["window"])
    order = _no_costs, balance, fingerprint["batch_size"] or 1, fingerprint["micro_batches"]
    if "packs" not in saved:
        return BalancedOrder(*order)
    rows = fingerprint["window_rows"]
    return PackedOrder(*order, lengths=_no_costs, budget=Budget(()), rows=rows, identity={})


def _no_costs(rows: Rows) -> NDArray[Any]:
    raise AssertionError("where windows begin does not depend on costs")


def _set_weights(
    mix: dict[str, Any], weights: Mapping[str, float], recipe: PlanRecipe
) -> Iterator[str]:
    """Set weights in a mix, and yield what changes."""
    for name, weight in weights.items():
        entry = _entry(mix, name, recipe.source_names)
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"{name}: weight is {weight}; expected a number of 0 or more")
        was, entry["weight"] = entry["weight"], Curve.constant(float(weight)).to_json()
        yield f"{name}: weight {weight_in_words(was)} becomes {weight_in_words(entry['weight'])}"


def _moves(
    state: State, mix: dict[str, Any], positions: Mapping[str, int], recipe: PlanRecipe
) -> Iterator[str]:
    """Yield which datasets continue elsewhere, if they can."""
    drawn = drawn_samples(state)
    done = recipe.eras[-1]["draws"] if recipe.eras else {}
    for name, position in positions.items():
        _entry(mix, name, recipe.source_names)
        if position < done.get(name, 0):
            raise StateError(
                f"{name}: the number of lanes was changed after {done[name]:,} of its samples, and "
                "cannot be set back before that point exactly"
            )
        was_drawn = round(drawn.get(name, 0))
        yield (
            f"{name}: {epoch_in_words(state, name, was_drawn)} becomes "
            f"{epoch_in_words(state, name, position)}"
        )


@reports_damage()
def leave_out(state: State, saved: SavedRun, keys: Sequence[str], *, epochs: int) -> EditedState:
    """Return a state from which a run continues without some samples, and otherwise unchanged.

    The samples after them move up, as when a hook skips a sample.

    Args:
        state: A merged state of all lanes.
        saved: Its run, with its datasets.
        keys: Keys of the samples, each in all datasets that have it.
        epochs: How many epochs of each dataset to search, starting with the one in progress.

    Raises:
        ConfigError: If no dataset has a key, or samples are drawn with replacement.
        StateError: If a sample is waiting to be packed or grouped.
    """
    run, lines = saved.run, []
    positions = read_positions(state, range(state["lanes"]))
    # Samples of any epoch of an open window may be ahead.
    drawn = drawn_samples(state, rows_of_whole_windows)
    rows: dict[int, set[int]] = {}
    for key in keys:
        for leaf, ordinal in run.samples_of(key):
            name = run.names[leaf]
            first = round(drawn[name]) // state["fingerprint"]["leaves"][name]["samples"]
            skipped_in = []
            # Lanes are not in lockstep, so some may still be reading the previous epoch.
            for epoch in range(max(0, first - 1), first + epochs):
                position = run.plan.find(leaf, epoch, ordinal)
                if position is not None and _is_ahead(positions[position[0]], position[1], key):
                    rows.setdefault(position[0], set()).add(position[1])
                    skipped_in.append(epoch)
            effect = "not read again in these epochs"
            if skipped_in[1:]:
                effect = f"skipped in epochs {skipped_in[0]:,} to {skipped_in[-1]:,}"
            elif skipped_in:
                effect = f"skipped in epoch {skipped_in[0]:,}"
            lines.append(f"{key} of {name} is {effect}")
    changed = dict(state["positions"])
    for lane, more in rows.items():
        skipped = {*positions[lane].skip_rows, *more}
        changed[str(lane)] = {**changed[str(lane)], "skip_rows": sorted(skipped)}
    return EditedState({**state, "positions": changed}, lines)


def _entry(mix: Any, name: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the entry of a dataset in a mix.

    Raises:
        ConfigError: If it is not in the mix.
    """
    for entry_name, entry in mix_entries(mix):
        if entry_name == name:
            return entry
    joined = [each for each in names if name in each.split(" + ")]
    if joined:
        raise ConfigError(f"{name} is read as one line with others: pass {joined[0]!r}")
    close = nearest(name, names, 0.2)
    hint = f"; did you mean {close!r}?" if close else ""
    raise ConfigError(f"the run blends no dataset {name!r}, only {', '.join(names)}{hint}")


def _is_ahead(position: LanePosition, row: int, key: str) -> bool:
    """Return whether a lane has not read a row yet.

    Raises:
        StateError: If it has read but not delivered it.
    """
    saved = position.saved_state()
    read, _ = rows_read(saved)
    if row < read and _waits(saved, row):
        raise StateError(
            f"{key} was read and waits to be packed or grouped with others, so leaving it out "
            "would change batches that have begun; edit a state saved earlier or later"
        )
    return row >= read


def _waits(saved: Any, row: int) -> bool:
    """Return whether a row that was read will be read again by some stage."""
    if isinstance(saved, Mapping):
        if isinstance(begin := saved.get("row"), int) and begin <= row:
            return True
        return any(_waits(value, row) for value in saved.values())
    if isinstance(saved, list):
        return any(each == row or _waits(each, row) for each in saved)
    return False


def _at_row(saved: Any, row: int) -> Any:
    """Return the state of the stages of a lane at another row.

    Raises:
        StateError: If samples are waiting in one of them.
    """
    if not isinstance(saved, Mapping):
        return saved
    moved: dict[str, Any] = {}
    for name, value in saved.items():
        if name in _ROWS:
            moved[name] = row
        elif name == "changes" or isinstance(value, Mapping):
            moved[name] = _at_row(value, row)
        elif value in (0, None, [], ()):
            moved[name] = value
        else:
            raise StateError(
                "samples are buffered for packing or grouping, or a generator hook has not "
                "finished, so the samples of the next steps are known only after the hooks: pass "
                "the --task-encoder of the run"
            )
    return moved
