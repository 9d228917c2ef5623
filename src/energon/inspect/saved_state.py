"""Saved states in words, and what tells two apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from energon.loader.state import LanePosition, differences, read_positions
from energon.messages import counted
from energon.plan.recipe import PlanRecipe
from energon.stages.base import State
from energon.task_encoder.dataset import mix_report


def describe_position(state: State) -> Iterator[str]:
    """Yield lines that tell where in each dataset a run is.

    Raises:
        StateError: If it is not the state of a plan.
    """
    about = state["fingerprint"]
    for name, drawn in drawn_samples(state).items():
        samples = about["leaves"][name]["samples"]
        of = counted(samples, "sample", grouped=True)
        epoch, done = divmod(round(drawn), samples)
        yield f"{name}: epoch {epoch:,}, after {done:,} of {of}; {drawn:,.0f} in all"


def compare_states(first: State, second: State) -> Iterator[str]:
    """Yield lines that tell what differs between two states; none if nothing does.

    Raises:
        StateError: If one is not the state of a plan.
    """
    for _, text in differences(first["fingerprint"], second["fingerprint"]):
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
            further = "further" if after > before else "less far"
            yield f"{name}: {more} {further}, {places[0]} became {places[1]}"
    left_out = [sum(len(p.skip_rows) for p in _positions(s).values()) for s in (first, second)]
    if left_out[0] != left_out[1]:
        yield f"rows that are left out: {left_out[0]} became {left_out[1]}"


def _positions(state: State) -> dict[int, LanePosition]:
    return read_positions(state, map(int, state["positions"]))


def _batches(state: State) -> int:
    return sum(position.batches for position in _positions(state).values())


def place_in_words(state: State, name: str, drawn: int) -> str:
    """Return which epoch of a dataset so many samples are, and where in it."""
    about = state["fingerprint"]["leaves"].get(name)
    if about is None:
        return "not read"
    epoch, done = divmod(drawn, about["samples"])
    return f"epoch {epoch:,} after {done:,} samples"


def drawn_samples(state: State) -> dict[str, float]:
    """Return how many samples of each dataset the lanes have drawn."""
    recipe = PlanRecipe.from_json(state["fingerprint"])
    states = {lane: position.saved_state() for lane, position in _positions(state).items()}
    report = mix_report(
        recipe,
        lanes=state["lanes"],
        states=states,
        counts={},
        sample_bytes=[0.0] * len(recipe.leaves),
    )
    before: Mapping[str, int] = recipe.eras[-1]["draws"] if recipe.eras else {}
    return {
        name: leaf["samples"] + before.get(name, 0)
        for name, leaf in report["datasets"].items()
        if name in state["fingerprint"]["leaves"]
    }
