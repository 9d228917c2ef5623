"""Pack samples: divide windows of the stream into groups, and make one sample of each.

A window consists of the samples carried over from the previous one and enough new samples to fill
it. The next window is read while packs of the open one are yielded, a share of it with each pack,
so that packs come at an even pace. The position is the start of the open window and the number of
its groups that have been yielded; resuming reads the window and divides it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from energon.arrays import Ints
from energon.errors import (
    ConfigError,
    FatalSampleError,
    SkipSample,
    StateError,
    check_at_least,
)
from energon.packing.packer import Selection
from energon.plan.packs import PlannedPacks
from energon.plan.rows import Rows
from energon.samples.crude import RestoreKey, flat, joint_key, key_of, split_key, stamp
from energon.stages.base import Dataset, DatasetIterator, ItemState, State, StateKind, unpack
from energon.stages.batch import Units
from energon.stages.hooks.hook import SKIPPED, ApplyIterator, Hook, HookRunner, reapply, runners_of
from energon.stages.lane import Lane, SeedKey
from energon.stages.map import row_of


class PackEntry(NamedTuple):
    """A sample of a window and its state, which is None if a hook made the sample."""

    sample: Any
    item_state: ItemState = None

    @property
    def row(self) -> int:
        """The row that it came from; -1 if unknown."""
        return row_of(self.item_state)


@dataclass
class Window:
    """A window, divided into groups.

    Args:
        groups: Its groups; those already yielded are emptied, to free their samples.
        carried: Samples that are offered again with the next window.
        stop: State of the stream after its last new sample.
        stop_row: Row of the stream after its last new sample.
        opened_at: The first group to be yielded after the window was read.
    """

    groups: list[list[PackEntry]]
    carried: list[PackEntry]
    stop: State
    stop_row: int
    opened_at: int


@dataclass
class Start:
    """The saved start of a window.

    Args:
        inner: State of the stream before its first new sample.
        carried: States of the samples carried over from the previous window.
        group: Number of its groups that have been yielded.
        skipped: Rows that were skipped when the window was first divided; None before that.
        batch: The batch for which its new samples were read; None before that.
        opened: The batch for which it was divided and the next window is read; None before that.
    """

    inner: State
    carried: list[ItemState] = field(default_factory=list)
    group: int = 0
    skipped: list[int] | None = None
    batch: int | None = None
    opened: int | None = None


def divide_window(
    selected: Any, entries: list[PackEntry], *, hook: str
) -> tuple[list[list[PackEntry]], list[PackEntry]]:
    """Return the groups of a window, and the samples that the hook carries over to the next.

    Args:
        selected: What the hook returned: groups of samples or a `Selection`, or SKIPPED.
        entries: The samples that it was given.
        hook: How messages call it.

    Raises:
        FatalSampleError: If it returned something else, or carries what it was not given.
    """
    if selected is SKIPPED:
        return [], []
    if not isinstance(selected, Selection):
        selected = Selection(selected)
    try:
        groups = [list(group) for group in selected.groups]
    except TypeError as error:
        raise FatalSampleError(
            f"{hook} returned {type(selected.groups).__name__}; expected lists of samples, one "
            "for each pack, or a Selection"
        ) from error
    entries_by_id = {id(entry.sample): entry for entry in entries}
    return (
        [
            [entries_by_id.get(id(sample)) or PackEntry(sample) for sample in group]
            for group in groups
            if group
        ],
        _entries_of(selected.carry, entries),
    )


def _entries_of(samples: Sequence[Any], entries: list[PackEntry]) -> list[PackEntry]:
    """Return the entries of these `samples`, known by identity."""
    entries_by_id: dict[int, list[PackEntry]] = {}
    for entry in reversed(entries):
        entries_by_id.setdefault(id(entry.sample), []).append(entry)
    chosen = []
    for sample in samples:
        if not entries_by_id.get(id(sample)):
            raise FatalSampleError(
                "a sample that should be carried over to the next window is not one of this "
                "window, or is named twice; carry the objects that the hook was given"
            )
        chosen.append(entries_by_id[id(sample)].pop())
    return chosen


class _Packs(Dataset[Any]):
    """Base of stages that make a pack of the samples of each group."""

    dataset: Dataset[Any]
    pack: tuple[Hook, ...]
    postencode: tuple[Hook, ...]

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self.dataset.num_items(lane, lanes)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        split = split_key(key, "pack")
        if split is None:
            return self.dataset.restore(lane, key)
        keys, subs = split
        samples = []
        for each in keys:
            sample, _ = self.dataset.restore(lane, each)
            own = key_of(sample) or each
            hooks = self.postencode
            samples.append(reapply(sample, hooks, lane, seed_key=flat(own), key=own, subs=())[0])
        own = ("pack", tuple(keys))
        pack, subs = reapply(
            samples, self.pack, lane, seed_key=pack_seed_key(keys[0]), key=own, subs=subs
        )
        if subs == split[1]:
            stamp(pack, own)
        return pack, subs


@dataclass(frozen=True)
class PlannedPackDataset(_Packs):
    """Make a pack of the samples of each unit of rows, as the plan has divided them.

    Args:
        dataset: The samples.
        unit_rows: Rows of a unit.
        pack: Turns the samples of a unit into a pack.
        postencode: Applied to each sample before it is packed; must return one.
    """

    dataset: Dataset[Any]
    unit_rows: int
    pack: tuple[Hook, ...]
    postencode: tuple[Hook, ...] = ()

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _PlannedPackIterator(self, lane)

    def read_again(self, lane: Lane, item_states: Sequence[ItemState]) -> list[Any]:
        return super().read_again(lane, [position for _, position in item_states])


@dataclass(frozen=True)
class PlannedLength:
    """Returns a sample of a planned pack if it is not longer than planned.

    Args:
        packs: What to do if it is longer.
        measure: Returns its length, one number for each dimension.
        lengths: Returns the planned lengths of rows.
    """

    packs: PlannedPacks
    measure: Callable[[Any], int | Sequence[int]]
    lengths: Callable[[Rows], Ints]

    def __call__(self, sample: Any) -> Any:
        key = key_of(sample)
        if key is None:
            raise ConfigError(
                "its planned length is unknown, because the sample has no __restore_key__; return "
                "that of the hook's argument with it"
            )
        leaf, epoch, ordinal = (np.array([number], np.int64) for number in key[:3])
        planned = self.lengths(Rows(leaf.astype(np.int32), epoch, ordinal))[0]
        if not self._is_longer(sample, planned):
            return sample
        lengths = f"its length is {self._of(sample)}, and {planned.tolist()} were planned by "
        problem = f"{lengths}{self.packs.length!r}"
        if self.packs.if_longer == "drop":
            raise SkipSample("longer than planned")
        if self.packs.if_longer == "error":
            raise ConfigError(
                f"{problem}; measure the dataset again, or pass PlannedPacks(if_longer=...)"
            )
        room = planned.tolist() if len(planned) > 1 else int(planned[0])
        shorter = self.packs.if_longer(sample, room)
        if self._is_longer(shorter, planned):
            raise ConfigError(f"{problem}; if_longer returned a sample of {self._of(shorter)}")
        return shorter

    def _of(self, sample: Any) -> list[int]:
        return np.atleast_1d(self.measure(sample)).tolist()  # type: ignore[no-any-return]

    def _is_longer(self, sample: Any, planned: Ints) -> bool:
        return bool((np.array(self._of(sample)) > planned).any())


@dataclass(frozen=True)
class PackDataset(_Packs):
    """Make packs of samples that are close to each other in the stream.

    Args:
        dataset: The samples.
        buffer_size: Number of samples in a window.
        select: Takes the list of samples of a window and returns a list of groups, or a
            `Selection`. Samples in neither are skipped, and counted.
        pack: Turns the samples of a group into a pack; may yield several.
        postencode: Applied to each sample of a group before it is packed; must return one.
        tolerance: Number of consecutive windows without a group that ends the run; 0 for no limit.
    """

    dataset: Dataset[Any]
    buffer_size: int
    select: Hook
    pack: tuple[Hook, ...]
    postencode: tuple[Hook, ...] = ()
    tolerance: int = 100

    def __post_init__(self) -> None:
        check_at_least(1, "packing_buffer_size", self.buffer_size)

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _PackIterator(self, lane)


def pack_seed_key(first: RestoreKey) -> SeedKey:
    """Return the seed key of the hooks of a pack, which is the key of its first sample."""
    return ("pack", *flat(first))


class _PacksIterator(ApplyIterator):
    """Makes packs of groups of samples. Subclasses choose the groups."""

    def __init__(self, inner: DatasetIterator[Any], stage: _Packs, lane: Lane) -> None:
        super().__init__(inner, lane)
        self.postencode = runners_of(stage.postencode, lane)
        self.pack = runners_of(stage.pack, lane)

    def _next_group(self) -> list[PackEntry]:
        """Return the samples of the next group."""
        raise NotImplementedError

    def _produce(self) -> Any:
        group = self._next_group()
        if self.lane.skip_rows:
            # Samples that killed a worker after the window was divided are dropped from the pack.
            group = [entry for entry in group if entry.row not in self.lane.skip_rows]
        members = samples = [entry.sample for entry in group]
        if self.postencode:
            encoded = [(entry.sample, self._postencode(entry)) for entry in group]
            members = [sample for sample, output in encoded if output is not SKIPPED]
            samples = [output for _, output in encoded if output is not SKIPPED]
        if not samples:
            return SKIPPED
        count = len(samples)
        self._enter(group[0], several=True)
        key, first = joint_key("pack", members), key_of(members[0])
        seed_key = self._lane_seed_key() if first is None else pack_seed_key(first)
        pack = self._apply(samples, self.pack, seed_key, lambda: key)
        if pack is not SKIPPED:
            self.lane.counts["samples"] += count
        if pack is not SKIPPED and self.outputs is None and key is not None:
            stamp(pack, key)
        return pack

    def _enter(self, entry: PackEntry, *, several: bool = False) -> None:
        row = entry.row
        if row >= 0:
            self.lane.enter(row, key_of(entry.sample) or (), several=several)
        else:
            self.lane.enter(self.row, several=several)

    def _postencode(self, entry: PackEntry) -> Any:
        sample = entry.sample
        self._enter(entry)
        for runner in self.postencode:
            key = key_of(sample)
            seed_key = self._lane_seed_key() if key is None else key
            sample = runner(sample, seed_key)
            if sample is SKIPPED:
                break
            if isinstance(sample, Iterator):
                raise FatalSampleError(
                    f"{runner.name} yields several samples for one that was selected; in a "
                    "pipeline with packing it must return one. Yield them in preencode_sample"
                )
        return sample

    def _lane_seed_key(self) -> SeedKey:
        return ("lane", self.lane.number, *self.row_key)


class _PlannedPackIterator(_PacksIterator):
    saves: ClassVar[Mapping[str, StateKind]] = Units.saves

    def __init__(self, stage: PlannedPackDataset, lane: Lane) -> None:
        super().__init__(stage.dataset.open(lane), stage, lane)
        self.units = Units(self.inner, stage.unit_rows, lane)
        self.first_row = -1

    @property
    def row(self) -> int:
        return self.units.row

    @property
    def item_state(self) -> ItemState:
        return [self.first_row, super().item_state]

    def _position(self) -> State:
        return self.units.position()

    def _go_to(self, position: State) -> None:
        self.units.go_to(position)

    def _next_group(self) -> list[PackEntry]:
        samples, item_states, _ = self.units.next()
        if not samples:
            raise StopIteration
        self.first_row = row_of(item_states[0])
        return list(map(PackEntry, samples, item_states))


class _PackIterator(_PacksIterator):
    saves: ClassVar[Mapping[str, StateKind]] = {
        "inner": dict,
        "carried": list,
        "group": int,
        "skipped": list | None,
        "batches": list,
    }

    def __init__(self, stage: PackDataset, lane: Lane) -> None:
        # Samples of a window are counted when it opens, even if it is read again after a restore.
        self.inner_lane = replace(lane, counts=Counter())
        super().__init__(stage.dataset.open(self.inner_lane), stage, lane)
        self.stage = stage
        self.select = HookRunner(stage.select, self.inner_lane)
        self.start = Start(self.inner.state_dict())
        self.start_row = self.inner.row
        self.window: Window | None = None
        self.carried: list[PackEntry] | None = []
        self.ahead: list[PackEntry] = []
        self.windows_in_vain = 0

    @property
    def row(self) -> int:
        return self.start_row

    @property
    def row_key(self) -> tuple[int, ...]:
        return (self.start_row, self.start.group, self.given)

    def _position(self) -> State:
        start = self.start
        return {
            "inner": start.inner,
            "carried": start.carried,
            "group": start.group,
            "skipped": start.skipped,
            "batches": [start.batch, start.opened],
        }

    def _go_to(self, position: State) -> None:
        inner, carried, group, skipped, batches = unpack(position, self.saves)
        if not all(isinstance(row, int) for row in skipped or ()):
            raise StateError(
                f"saved state has the skipped rows {skipped!r:.200}, expected numbers; it is "
                "damaged or was edited"
            )
        match batches:
            case [int() | None as batch, int() | None as opened]:
                self.start = Start(inner, carried, group, skipped, batch, opened)
            case _:
                raise StateError(
                    f"saved state has the batches {batches!r:.200} of a window, expected two "
                    "numbers; it is damaged or was edited"
                )
        self.inner.load_state_dict(self.start.inner)
        self.start_row = self.inner.row
        self.carried = None

    def _next_group(self) -> list[PackEntry]:
        while self.window is None:
            self._open_window()
            self.before = self._position()
        window, start = self.window, self.start
        self._look_ahead(window)
        group, window.groups[start.group] = window.groups[start.group], []
        start.group += 1
        if start.group == len(window.groups):
            self._close_window(window)
        return group

    def _look_ahead(self, window: Window) -> None:
        """Read the share of the next window that is due with the next pack."""
        given = self.start.group - window.opened_at
        total = len(window.groups) - window.opened_at
        count = self.stage.buffer_size - len(window.carried)
        self._read_ahead(count * given // total, batch=self.start.opened)

    def _close_window(self, window: Window) -> None:
        carried = [entry.item_state for entry in window.carried]
        self.start = Start(window.stop, carried, batch=self.start.opened)
        self.start_row = window.stop_row
        self.carried = window.carried
        self.window = None

    def _open_window(self) -> None:
        """Read the rest of the next window, and divide it."""
        start, lane, inner_lane = self.start, self.lane, self.inner_lane
        # A window that was divided before must be divided in the same way, even if one of its
        # samples has killed a worker since.
        before = None if start.skipped is None else frozenset(start.skipped)
        inner_lane.skip_rows = lane.skip_rows if before is None else before
        current = lane.current
        start.batch = current.batch if start.batch is None else start.batch
        start.opened = current.batch if start.opened is None else start.opened
        carried = self._carried_entries()
        requested = self.stage.buffer_size - len(carried)
        self._read_ahead(requested, batch=start.batch)
        entries = carried + self.ahead
        last = len(self.ahead) < requested
        if not entries:
            raise StopIteration
        self.ahead = []
        with current.working_for(start.opened):
            groups, carried = self._divide(entries, last=last)
        if before is None:
            lane.counts.update(inner_lane.counts)
            start.skipped = sorted(lane.skip_rows)
        inner_lane.counts.clear()
        inner_lane.skip_rows = lane.skip_rows
        self.window = Window(
            groups, carried, self.inner.state_dict(), self.inner.row, opened_at=start.group
        )
        if start.group >= len(groups):
            self._close_window(self.window)

    def _carried_entries(self) -> list[PackEntry]:
        if self.carried is not None:
            return self.carried
        item_states = self.start.carried
        samples = self.stage.dataset.read_again(self.inner_lane, item_states)
        pairs = zip(samples, item_states, strict=True)
        return [
            PackEntry(sample, item_state) for sample, item_state in pairs if sample is not SKIPPED
        ]

    def _read_ahead(self, count: int, *, batch: int | None) -> None:
        """Read until the next window has `count` samples, or the stream ends."""
        inner, ahead = self.inner, self.ahead
        with self.lane.current.working_for(batch):
            while len(ahead) < count:
                samples, item_states = inner.take(count - len(ahead))
                if not samples:
                    break
                ahead += map(PackEntry, samples, item_states)

    def _divide(
        self, entries: list[PackEntry], *, last: bool
    ) -> tuple[list[list[PackEntry]], list[PackEntry]]:
        """Return the groups of the samples of a window, and those carried over to the next."""
        samples = [sample for sample, _ in entries]
        self._enter(entries[0], several=True)
        first = key_of(samples[0])
        seed_key = self._lane_seed_key() if first is None else ("select", *flat(first))
        selected = self.select(samples, seed_key)
        groups, carried = divide_window(selected, entries, hook=self.stage.select.name)
        if last and not groups:
            carried = []
        left_out = len(entries) - len(carried) - sum(map(len, groups))
        if left_out > 0:
            self.inner_lane.counts["dropped by packing"] += left_out
        self._check_progress(entries, groups, carried)
        return groups, carried

    def _check_progress(
        self, entries: list[PackEntry], groups: list[list[PackEntry]], carried: list[PackEntry]
    ) -> None:
        name, tolerance = self.stage.select.name, self.stage.tolerance
        self.windows_in_vain = 0 if groups else self.windows_in_vain + 1
        if len(carried) >= len(entries):
            raise FatalSampleError(
                f"{name} carries over all {len(entries)} samples of a window, so no pack would "
                "ever be made; select a group in every window, or drop samples"
            )
        if tolerance and self.windows_in_vain >= tolerance:
            raise FatalSampleError(
                f"{name} selected nothing from {self.windows_in_vain} windows of "
                f"{self.stage.buffer_size} samples in a row, which is the limit; check when "
                "it returns no groups"
            )
