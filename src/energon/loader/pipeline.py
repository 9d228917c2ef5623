"""What the loader asks of a pipeline, and all that it knows about one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from energon.stages.base import DatasetIterator, State
from energon.stages.lane import Lane
from energon.worker import WorkerConfig


class Pipeline(Protocol):
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
        """Whether each `iter()` starts at the first batch (validation) instead of continuing."""

    def open_lane(self, lane: Lane, state: State | None) -> DatasetIterator[Any]:
        """Return the batches of `lane` from where `state` was saved; None is the beginning."""

    def num_batches(self, lane: int, lanes: int) -> int | None:
        """Return how many batches lane `lane` of `lanes` has in all; None means no end."""

    def fingerprint(self, lanes: int) -> dict[str, Any]:
        """Return what a saved state has to agree with, as JSON."""


@runtime_checkable
class DescribesRows(Protocol):
    """A pipeline that can also say what is at a row, for messages about rows left out."""

    def describe_row(self, lane: int, lanes: int, row: int, state: State | None = None) -> str:
        """Return key, shard and offset of the sample at `row` of a lane.

        Args:
            lane: Which lane.
            lanes: Of how many.
            row: Which row.
            state: Any state of the lane.
        """


@runtime_checkable
class RestoresSamples(Protocol):
    """A pipeline that can also make single batches and samples again."""

    def restore_sample(
        self,
        key: Any,
        *,
        lanes: int | None = None,
        states: Mapping[int, State | None] | None = None,
    ) -> Any:
        """Return what has this restore key.

        Args:
            key: The key.
            lanes: How many lanes the run has; None for that of the worker config.
            states: Where the lanes are that are known.
        """


@runtime_checkable
class Continues(Protocol):
    """A pipeline that can also take up a run with another mix of datasets, or other lanes."""

    @property
    def default_streams(self) -> int | None:
        """How many streams the lanes of a new run share; None for as many as there are."""

    def continuing(self, fingerprint: Mapping[str, Any]) -> Pipeline:
        """Return the pipeline for a run that was saved with `fingerprint`."""

    def begin_mix(
        self, fingerprint: Mapping[str, Any], states: Mapping[int, State | None], lanes: int
    ) -> Mapping[int, State | None]:
        """Return saved states of lanes, in which the mix of this pipeline has begun.

        Args:
            fingerprint: What the run was saved with.
            states: Of the lanes that are known; None at the beginning.
            lanes: How many lanes the run has in all.

        Raises:
            StateError: If lanes are missing that begin it together with one of these.
        """

    def restarted(self) -> Pipeline:
        """Return the pipeline for another pass over the data, from the beginning."""


@runtime_checkable
class CountsRows(Protocol):
    """A pipeline that can also say where a lane is after a number of batches."""

    def state_after(self, batches: int) -> State | None:
        """Return the state of any lane after this many batches; None if that is not known.

        It is known where all batches take equally many rows, as long as nothing is skipped.
        """


@runtime_checkable
class Reports(Protocol):
    """A pipeline that can also say what was drawn from which dataset."""

    def report(
        self, *, lanes: int, states: Mapping[int, State | None], counts: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return the achieved mix of the lanes in `states`, of `lanes` in all, as JSON.

        Args:
            lanes: How many lanes the run has.
            states: State of each lane that is asked for; None at the beginning.
            counts: Statistics by name.
        """
