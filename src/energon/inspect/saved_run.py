"""A training run as described by a saved state: what it reads, its order, and where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from numpy.typing import NDArray

from energon.errors import ConfigError, StateError
from energon.inspect.planned_run import PlannedRun
from energon.io.address import redact
from energon.loader.relane import rows_read
from energon.loader.state import (
    RUN,
    LanePosition,
    check_steps,
    covered_by,
    read_positions,
    reports_damage,
)
from energon.messages import counted
from energon.metadataset.resolve import resolve
from energon.plan.balance import Balance, Measures, cost_name
from energon.plan.dealt import Deal
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.packs import PackedOrder, PlannedPacks
from energon.plan.recipe import PlanRecipe
from energon.stages.base import State
from energon.task_encoder.leaves import OpenedLeaf, open_leaves
from energon.task_encoder.train_plan import SQUARED_LENGTH, TrainSettings, balanced_plan
from energon.worker import WorkerConfig, check_lanes

CostFunction = Callable[[Measures], NDArray[Any]]


@dataclass(frozen=True)
class SavedRun:
    """A run as described by a saved state.

    Args:
        read_from: The data that it reads.
        state: The state, as `read_states` returns it.
        positions: Where its lanes were.
        run: Its order, before and after it was saved.
        settings: The arguments that decide which samples are batches.
        step: How many batches each rank had received.
        shifted: How many samples further lanes were than full batches would take them: hooks have
            skipped that many, and later samples have moved up. The plan does not know when.
    """

    read_from: ReadFrom
    state: State
    positions: Mapping[int, LanePosition]
    run: PlannedRun
    settings: TrainSettings
    step: int
    shifted: int


class ReadFrom(NamedTuple):
    """What a saved run reads."""

    path: str | os.PathLike[str]
    split_part: str = "train"
    exclude_from: str | os.PathLike[str] | None = None
    dataset_config: str | None = None
    split_config: str | None = None

    def open_leaves(self) -> list[OpenedLeaf]:
        """Return the datasets, opened."""
        resolved = resolve(
            self.path,
            split_part=self.split_part,
            training=True,
            dataset_config=self.dataset_config,
            split_config=self.split_config,
        )
        return open_leaves(resolved.leaves, None, self.exclude_from)


@reports_damage()
def open_saved_run(
    state: State,
    *,
    path: str | os.PathLike[str] | None = None,
    split_part: str | None = None,
    exclude_from: str | os.PathLike[str] | None = None,
    world_size: int | None = None,
    may_pack: bool = False,
    cost: CostFunction | None = None,
) -> SavedRun:
    """Return the run that saved a state; everything that determines its order is in the state.

    Args:
        state: As `read_states` returns it.
        path: Where the data is now; None if it has not moved.
        split_part: Which split; None for that of the run.
        exclude_from: The quarantine files; None for those given to the run.
        world_size: How many ranks it had, if the state does not say.
        may_pack: Whether the run may pack samples; which samples its steps have is unknown until
            its batches are made.
        cost: The function by which it balances its batches; None if it does by a measure, or not.

    Raises:
        StateError: If the data differs from that of the run, or steps cannot be told from rows.
        ConfigError: If the number of ranks is unknown or impossible, or neither the state nor
            `path` tells where the data is.
    """
    read_from = _read_from(state, path, split_part, exclude_from)
    fingerprint, lanes = state["fingerprint"], state["lanes"]
    recipe = PlanRecipe.from_json(fingerprint)
    batch_size = fingerprint["batch_size"] or 1
    if not isinstance(batch_size, int) or not 1 <= batch_size <= _MAX_BATCH_SAMPLES:
        raise StateError(
            f"the state is damaged or was edited: its batch size is {batch_size!r:.100}"
        )
    settings = _saved_settings(fingerprint, cost)
    packs = settings.fills_batches
    if packs and not may_pack:
        raise StateError(
            "the run packs samples, so the samples of its steps are known only after its hooks: "
            "pass the --task-encoder of the run"
        )
    ranks = num_ranks(state, world_size)
    check_steps(state, state)
    leaves = tuple(_saved_leaves(read_from, fingerprint["leaves"]))
    positions = read_positions(state, map(int, state["positions"]))
    read = {
        lane: _Read(position.batches, *rows_read(position.saved_state()))
        for lane, position in positions.items()
    }
    # Lanes that have not started over have delivered all of their batches.
    turns = [each.batches - each.rows // batch_size for each in read.values()]
    first_turn = max(turns, default=0) if recipe.eras and not packs else 0
    recipe = _with_costs(recipe, leaves, settings, state, ranks)
    if isinstance(recipe.balance, PackedOrder):
        batch_size = max(1, recipe.balance.rows // recipe.balance.window)  # about as many
    run = PlannedRun(
        replace(recipe, leaves=_with_blocks(recipe.leaves, leaves, fingerprint["leaves"])),
        leaves,
        lanes,
        batch_size,
        WorkerConfig(rank=0, world_size=ranks, num_workers=0, seed_offset=recipe.seed),
        first_turn,
        _changes_by_stream(read, recipe.deal(lanes)),
    )
    run.plan.rows(0, 0, 1)  # tables of the order are built lazily; damage shows here, not later
    beyond = (each.rows - (each.batches - first_turn) * batch_size for each in read.values())
    shifted = 0 if packs else sum(max(0, rows) for rows in beyond)
    done = sum(each.batches for each in read.values())
    own = len(read) * ranks // lanes
    return SavedRun(read_from, state, positions, run, settings, done // max(1, own), shifted)


def _read_from(
    state: State,
    path: str | os.PathLike[str] | None,
    split_part: str | None,
    exclude_from: str | os.PathLike[str] | None,
) -> ReadFrom:
    """Return the data that the run of a state reads; what is None is taken from the state."""
    saved = _about_run(state["fingerprint"])
    address = saved.get("path") if path is None else path
    if address is None:
        raise ConfigError(
            "the state does not name the dataset of its run, because it is an older state "
            "or its metadataset is not a file; pass the PATH of the dataset or metadataset"
        )
    return ReadFrom(
        address,
        split_part or saved.get("split", "train"),
        exclude_from or saved.get("exclude_from"),
        saved.get("dataset_config"),
        saved.get("split_config"),
    )


def _about_run(fingerprint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a fingerprint that a run may change."""
    run = fingerprint.get(RUN)
    return run if isinstance(run, Mapping) else {}


def _saved_settings(fingerprint: Mapping[str, Any], cost: CostFunction | None) -> TrainSettings:
    """Return the arguments of a run that decide which samples are batches.

    Raises:
        StateError: If its costs are unknown here.
    """
    costs: dict[str, Any] = {}
    order = fingerprint.get("balance")
    if order is not None:
        if order.get("function") and cost is None:
            raise StateError(
                f"the run balances its batches by the function {order['cost']!r}, which is not in "
                "its state; pass it to `energon plan --state` as --with MODULE:FUNCTION"
            )
        packs = order.get("packs", {})
        balance = costs["balance"] = Balance(
            cost=cost or order["cost"],
            name=order["cost"],
            version=order["version"],
            window=order["window"],
            pool=order["pool"] or "all",
            micro_batches=fingerprint["micro_batches"],
            padded=packs.get("padded", False),
            speeds=order.get("speeds"),
            skipped=_about_run(fingerprint).get("skipped", "shorten"),
        )
        if packs.get("batch_cost"):
            (costs["batch_cost"],) = packs["context"]
        elif packs:
            names = [cost if cost and cost_name(cost) == n else n for n in packs["length"]]
            costs["pack"] = PlannedPacks(
                length=names,
                context=packs["context"],
                too_long=packs["too_long"],
                version=packs["version"],
            )
            costs["balance"] = None if order["cost"] == SQUARED_LENGTH else balance
    return TrainSettings(
        batch_size=fingerprint["batch_size"],
        packing_buffer_size=fingerprint.get("packing_buffer_size"),
        blend_unit="batch" if fingerprint.get("unit", 1) > 1 else None,
        **costs,
    )


def _with_costs(
    recipe: PlanRecipe,
    leaves: Sequence[OpenedLeaf],
    settings: TrainSettings,
    state: State,
    ranks: int,
) -> PlanRecipe:
    """Return the order of a run whose samples are exchanged or packed by the costs that it had.

    Raises:
        StateError: If these have changed.
    """
    fingerprint = state["fingerprint"]
    workers = WorkerConfig(
        rank=0, world_size=ranks, num_workers=0, lanes=state["lanes"], seed_offset=recipe.seed
    )
    order = balanced_plan(recipe, leaves, settings, workers).balance
    if order is None:
        return recipe
    saved = fingerprint["balance"]
    if order.measures != saved.get("measures"):
        raise StateError(
            f"the measures behind the cost {saved['cost']!r} have changed since the state was "
            "saved, so the samples of its steps are not known"
        )
    return replace(recipe, balance=order.continuing(fingerprint))


_MAX_BATCH_SAMPLES = 1 << 20
"""A larger batch size is damage: listing its samples would take hours and terabytes."""


class _Read(NamedTuple):
    """What a lane has read."""

    batches: int
    rows: int
    changes: tuple[int, ...]
    """The rows at which the mix was changed."""


def _changes_by_stream(read: Mapping[int, _Read], deal: Deal) -> dict[int, tuple[int, ...]]:
    """Return the rows at which the mix of each stream was changed, as the last of its lanes saw."""
    changes: dict[int, tuple[int, ...]] = {}
    for lane, each in read.items():
        stream = deal.stream_of(lane)
        changes[stream] = max(each.changes, changes.get(stream, ()), key=len)
    return changes


def _with_blocks(
    leaves: Sequence[PlanLeaf],
    opened: Sequence[OpenedLeaf],
    saved: Mapping[str, Mapping[str, Any]],
) -> tuple[PlanLeaf, ...]:
    """Return saved leaves with the blocks that their slices follow, which only the data have."""
    costs = {leaf.plan_leaf.uid: getattr(leaf.source, "slice_cost", None) for leaf in opened}
    blocks = {uid: cost.blocks for uid, cost in costs.items() if cost and saved[uid]["slice"][2:]}
    return tuple(replace(leaf, blocks=blocks.get(leaf.uid)) for leaf in leaves)


@reports_damage()
def num_ranks(state: State, world_size: int | None) -> int:
    """Return how many ranks the run of a state had.

    Args:
        state: As `read_states` returns it.
        world_size: How many it had, if the state does not say; None to use what it says.

    Raises:
        ConfigError: If it is unknown or impossible.
    """
    whose = covered_by(state)
    saved: int | None = None if whose is None else whose[1]
    match state["fingerprint"].get(RUN):
        case {"world_size": int(count)} if saved is None and count > 0:
            saved = count
    if world_size is not None and saved is not None and saved != world_size:
        raise ConfigError(
            f"the state says that the run had {counted(saved, 'rank')}, not {world_size}"
        )
    ranks = saved or world_size
    if ranks is None:
        raise ConfigError(
            "this state of all ranks does not say how many there were, and a step is one batch "
            "per rank; pass their number with --world-size"
        )
    check_lanes(state["lanes"], ranks)
    if whose is not None:
        return ranks
    done = sum(position["batches"] for position in state["positions"].values())
    if done % ranks and not any(each.get("ended") for each in state["positions"].values()):
        raise ConfigError(
            f"the run has delivered {done} batches, so it cannot have had {ranks} ranks with "
            "equally many; pass the number of ranks of the run with --world-size"
        )
    return ranks


def _saved_leaves(
    read_from: ReadFrom, saved: Mapping[str, Mapping[str, object]]
) -> list[OpenedLeaf]:
    """Return the datasets of a run in its order, which must be those that it has read."""
    if not saved:
        raise StateError("the state is damaged or was edited: it lists no datasets")
    leaves = {leaf.plan_leaf.uid: leaf for leaf in read_from.open_leaves()}
    missing = [uid for uid in saved if uid not in leaves]
    if missing:
        raise StateError(
            f"the run has read {missing[0]!r}, which is not in split {read_from.split_part!r} of "
            f"{redact(read_from.path)}: it has {', '.join(leaves)}; pass the path and the split of "
            "the run"
        )
    for uid, described in saved.items():
        for name, now in leaves[uid].source.fingerprint().items():
            if described.get(name, now) != now:
                raise StateError(
                    f"{uid} has changed since the run read it: {name} was {described[name]!r}, now "
                    f"{now!r}; its rows no longer have the same content"
                )
    return [leaves[uid] for uid in saved]
