"""Saved states in words, what tells two apart, and changes of them that stay exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from energon.errors import StateError
from energon.loader.relane import rows_read
from energon.loader.state import LanePosition, differences, read_positions
from energon.messages import counted
from energon.plan.recipe import PlanRecipe
from energon.stages.base import State
from energon.task_encoder.dataset import mix_report

_ROWS = frozenset({"row", "read"})


class EditedState(NamedTuple):
    """A state that was changed."""

    state: State
    about: list[str]
    """What that does, in lines."""


def describe_position(state: State) -> Iterator[str]:
    """Yield lines that tell where in each dataset a run is.

    Raises:
        StateError: If it is not the state of a plan.
    """
    about = state["fingerprint"]
    for name, leaf in _drawn(state).items():
        samples = about["leaves"][name]["samples"]
        epoch, done = divmod(leaf, samples)
        of = counted(samples, "sample", grouped=True)
        epochs = counted(int(epoch), "epoch", "epochs", grouped=True)
        yield f"{name}: {epochs} and {done:,.0f} of {of}; {leaf:,.0f} in all"


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
    drawn = [_drawn(state) for state in (first, second)]
    for name in dict.fromkeys([*drawn[0], *drawn[1]]):
        before, after = (round(each.get(name, 0)) for each in drawn)
        if before != after:
            more = counted(abs(after - before), "sample", grouped=True)
            yield f"{name}: {more} {'further' if after > before else 'less far'}"
    left_out = [sum(len(p.skip_rows) for p in _positions(s).values()) for s in (first, second)]
    if left_out[0] != left_out[1]:
        yield f"rows that are left out: {left_out[0]} became {left_out[1]}"


def skip_steps(state: State, steps: int, *, world_size: int) -> EditedState:
    """Return a state that continues as many steps later, as if these had been delivered.

    Args:
        state: A merged state of all lanes.
        steps: Batches of each rank that are left out.
        world_size: Ranks of the run.

    Raises:
        StateError: If it is not known which samples these steps would have had: because hooks
            have skipped some before, or samples wait to be packed or grouped.
    """
    lanes, about = state["lanes"], state["fingerprint"]
    positions = read_positions(state, range(lanes))
    batch_size = about["batch_size"] or 1
    begun = [p for p in positions.values() if p.saved_state() is not None]
    if not begun:
        raise StateError("the run has not begun, so there is nothing to continue from; run a step")
    shifts = {_shift(position, batch_size) for position in begun}
    if len(shifts) > 1 or (not about.get("eras") and shifts != {0}):
        raise StateError(
            "hooks have skipped samples, so which samples the next steps would have is not known; "
            "let the run deliver these steps and ignore them"
        )
    (shift,) = shifts
    plan = PlanRecipe.from_json(about)(lanes)
    template = begun[0].saved_state()
    done = sum(position.batches for position in positions.values())
    target = done + steps * world_size
    moved: dict[str, Any] = {}
    for lane, position in positions.items():
        batches = max(0, -((lane - target) // lanes))
        row = batches * batch_size + shift
        end = plan.num_rows(lane)
        if position.ended or (end is not None and row >= end):
            raise StateError(f"the data end before {counted(steps, 'step')} more")
        saved = position.saved_state() or template
        moved[str(lane)] = {**position.to_json(), "batches": batches, "state": _at_row(saved, row)}
    edited = {**state, "positions": moved}
    before, after = _drawn(state), _drawn(edited)
    samples = ", ".join(f"{name} {after[name] - before[name]:,.0f}" for name in after)
    return EditedState(
        edited,
        [
            f"step {done // world_size:,} becomes step {target // world_size:,}",
            f"{counted(target - done, 'batch', grouped=True)} are left out: {samples} samples",
        ],
    )


def _positions(state: State) -> dict[int, LanePosition]:
    return read_positions(state, map(int, state["positions"]))


def _batches(state: State) -> int:
    return sum(position.batches for position in _positions(state).values())


def _drawn(state: State) -> dict[str, float]:
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


def _shift(position: LanePosition, batch_size: int) -> int:
    """Return how many more rows a lane has read than its batches take."""
    return rows_read(position.saved_state())[0] - position.batches * batch_size


def _at_row(saved: Any, row: int) -> Any:
    """Return the state of the stages of a lane at another row.

    Raises:
        StateError: If samples wait in one of them.
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
                "samples wait to be packed or grouped, or a hook is in the middle of what it "
                "yields, so the next steps cannot be skipped exactly; let the run deliver them and "
                "ignore them"
            )
    return moved
