"""What the loader asks of a pipeline and of the workers that host its lanes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from energon.loader.state import LanePosition
from energon.loader.transport.slots import EventLayout, SharedMemory
from energon.plan.balance import StepCosts
from energon.stages.base import DatasetIterator, State, T_co
from energon.stages.lane import Lane
from energon.worker import WorkerConfig


class Pipeline(Protocol[T_co]):
    """A run from rows of the plan to batches: immutable, and picklable by cloudpickle."""

    @property
    def worker_config(self) -> WorkerConfig:
        """Where this process stands in the training job."""

    @property
    def default_lanes(self) -> int:
        """The number of lanes of a new run."""

    @property
    def virtual_epoch_length(self) -> int:
        """Batches of a rank after which a `for` loop ends; 0 means where the data ends."""

    @property
    def restart(self) -> bool:
        """Whether each `iter()` starts at the first batch (validation) or continues (training)."""

    def open_lane(self, lane: Lane, state: State | None) -> DatasetIterator[T_co]:
        """Return the batches of `lane` from where `state` was saved; None is the beginning."""

    def num_batches(self, lane: int, lanes: int) -> int | None:
        """Return how many batches lane `lane` of `lanes` has in total; None means no end."""

    def fingerprint(self, lanes: int) -> dict[str, Any]:
        """Return the fingerprint that a saved state must match, as JSON."""


@runtime_checkable
class DescribesRows(Protocol):
    """A pipeline that can also describe a row, for messages about skipped rows."""

    def describe_row(self, lane: int, lanes: int, row: int, state: State | None = None) -> str:
        """Return in words the key, shard and offset of the sample at `row` of a lane.

        Args:
            lane: Number of the lane.
            lanes: How many lanes the run has.
            row: Number of the row.
            state: Any state of the lane.
        """

    def quarantine_entry(
        self, lane: int, lanes: int, row: int, state: State | None = None
    ) -> str | None:
        """Return the line of a quarantine file that excludes that sample; None if unknown."""


@runtime_checkable
class KnowsCosts(Protocol):
    """A pipeline that can also tell the costs of batches, if they are balanced."""

    def costs_of_step(self, lane: int, lanes: int, state: State | None) -> StepCosts | None:
        """Return the costs of the batches of a step, one of which is a lane's last; or None."""


@runtime_checkable
class RestoresSamples(Protocol):
    """A pipeline that can also recreate single batches and samples."""

    def restore_sample(
        self,
        key: Any,
        *,
        lanes: int | None = None,
        states: Mapping[int, State | None] | None = None,
    ) -> Any:
        """Recreate the batch or sample with this restore key.

        Args:
            key: The restore key.
            lanes: How many lanes the run has; None for that of the worker config.
            states: The known states of lanes.
        """


@runtime_checkable
class Continues(Protocol):
    """A pipeline that can also continue a run with another mix of datasets, or other lanes."""

    @property
    def default_streams(self) -> int | None:
        """How many streams the lanes of a new run share; None for as many as there are."""

    def continuing(self, fingerprint: Mapping[str, Any]) -> Pipeline:
        """Return the pipeline for a run that was saved with `fingerprint`."""

    def begin_mix(
        self, fingerprint: Mapping[str, Any], states: Mapping[int, State | None], lanes: int
    ) -> Mapping[int, State | None]:
        """Return saved states of lanes in which the mix of this pipeline has begun.

        Args:
            fingerprint: The fingerprint that the run was saved with.
            states: States of the known lanes; None at the beginning.
            lanes: How many lanes the run has in total.

        Raises:
            StateError: If lanes are missing that must begin it together with one of these.
        """

    def restarted(self) -> Pipeline:
        """Return the pipeline for another pass over the data, from the beginning."""


@runtime_checkable
class CountsRows(Protocol):
    """A pipeline that can also compute where a lane is after a number of batches."""

    @property
    def batch_size(self) -> int | None:
        """Number of samples, or of packs, in a batch; None yields them one by one."""

    @property
    def batch_rows(self) -> int | None:
        """Number of rows per batch, unless hooks skip some; None if batches differ."""

    def state_after(self, batches: int) -> State | None:
        """Return the state of any lane after this many batches; None if it is unknown.

        It is known if all batches take the same number of rows, as long as nothing is skipped.
        """

    def state_at(self, row: int, changes: Sequence[int] = ()) -> State:
        """Return the state of any lane before a row, with nothing pending.

        Args:
            row: The row.
            changes: Rows of its stream at which the mix has changed.
        """


@runtime_checkable
class Reports(Protocol):
    """A pipeline that can also report what was drawn from which dataset."""

    def report(
        self, *, lanes: int, states: Mapping[int, State | None], counts: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return the achieved mix of the lanes in `states`, out of `lanes` in total, as JSON.

        Args:
            lanes: How many lanes the run has.
            states: State of each requested lane; None at the beginning.
            counts: Statistics by name.
        """


class Event(NamedTuple):
    """The next event of a worker: a batch, the end of a lane, or a failure.

    Args:
        lane: The lane it concerns.
        batch: What the lane yielded.
        state: Pickled state of the lane after the batch; later batches do not change it. None if
            all that has changed is that its `since` counts one batch more.
        counts: Statistics of the lane after the batch.
        times: What it has spent time on; None if nothing was added, as with most batches: to send
            it takes longer than to send a small batch.
        ended: The lane has no more batches.
        error: Raised instead of a batch.
    """

    lane: int
    batch: Any = None
    state: bytes | None = None
    counts: Mapping[str, int] | None = None
    times: Mapping[str, int] | None = None
    ended: bool = False
    error: BaseException | None = None


class SharedEvent(NamedTuple):
    """An event as it was written by another process.

    Args:
        layout: Where its pickle and its buffers begin and end.
        content: What these are offsets of.
        lease: The view of shared memory that keeps it from being overwritten.
    """

    layout: EventLayout
    content: bytes | SharedMemory
    lease: Any = None


@dataclass(frozen=True)
class LanesToOpen:
    """Which lanes a worker hosts from now on, and where they continue."""

    lanes: int
    positions: dict[int, LanePosition]


class WorkerStatus(NamedTuple):
    """The status of a worker.

    Args:
        name: Its name in messages.
        pid: Process id; None before the process starts.
        ready: How many batches are ready to be taken, as far as is known without asking.
        thread: Native id of the thread that makes its batches; None before it starts.
    """

    name: str
    pid: int | None
    ready: int
    thread: int | None


class LaneWorker(Protocol):
    """A host of some lanes of a rank: the training process, a thread or a process."""

    def open(self, positions: Mapping[int, LanePosition], *, lanes: int) -> None:
        """Start hosting these lanes, out of `lanes` in total, and drop all others.

        The caller owns `positions` and advances it with every batch taken.
        """

    def take(self) -> Event:
        """Return the next event of the hosted lanes; raise only if there can be none."""

    @property
    def shared(self) -> SharedEvent | None:
        """The last event as other processes can read it; None if it was made in this one."""

    def arrived(self) -> Event | None:
        """Return the event that `take` returns next if it is here already; never wait."""

    @property
    def status(self) -> WorkerStatus:
        """Return its current status."""

    def stats(self) -> dict[str, int]:
        """Return the counts of events so far, by name."""

    def stop(self) -> None:
        """Begin to stop, without waiting."""

    def close(self) -> None:
        """Stop and release all resources. May be called twice."""


class Forgets(Protocol):
    """Something that belongs to one process."""

    def forget(self) -> None:
        """Give up what a fork has inherited."""


def forget_in_forks(owned: Forgets) -> None:
    """Call `forget` of an object in every fork of this process, while the object exists."""
    _owned.add(owned)


_owned: weakref.WeakSet[Forgets] = weakref.WeakSet()


def _forget() -> None:
    for each in list(_owned):
        each.forget()


os.register_at_fork(after_in_child=_forget)
