"""Describe saved states, and compare them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from energon.loader.state import LanePosition, read_positions, reports_damage
from energon.loader.state_differences import differences
from energon.messages import counted
from energon.plan.blends.curve import Curve
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import Plan
from energon.stages.base import State
from energon.stages.reading.read import rows_of_changes


def describe_position(state: State) -> Iterator[str]:
    """Yield lines that say where in each dataset a run is.

    Raises:
        StateError: If it is not the state of a plan.
    """
    with reports_damage():
        yield from _position(state)


def _position(state: State) -> Iterator[str]:
    about = state["fingerprint"]
    moves = _moves_ahead(state)
    for name, drawn in drawn_samples(state).items():
        samples = about["leaves"][name]["samples"]
        of = counted(samples, "sample", grouped=True)
        epoch, done = divmod(round(drawn), samples)
        then = f"; {_goes_on(state, name, moves[name])}" if name in moves else ""
        yield f"{name}: epoch {epoch:,}, after {done:,} of {of}; {drawn:,.0f} in all{then}"


def _goes_on(state: State, name: str, position: int) -> str:
    return f"then continues from {place_in_words(state, name, position)}, as edited"


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
    batches = [_batches(state) for state in (first, second)]
    if batches[0] != batches[1]:
        more = counted(abs(batches[1] - batches[0]), "batch", grouped=True)
        yield f"batches: {more} {'more' if batches[1] > batches[0] else 'fewer'}"
    drawn = [drawn_samples(state) for state in (first, second)]
    for name in dict.fromkeys([*drawn[0], *drawn[1]]):
        before, after = (round(each.get(name, 0)) for each in drawn)
        if before != after:
            more = counted(abs(after - before), "sample", grouped=True)
            places = [
                place_in_words(state, name, each)
                for state, each in ((first, before), (second, after))
            ]
            further = "further" if after > before else "back"
            yield f"{name}: {more} {further}, {places[0]} became {places[1]}"
    known, moves = _moves_ahead(first), _moves_ahead(second)
    yield from (f"{n}: {_goes_on(second, n, p)}" for n, p in moves.items() if known.get(n) != p)
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


def _batches(state: State) -> int:
    return sum(position.batches for position in _positions(state).values())


def place_in_words(state: State, name: str, drawn: int) -> str:
    """Return which epoch of a dataset this many samples reach, and where in it."""
    about = state["fingerprint"]["leaves"].get(name)
    if about is None:
        return "not read"
    epoch, done = divmod(drawn, about["samples"])
    return f"epoch {epoch:,} after {done:,} samples"


def drawn_samples(state: State) -> dict[str, float]:
    """Return how many samples of each dataset the lanes have drawn."""
    recipe = PlanRecipe.from_json(state["fingerprint"])
    drawn = np.zeros(len(recipe.leaves))
    for plan, stream, rows, changes in _streams(state):
        drawn += plan.with_changes(stream, changes).leaf_counts(stream, rows)
    before: Mapping[str, int] = recipe.eras[-1]["draws"] if recipe.eras else {}
    return {
        leaf.uid: round(count) + before.get(leaf.uid, 0)
        for leaf, count in zip(recipe.leaves, drawn.tolist(), strict=True)
        if leaf.uid in state["fingerprint"]["leaves"]
    }


def _streams(state: State) -> Iterator[tuple[Plan, int, int, tuple[int, ...]]]:
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
        yield plan, stream, sum(each["read"] for each in begun), changes


def mix_entries(mix: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the datasets of a saved mix, at all levels, with what it says about them."""
    for name, entry in mix["blend"].items():
        if "of" in entry:
            yield from mix_entries(entry["of"])
        else:
            yield name, entry
