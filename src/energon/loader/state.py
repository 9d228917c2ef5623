"""The state of a loader: where each lane is, as JSON that fits any topology.

A rank state has the lanes of one rank, a global state those of all ranks; both have the same form,
and states are merged by combining their lanes:

    {"format": "energon loader state", "version": 1, "order_version": 1,
     "lanes": 4, "fingerprint": {...},
     "positions": {"0": {"batches": 7, "epoch_batches": 2, "state": {...}}, "2": ...}}

`batches` counts the batches that the trainer has received from the lane, `epoch_batches` those of
the current virtual epoch. Both belong to lanes, so nothing in a state depends on the number of
ranks and workers.
"""

from __future__ import annotations

import json
import pickle
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from energon.errors import ConfigError, EnergonError, StateError
from energon.limits import DOCUMENT_DEPTH
from energon.messages import counted, nearest
from energon.plan.randomness import ORDER_VERSION
from energon.plan.recipe import own_unit
from energon.stages.base import State
from energon.worker import COMMON_LANES

FORMAT = "energon loader state"
STATE_VERSION = 1

HEADER = ("format", "version", "order_version", "lanes", "fingerprint")
COVERS = "covers"
"""Part of a rank state that identifies its rank."""
_FLAT_LANE = "lane_"
_MAX_ADDRESS = (1 << 53) - 1
"""Far beyond any row, and far below the limits of 64-bit arithmetic in the plan."""
MAX_LANES = 1 << 24


@dataclass(slots=True)
class LanePosition:
    """The position of a lane, counted in batches that the trainer has received.

    Args:
        batches: Number of batches delivered since the beginning of the run.
        epoch_batches: Number of those that belong to the current virtual epoch.
        state: State of the pipeline after them, or its pickle (few states are ever used);
            None at the beginning.
        since: Number of batches delivered after `state`, to be added to the `since` in it.
        skip_rows: Rows to skip because they killed workers.
        ended: Whether the pass over the data is over in this lane.
        counts: Statistics of the lane.
        times: What it has spent time on, see `monitoring/accounts.py`.
    """

    batches: int = 0
    epoch_batches: int = 0
    state: State | bytes | None = None
    since: int = 0
    skip_rows: tuple[int, ...] = ()
    ended: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)

    def saved_state(self) -> State | None:
        """Return the state as plain data."""
        saved = pickle.loads(self.state) if isinstance(self.state, bytes) else self.state
        if saved is None or not self.since:
            return saved
        return {**saved, "since": saved["since"] + self.since}

    def to_json(self) -> dict[str, Any]:
        """Return the saved state of this lane, without statistics."""
        saved: dict[str, Any] = {
            "batches": self.batches,
            "epoch_batches": self.epoch_batches,
            "state": self.saved_state(),
        }
        if self.skip_rows:
            saved["skip_rows"] = list(self.skip_rows)
        return {**saved, "ended": True} if self.ended else saved

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> LanePosition:
        """Return the position that `to_json` described."""
        match saved:
            case {"batches": int(), "epoch_batches": int(), "state": dict() | None} if (
                isinstance(rows := saved.get("skip_rows", []), list)
                and all(isinstance(row, int) for row in rows)
                and _is_made_of_addresses(saved)
            ):
                return cls(
                    batches=saved["batches"],
                    epoch_batches=saved["epoch_batches"],
                    state=saved["state"],
                    skip_rows=tuple(saved.get("skip_rows", ())),
                    ended=saved.get("ended") is True,
                )
        raise StateError(
            f"a saved lane needs batches, epoch_batches and state, found {shown(saved)}; "
            "the state is damaged or was edited"
        )


def build_state(
    positions: Mapping[int, LanePosition],
    *,
    lanes: int,
    fingerprint: Mapping[str, Any],
    covers: Mapping[str, Any] | None = None,
) -> State:
    """Return the state of the lanes in `positions`, out of `lanes` in total, as JSON.

    Args:
        positions: Positions of these lanes.
        lanes: Number of lanes of the run.
        fingerprint: What must match in a run that restores the state.
        covers: The rank of the lanes, unless these are all lanes: `rank`, `world_size`, and
            `alone`, whether the lanes of the other ranks can be derived from them.
    """
    state = {
        "format": FORMAT,
        "version": STATE_VERSION,
        "order_version": ORDER_VERSION,
        "lanes": lanes,
        "fingerprint": fingerprint,
        "positions": {str(lane): position.to_json() for lane, position in positions.items()},
        **({COVERS: covers} if covers else {}),
    }
    # The result belongs to the caller, and is guaranteed to be JSON.
    copied: State = json.loads(json.dumps(state))
    return copied


def merge_states(state: State | Sequence[State] | None) -> State:
    """Return one state with all lanes of a global state, of a rank state, or of several states.

    Raises:
        StateError: If they are not states, do not belong together, or overlap.
    """
    if isinstance(state, Mapping):
        states = [state]
    else:
        states = list(state) if isinstance(state, list | tuple) else []
    if not states:
        raise StateError(
            f"found {shown(state)}, expected a state; pass a global state or the states of all "
            "ranks"
        )
    states = [unflatten(each) for each in states]
    try:
        for number, each in enumerate(states):
            _check_header(each, number)
            _check_same_run(states[0], each, number)
    except RecursionError as error:
        raise StateError("the state is nested deeper than any that a loader saves") from error
    _check_duplicates(states)
    positions = {lane: p for each in states for lane, p in each["positions"].items()}
    merged = {**states[0], "positions": dict(sorted(positions.items(), key=lambda kv: int(kv[0])))}
    if len(states) > 1 or len(positions) == merged["lanes"]:
        merged.pop(COVERS, None)
    return merged


def check_coverage(state: State, lanes: Iterable[int]) -> None:
    """Check that a merged state has some lanes.

    Raises:
        StateError: If it lacks some of them.
    """
    saved = state["positions"]
    missing = [lane for lane in lanes if str(lane) not in saved]
    if missing:
        whose = covered_by(state)
        of_rank = "" if whose is None else f" of rank {whose[0]} of {whose[1]}"
        raise StateError(
            f"the state{of_rank} covers lanes {_ranges(map(int, saved))} of {state['lanes']}, but "
            f"lanes {_ranges(missing)} are missing; pass a global state or the states of all ranks "
            f"as a list, or convert their files: {redist_command(state['lanes'])}"
        )


def read_positions(state: State, lanes: Iterable[int]) -> dict[int, LanePosition]:
    """Return the positions of some lanes from one merged state.

    Raises:
        StateError: If some of them are missing.
    """
    lanes, saved = list(lanes), state["positions"]
    check_coverage(state, lanes)
    return {lane: LanePosition.from_json(saved[str(lane)]) for lane in lanes}


def redist_command(lanes: int, world_size: int | None = None) -> str:
    """Return the command that converts the files of a run with some lanes to a world size."""
    size = "RANKS" if world_size is None else world_size
    fits = world_size is None or lanes % world_size == 0
    more = "" if fits else f" --lanes {lcm(world_size or 1, COMMON_LANES)}"
    return f"energon checkpoint redist --new-world-size {size}{more} FILES NEW_FOLDER"


def check_steps(
    states: State | Sequence[State] | None, merged: State, *, strict: bool | Collection[str] = True
) -> str | None:
    """Check that the lanes of a merged state were saved after the same batch of the run.

    Args:
        states: The states that were merged.
        merged: All lanes of the merged state.
        strict: Whether a difference is an error; see `check_fingerprint`, where it is called
            "steps".

    Returns:
        Which states were ahead, in words, if that is permitted: each lane then continues from its
        position. None if none was.

    Raises:
        StateError: If some lanes were ahead of others.
    """
    lanes = merged["lanes"]
    positions = {int(v): LanePosition.from_json(p) for v, p in merged["positions"].items()}
    if any(position.ended for position in positions.values()):
        # Where data ends, some ranks finish before others: steps no longer mean turns.
        return None
    last = max(
        (p.batches * lanes - lanes + v for v, p in positions.items() if p.batches), default=0
    )
    if all(p.batches * lanes + v >= last for v, p in positions.items()):
        return None
    parts = [states] if isinstance(states, Mapping) else list(states or ())
    text = "the states were saved at different steps: " + (
        _steps_of_parts(parts, lanes) if len(parts) > 1 else _steps_of_lanes(positions)
    )
    if not may_differ("steps", strict):
        raise StateError(
            f"{text}. Pass the states of one checkpoint; or, if the ranks really were at different "
            'steps, let each lane continue from where it was: strict=["steps"]'
        )
    return text


def _steps_of_parts(states: Sequence[State], lanes: int) -> str:
    """Describe after how many batches each rank state was saved."""
    steps: list[tuple[str, int]] = []
    for number, state in enumerate(map(unflatten, states)):
        own = {int(lane): position["batches"] for lane, position in state["positions"].items()}
        first = min(own, default=0)
        size = lanes // max(1, len(own))
        is_rank = sorted(own) == list(range(first, lanes, size))
        steps.append((f"rank {first}" if is_rank else f"state {number}", sum(own.values())))
    most = max(count for _, count in steps)
    ahead = [who for who, count in steps if count == most]
    return ", ".join(f"{who} after {counted(count, 'batch')}" for who, count in steps) + (
        f"; {' and '.join(ahead)} {'is' if len(ahead) == 1 else 'are'} ahead"
    )


def _steps_of_lanes(positions: Mapping[int, LanePosition]) -> str:
    """Describe after how many batches lanes were saved."""
    lanes: dict[int, list[int]] = {}
    for lane, position in positions.items():
        lanes.setdefault(position.batches, []).append(lane)
    return "; ".join(
        f"lanes {_ranges(lanes[count])} after {counted(count, 'batch')} each"
        for count in sorted(lanes, reverse=True)
    )


def covered_by(state: State) -> tuple[int, int, bool] | None:
    """Return the rank whose lanes a state has, the world size, and whether the others follow.

    None if it has the lanes of several ranks.
    """
    match state.get(COVERS):
        case {"rank": int(rank), "world_size": int(size), "alone": bool(alone)} if (
            0 <= rank < size
            and state["lanes"] % size == 0
            and [*map(str, range(rank, state["lanes"], size))] == [*state["positions"]]
        ):
            return rank, size, alone
    return None


def batches_of_lanes(
    state: State, rank: int, world_size: int, *, before: int = 0
) -> dict[int, int]:
    """Return how many batches each lane of a run has delivered, given the state of one rank.

    All ranks have delivered equally many batches.

    Args:
        state: The state.
        rank: Its rank.
        world_size: How many ranks saved one.
        before: How many batches of each rank to go back.
    """
    lanes = state["lanes"]
    own = {int(v): LanePosition.from_json(p).batches for v, p in state["positions"].items()}
    turn = min(batches * lanes + v for v, batches in own.items()) - rank - before * world_size
    return {v: max(0, -(-(turn + v % world_size - v) // lanes)) for v in range(lanes)}


def flatten(state: State) -> dict[str, tuple[State]]:
    """Return `state` as a flat dict of plain data, with an entry for each lane.

    The keys depend only on the lanes, so torch.distributed.checkpoint, which loads what the keys of
    the receiving state ask for, can store it and load it on other ranks. Each value is in its own
    tuple, since that library takes nested dicts apart, but leaves tuples alone.
    """
    header = {name: state[name] for name in (*HEADER, COVERS) if name in state}
    lanes = {f"{_FLAT_LANE}{lane}": (position,) for lane, position in state["positions"].items()}
    return {"header": (header,), **lanes}


def unflatten(state: State) -> State:
    """Return the nested form of `state`, whichever of the two forms it has."""
    if not isinstance(state, Mapping) or "header" not in state:
        return state
    start = len(_FLAT_LANE)
    lanes = {
        name[start:]: _flat_value(value, name)
        for name, value in state.items()
        if isinstance(name, str) and name.startswith(_FLAT_LANE)
    }
    return {**_flat_value(state["header"], "header"), "positions": lanes}


def _flat_value(value: Any, name: str) -> dict[str, Any]:
    """Return the value that `flatten` stored."""
    match value:
        case [dict(content)]:
            return content
    raise StateError(
        f"the state is damaged or was edited: expected {name} to be a list of one dict, found "
        f"{shown(value)}"
    )


def _is_made_of_addresses(value: Any, depth: int = 0) -> bool:
    """Return whether JSON holds only what stages save, without fractions and signs."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        deeper = depth < DOCUMENT_DEPTH.value
        return deeper and all(_is_made_of_addresses(each, depth + 1) for each in inside)
    if isinstance(value, int):
        return 0 <= value <= _MAX_ADDRESS
    return value is None or isinstance(value, str)


_BY_DAMAGE = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError)


@contextmanager
def reports_damage() -> Iterator[None]:
    """Raise StateError where values that no loader saves reach the numbers of the plan.

    Also decorates functions that compute with a state.

    Raises:
        StateError: If the block fails with such values.
    """
    try:
        yield
    except EnergonError:
        raise
    except _BY_DAMAGE as error:
        raise StateError(
            f"the state is damaged or was edited: computing its position failed with {error!r:.200}"
            "; use an earlier checkpoint"
        ) from error


def _check_header(state: Any, number: int) -> None:
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        content = shown([*state]) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(
            f"state {number}: expected one of the format {FORMAT!r}, found {content}; states of "
            "other loaders cannot be restored"
        )
    for name, own in (("version", STATE_VERSION), ("order_version", ORDER_VERSION)):
        if state.get(name) != own:
            raise StateError(
                f"state {number}: {name} is {shown(state.get(name))}, this release reads {own}; "
                "restore it with the release that saved it"
            )
    match state:
        case {"lanes": int(lanes), "fingerprint": dict(), "positions": dict(positions)} if (
            1 <= lanes <= MAX_LANES and all(_is_lane(name, lanes) for name in positions)
        ):
            return
    raise StateError(
        f"state {number}: expected lanes, a fingerprint and positions of lanes, found "
        f"{shown([*state])} with {shown(state.get('lanes'))} lanes; the state is damaged or was "
        "edited"
    )


def _is_lane(name: Any, lanes: int) -> bool:
    # Lanes with other spellings of a number, such as 01, would not be found.
    if not isinstance(name, str) or not name.isdecimal() or len(name) > len(str(MAX_LANES)):
        return False
    return int(name) < lanes and str(int(name)) == name


def _check_same_run(first: State, other: State, number: int) -> None:
    compared = [
        {**state, "fingerprint": without_parts(state["fingerprint"], [RUN])}
        for state in (first, other)
    ]
    for name in ("lanes", "fingerprint"):
        if compared[0][name] != compared[1][name]:
            pairs = differences({name: compared[0][name]}, {name: compared[1][name]})
            raise StateError(
                f"states 0 and {number} are of different runs: "
                + "; ".join(text for _, text in pairs)
                + "; pass the rank states of one checkpoint"
            )


def _check_duplicates(states: Sequence[State]) -> None:
    seen: dict[str, int] = {}
    for number, state in enumerate(states):
        for lane in state["positions"]:
            if lane in seen:
                raise StateError(
                    f"lane {lane} is in states {seen[lane]} and {number}; pass the state of each "
                    "rank once"
                )
            seen[lane] = number


def _ranges(numbers: Iterable[int]) -> str:
    """Format numbers compactly: "0-3, 6"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs) or "none"


PAST = ("mix_before", "eras", "pass")
"""Parts of a fingerprint about how data was mixed and dealt to lanes, and how often it was read,
earlier in the run."""


RUN = "run"
"""Part of a fingerprint with the source of the data and the number of ranks, which may change."""


def check_fingerprint(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, strict: bool | Collection[str] = True
) -> list[str]:
    """Compare a saved run with the present one, and return the permitted differences.

    Args:
        saved: Fingerprint in the state.
        current: Fingerprint of this run.
        strict: True permits none, False all; a collection of names (dotted for nested ones, such
            as "data.train") permits differences in these and anything below them.

    Raises:
        ConfigError: If `strict` names what no state has.
        StateError: If anything else differs.
    """
    _check_names(strict, {*saved, *current})
    waived: list[str] = []
    refused: list[str] = []
    names: list[str] = []
    names_apart = _taken_over(saved, current)
    compared = {**saved, "unit": own_unit(saved)} if "unit" in saved else saved
    for path, text in differences(
        without_parts(compared, names_apart), without_parts(current, names_apart)
    ):
        if may_differ(path, strict):
            waived.append(text)
        else:
            refused.append(text)
            names.append(path.partition(".")[0])
    if refused:
        together = _are_parts(saved, current) and "batch_size" in names
        raise StateError(
            "the state was saved by another run:\n  "
            + "\n  ".join(refused)
            + "\nRestore it with the configuration and data it was saved with, or continue from "
            f"the same rows despite the differences: strict={sorted(set(names))}"
            + (", which can keep the samples of each global batch together" if together else "")
            + ", or strict=False for all"
        )
    return waived


_OF_SOME_RUNS = ("steps", "mix", "unit", "streams", "parts", "stripe", "balance", RUN, *PAST)
"""What `strict` may name although the run at hand has none."""


def _check_names(strict: bool | Collection[str], parts: Collection[str]) -> None:
    """Refuse names of differences that cannot be."""
    if isinstance(strict, bool):
        return
    allowed = {*parts, *_OF_SOME_RUNS}
    for name in [strict] if isinstance(strict, str) else strict:
        if not isinstance(name, str) or name.partition(".")[0] not in allowed:
            near = nearest(name, allowed)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"strict={strict!r}: {name!r} is not part of a state; expected True, False or some "
                f"of {', '.join(sorted(allowed))}{hint}"
            )


def _are_parts(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Return whether batches of a saved run can become several of this run."""
    match saved.get("batch_size"), current.get("batch_size"):
        case int(before), int(now):
            return before % now == 0 and not current.get("packing_buffer_size")
    return False


def _taken_over(saved: Mapping[str, Any], current: Mapping[str, Any]) -> set[str]:
    """Return the parts of a fingerprint that a run takes over from the state.

    These are the run's history, and how lanes share the rows of streams.
    """
    shared = "streams" in saved or "parts" in saved
    shared = shared or "stripe" not in saved or "stripe" not in current
    taken = ("streams", "parts", "micro_batches", "window_rows")
    return {*PAST, RUN, *taken, *(["stripe"] if shared else [])}


def without_parts(fingerprint: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a fingerprint without some of its parts."""
    return {name: value for name, value in fingerprint.items() if name not in names}


_short = reprlib.Repr()
_short.maxdict = _short.maxlist = _short.maxtuple = 10
_short.maxstring = _short.maxother = _short.maxlong = 100


def shown(value: Any) -> str:
    """Return a value for a message, shortened only if it is larger than any state is."""
    return _short.repr(value)


def differences(saved: Any, current: Any, path: str = "") -> list[tuple[str, str]]:
    """List (dotted path, text) of every leaf in which two JSON values differ."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        return [
            difference
            for key in sorted({*saved, *current}, key=str)
            for difference in differences(
                saved.get(key, _ABSENT), current.get(key, _ABSENT), f"{path}.{key}" if path else key
            )
        ]
    if saved == current:
        return []
    return [(path, f"{path}: saved {shown(saved)}, now {shown(current)}")]


def may_differ(path: str, strict: bool | Collection[str]) -> bool:
    """Return whether the part of a fingerprint at a dotted path may differ."""
    if isinstance(strict, bool):
        return not strict
    names = [strict] if isinstance(strict, str) else strict
    return any(path == name or path.startswith(f"{name}.") for name in names)


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()
