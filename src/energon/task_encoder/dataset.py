"""What the getters return: a pipeline with its plan, ready for a loader."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from energon.errors import ConfigError, StateError
from energon.messages import counted
from energon.plan.balance import BalancedPlan, StepCosts
from energon.plan.blends.mix import Mix
from energon.plan.packs import PackedOrder
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import Plan
from energon.samples.crude import RestoreKey, flat, to_tuple
from energon.samples.display import register_with_notebook, safe_html, table_html
from energon.sources.reader import LeafReader, LocatedSource
from energon.stages.base import Dataset, DatasetIterator, ItemState, State, T_co
from energon.stages.hooks.failures import describe_sources
from energon.stages.iterate import IterableLanes, loop_length, register_with_torch
from energon.stages.lane import CurrentItem, Lane
from energon.stages.read import ChangesDataset, begin_changes, rows_of_changes
from energon.task_encoder.train_plan import default_lanes, streams
from energon.worker import WorkerConfig

logger = logging.getLogger("energon")


@dataclass(frozen=True, repr=False)
class SavableDataset(IterableLanes[T_co], Dataset[T_co]):
    """A pipeline from the samples of some leaves to batches. Pass it to a loader.

    Immutable and without a position: any number of loaders may share one, and wrappers may be put
    around it. Iterating over it yields the batches of this rank from the beginning, in this
    process.

    Args:
        stage: The last stage of the pipeline.
        plan: The order of its samples.
        worker_config: Rank and workers.
        batch_size: Samples (or packs) of a batch; None yields them one by one.
        packing_buffer_size: Samples that are divided into packs together; None does not pack.
        reader: Reads the samples, and locates them.
        data: For each leaf, what identifies its samples: a saved state must match it.
        virtual_epoch_length: Batches of each rank after which an epoch ends; 0 never ends it.
        restart: Whether each pass starts from the beginning (validation) or continues.
        batch_drop_last: Whether the length excludes a batch that is not full.
        batch_rows: Rows per batch, unless hooks skip some; None if batches differ.
        grouping: Whether samples wait for others of their group.
        read_from: The source of a training run, for commands that open its states: `path`,
            `split`, and `dataset_config`, `split_config` and `exclude_from` if given.

    Example:
        >>> from energon import WorkerConfig, get_train_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_train_dataset("photos", worker_config=config, batch_size=4)
        >>> batch = next(iter(dataset))
        >>> dataset.restore_sample(batch.__restore_key__).__key__ == batch.__key__
        True
    """

    stage: Dataset[Any]
    plan: PlanRecipe
    worker_config: WorkerConfig
    batch_size: int | None
    reader: LeafReader
    packing_buffer_size: int | None = None
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    virtual_epoch_length: int = 0
    restart: bool = False
    batch_drop_last: bool = False
    batch_rows: int | None = None
    grouping: bool = False
    read_from: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        register_with_torch(type(self))
        register_with_notebook()

    def _repr_html_(self) -> str:
        """Return a table of its settings, for notebooks."""
        leaves = [
            safe_html(f"{leaf.uid}: {counted(leaf.num_samples, 'sample', grouped=True)}")
            for leaf in self.plan.leaves
        ]
        packs = self.packing_buffer_size
        rows = [
            ("datasets", "<br>".join(leaves)),
            ("batch", "one by one" if self.batch_size is None else f"{self.batch_size:,}"),
            *([("packed from", f"{packs:,} samples")] if packs else []),
            ("seed", str(self.plan.seed)),
            ("ranks", f"{self.worker_config.world_size:,}"),
            ("workers per rank", f"{self.worker_config.num_workers:,}"),
        ]
        return table_html(type(self).__name__, rows)

    @property
    def yields_batches(self) -> bool:
        """Whether an item is a batch, for which torch's DataLoader needs `batch_size=None`."""
        return self.batch_size is not None or isinstance(self.plan.balance, PackedOrder)

    @property
    def default_lanes(self) -> int:
        """The number of lanes of a new run."""
        if self.grouping or self.packing_buffer_size:
            return super().default_lanes
        return default_lanes(self.plan, self.worker_config, batch_size=self.batch_size or 1)

    @property
    def default_streams(self) -> int | None:
        """How many streams the lanes of a new run share; None for as many as there are."""
        return streams(self.worker_config)

    def __repr__(self) -> str:
        leaves = self.plan.leaves
        samples = sum(leaf.num_samples for leaf in leaves)
        return (
            f"<{type(self).__name__} of {counted(samples, 'sample')} in "
            f"{counted(len(leaves), 'dataset')}, batch size {self.batch_size}; config() tells all>"
        )

    def __len__(self) -> int:
        """Return how many batches this rank delivers in an epoch."""
        config, lanes = self.worker_config, self.default_lanes
        length = loop_length(self, config.rank_lanes(lanes), lanes)
        if length is not None:
            return length
        samples = sum(round(leaf.num_samples * leaf.repetitions) for leaf in self.plan.leaves)
        of_a_rank = (self.batch_size or 1) * config.world_size
        return samples // of_a_rank if self.batch_drop_last else -(-samples // of_a_rank)

    def open_lane(self, lane: Lane, state: State | None = None) -> DatasetIterator[T_co]:
        """Start or resume one lane."""
        lane.seed, lane.stripe = self.plan.seed, self.plan.lane_stripe
        lane.worker_config = self.worker_config
        return self.open(lane, state)

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return self._planned_stage(lane).open(lane)

    def _planned_stage(self, lane: Lane) -> Dataset[Any]:
        if lane.pass_number and not self.restart:
            return self._with_plan(self.plan.after(lane.pass_number), lane.lanes)
        return self._planned(lane.lanes)

    def _planned(self, lanes: int) -> Dataset[Any]:
        """Return the pipeline of the first pass for `lanes` lanes, the same object each time."""
        if lanes not in self._stages:
            self._stages[lanes] = self._with_plan(self.plan, lanes)
        return self._stages[lanes]

    def _with_plan(self, plan: PlanRecipe, lanes: int) -> Dataset[Any]:
        return ChangesDataset(self.stage, plan(lanes), len(self.plan.past))

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self._planned(lanes).num_items(lane, lanes)

    def read_again(self, lane: Lane, item_states: Sequence[ItemState]) -> list[Any]:
        return self._planned_stage(lane).read_again(lane, item_states)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        if lane.reading.plan is None:
            lane.reading.plan = self._plan_of(key, lane.lanes)
        return self.stage.restore(lane, key)

    def _plan_of(self, key: RestoreKey, lanes: int) -> Plan:
        """Return the plan of the pass that the first sample of a restore key belongs to."""
        sample = [part for part in flat(key) if isinstance(part, int)][:3]
        if len(sample) == 3:
            with suppress(ConfigError):  # drawn with replacement
                for recipe in self.plan.passes_until_now:
                    if recipe(lanes).find(*sample) is not None:
                        return recipe(lanes)
        return self.plan(lanes)

    def state_after(self, batches: int) -> State | None:
        """Return the state of a lane after this many batches, if no hook has skipped a sample.

        None if batches take different numbers of rows, the mix has changed, or the data end.
        """
        if self.batch_rows is None or self.plan.past or not self._is_endless:
            return None
        return self.state_at(batches * self.batch_rows)

    def state_at(self, row: int, changes: Sequence[int] = ()) -> State:
        """Return the state of a lane before a row, with nothing pending.

        Args:
            row: The row.
            changes: Rows of its stream at which the mix has changed.
        """
        return {**_at_row(self._start, row), "changes": list(changes)}

    @cached_property
    def _stages(self) -> dict[int, Dataset[Any]]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def _is_endless(self) -> bool:
        return self.num_batches(0, self.plan.parts) is None

    @cached_property
    def _start(self) -> State:
        """The state of a lane before its first batch, in which only the row differs later."""
        return self.open_lane(Lane(0, self.plan.parts)).state_dict()

    def describe_row(self, lane: int, lanes: int, row: int, state: State | None = None) -> str:
        """Return in words the sample at a row of a lane: its key, shard and offset.

        Never fails because of the data, since messages about failures contain it.

        Args:
            lane: Number of the lane.
            lanes: Number of lanes of the run.
            row: The row.
            state: Any state of the lane, which records where its mix was changed.
        """
        sample_key = self._restore_key_of(lane, lanes, row, state)
        return f"{describe_sources(self.reader.locate(sample_key))}, epoch {sample_key[1]}"

    def quarantine_entry(
        self, lane: int, lanes: int, row: int, state: State | None = None
    ) -> str | None:
        """Return the line of a quarantine file that excludes the sample at a row of a lane.

        For a join, that of the first sample it joins. None if its shard cannot be read.
        """
        first, *_ = self.reader.locate(self._restore_key_of(lane, lanes, row, state))
        return first.quarantine_entry if isinstance(first, LocatedSource) else None

    def _restore_key_of(
        self, lane: int, lanes: int, row: int, state: State | None
    ) -> tuple[int, int, int]:
        """Return the leaf, epoch and ordinal at a row of a lane."""
        plan = self.plan(lanes)
        if self.plan.past:
            plan = plan.with_changes(lane, rows_of_changes(state, len(self.plan.past)))
        leaf, epoch, ordinal = plan.at(lane, np.array([row]))
        return int(leaf[0]), int(epoch[0]), int(ordinal[0])

    def report(
        self, *, lanes: int, states: Mapping[int, State | None], counts: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return the draws of some lanes from each dataset, computed without iterating, as JSON.

        Args:
            lanes: Number of lanes of the run.
            states: Positions of the lanes in question; None at the beginning.
            counts: Statistics of hooks by name.
        """
        plan = self.plan(lanes)
        drawn = np.zeros(len(self.plan.leaves))
        for lane, state in states.items():
            changed = plan.with_changes(lane, rows_of_changes(state, len(self.plan.past)))
            drawn += changed.leaf_counts(lane, state["read"] if state else 0)
        total = float(drawn.sum())
        tokens = _sample_tokens(self.plan)
        datasets: dict[str, Any] = {}
        for number, leaf in enumerate(self.plan.leaves):
            count = float(drawn[number])
            epochs = count * lanes / len(states) / leaf.num_samples if states else 0.0
            size = self.reader.sources[number].mean_sample_bytes
            datasets[leaf.uid] = {
                "samples": round(count),
                "share": round(count / total, 6) if total else 0.0,
                "epochs": round(epochs, 4),
                "bytes": round(count * size),
                **({"tokens": round(count * tokens[number])} if number in tokens else {}),
                **_outcomes(counts, leaf.uid),
            }
        return {"samples": round(total), "datasets": datasets}

    def costs_of_step(self, lane: int, lanes: int, state: State | None) -> StepCosts | None:
        """Return the costs of the batches of a step by measures, one of which is a lane's last.

        None if batches are not balanced, if the lane has had none in the present pass, and where
        the data ends. Hooks that skip samples are not considered.

        Args:
            lane: Number of the lane.
            lanes: Number of lanes of the run.
            state: State of the lane after the batch.
        """
        if self.plan.balance is None or not (state and state["read"]):
            return None
        plan = self.plan(lanes).with_changes(lane, rows_of_changes(state, len(self.plan.past)))
        if not isinstance(plan, BalancedPlan):
            return None
        return plan.costs_of_step(lane, state["read"] - 1)

    def restore_sample(
        self,
        restore_key: RestoreKey,
        *,
        lanes: int | None = None,
        states: Mapping[int, State | None] | None = None,
    ) -> Any:
        """Recreate the batch, pack or sample with this restore key.

        It is read again from the data by the same hooks, wherever it is in the run.

        Args:
            restore_key: The `__restore_key__` of a batch returns the batch; that of a sample
                returns the sample as it was before packing and batching.
            lanes: Number of lanes of the run; None for the worker config's. Only the numbers that
                hooks can request depend on this and `states`.
            states: Known positions of lanes.

        Raises:
            StateError: If there is no such key, or a hook skips the sample.
        """
        if not isinstance(restore_key, tuple | list):
            raise StateError(
                f"{restore_key!r} is not a restore key; pass the __restore_key__ of a batch"
            )
        lane = Lane(
            number=0,
            lanes=lanes or self.default_lanes,
            seed=self.plan.seed,
            stripe=self.plan.lane_stripe,
            worker_config=self.worker_config,
            current=CurrentItem(batch=None, batch_rows=self.batch_rows),
        )
        key = to_tuple(restore_key)
        plan = self._plan_of(key, lane.lanes)
        for number, state in (states or {}).items() if self.plan.past else ():
            plan = plan.with_changes(number, rows_of_changes(state, len(self.plan.past)))
        lane.reading.plan = plan
        restored, _ = self.stage.restore(lane, key)
        return restored

    def fingerprint(self, lanes: int) -> dict[str, Any]:
        """Return everything that determines the order, as JSON; a state requires it to be equal.

        Only `run` is informational.
        """
        run = {**self.read_from, "world_size": self.worker_config.world_size}
        if self.plan.balance is not None and self.plan.balance.balance.skipped != "shorten":
            run["skipped"] = self.plan.balance.balance.skipped
        return {**self.config(lanes), **({"run": run} if self.read_from else {})}

    def config(self, lanes: int | None = None) -> dict[str, Any]:
        """Return a description of the pipeline as plain data."""
        return {
            **self.plan.to_json(),
            "lanes": self.default_lanes if lanes is None else lanes,
            "batch_size": self.batch_size,
            "packing_buffer_size": self.packing_buffer_size,
            "leaves": {
                leaf.uid: {**self.data.get(leaf.uid, {}), **leaf.to_json()}
                for leaf in self.plan.leaves
            },
        }

    def continuing(self, fingerprint: Mapping[str, Any]) -> SavableDataset:
        """Return this pipeline for a run that was saved with `fingerprint`.

        Its lanes share samples as they did. If the mix was a different one, it ends at the present
        positions of the lanes, where that of this pipeline begins.

        Raises:
            StateError: If epochs cannot continue with this mix.
        """
        changed = replace(self, plan=self.plan.continuing(fingerprint))
        if inexact := changed._breaks_epochs(fingerprint):
            logger.warning(
                "samples of the epochs in progress may be repeated or missed, because %s "
                "differ from the saved state",
                ", ".join(inexact),
            )
        return changed

    def begin_mix(
        self, fingerprint: Mapping[str, Any], states: Mapping[int, State | None], lanes: int
    ) -> dict[int, State | None]:
        """Return saved states of lanes, in which the mix of this pipeline has begun.

        It begins with the first row that no lane of a stream has read.

        Args:
            fingerprint: The fingerprint in the state.
            states: States of the known lanes; None at the beginning.
            lanes: Number of lanes of the run.

        Raises:
            StateError: If lanes are missing that share a stream with one of these.
        """
        return begin_changes(states, self.plan.continuing(fingerprint), lanes)

    def restarted(self) -> SavableDataset:
        """Return this pipeline for another pass over the data: of training, in another order."""
        if self.restart:
            return replace(self, plan=replace(self.plan, eras=())) if self.plan.eras else self
        return replace(self, plan=self.plan.after(1))

    def _breaks_epochs(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the differences that make epochs in progress inexact."""
        present = self.fingerprint(self.default_lanes)
        names = (
            "kind",
            "seed",
            "repeat",
            "stripe",
            "shuffle_window",
            "packing_buffer_size",
            "balance",
        )
        inexact = [name for name in names if saved.get(name) != present.get(name)]
        before, now = saved.get("leaves"), present["leaves"]
        if isinstance(before, Mapping):
            # A blend may gain and lose datasets; in a line each has its place.
            uids = before.keys() & now.keys() if self.plan.kind == "blend" else {*before, *now}
            inexact += [f"leaves.{uid}" for uid in sorted(uids) if before.get(uid) != now.get(uid)]
        return inexact


def _at_row(state: State, row: int) -> State:
    """Return the state of a lane at another row, with nothing pending."""
    return {
        name: row
        if name in ("row", "read")
        else _at_row(value, row)
        if isinstance(value, dict)
        else value
        for name, value in state.items()
    }


_OUTCOMES = ("skipped", "failed")


def _sample_tokens(recipe: PlanRecipe) -> dict[int, float]:
    """Return the average tokens per sample, for leaves whose tokens the metadataset gives."""
    averages: dict[int, float] = {}
    for source, tokens in _sizes(recipe.mix) if recipe.mix else ():
        leaves = recipe.blend_sources[source]
        samples = sum(recipe.leaves[leaf].num_samples for leaf in leaves)
        averages |= dict.fromkeys(leaves, tokens / samples)
    return averages


def _sizes(mix: Mix) -> list[tuple[int, float]]:
    sizes = []
    for entry in mix.entries:
        if isinstance(entry.node, Mix):
            sizes += _sizes(entry.node)
        elif entry.size is not None:
            sizes.append((entry.node, entry.size))
    return sizes


def _outcomes(counts: Mapping[str, int], name: str) -> dict[str, dict[str, int]]:
    """Return how often hooks skipped samples of a dataset, or failed on them."""
    outcomes: dict[str, dict[str, int]] = {outcome: {} for outcome in _OUTCOMES}
    for key, count in counts.items():
        outcome, _, hook_and_dataset = key.partition(": ")
        hook, _, dataset = hook_and_dataset.partition(": ")
        if outcome in outcomes and dataset == name:
            outcomes[outcome][hook] = count
    return outcomes
