"""What the loader asks of a pipeline, and all that it knows about one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

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
