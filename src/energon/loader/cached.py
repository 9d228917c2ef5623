"""A pipeline whose hooks find the cache pool that the loader was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from energon.cache.pool import CachePool, activated
from energon.loader.pipeline import Continues, CountsRows, DescribesRows, Pipeline
from energon.stages.base import DatasetIterator, State
from energon.stages.lane import Lane


@dataclass(frozen=True)
class CachedPipeline:
    """`pipeline`, with `pool` active whenever its hooks run; the same in all else."""

    pipeline: Pipeline
    pool: CachePool

    def open_lane(self, lane: Lane, state: State | None) -> DatasetIterator[Any]:
        """Return the batches of `lane` from where `state` was saved; None is the beginning."""
        with activated(self.pool):
            return _ActivatedIterator(self.pipeline.open_lane(lane, state), self.pool)

    def restore_sample(
        self,
        key: Any,
        *,
        lanes: int | None = None,
        states: Mapping[int, State | None] | None = None,
    ) -> Any:
        """Return what has this restore key."""
        with activated(self.pool):
            return self.pipeline.restore_sample(  # type: ignore[attr-defined]
                key, lanes=lanes, states=states
            )

    def describe_row(self, lane: int, lanes: int, row: int, state: State | None = None) -> str:
        """Return key, shard and offset of the sample at `row` of a lane, if that is known."""
        if not isinstance(self.pipeline, DescribesRows):
            return "a sample of unknown origin"
        return self.pipeline.describe_row(lane, lanes, row, state)

    def continuing(self, fingerprint: Mapping[str, Any]) -> Pipeline:
        """Return the same for a run that was saved with `fingerprint`."""
        if not isinstance(self.pipeline, Continues):
            return self
        return CachedPipeline(self.pipeline.continuing(fingerprint), self.pool)

    def state_after(self, batches: int) -> State | None:
        """Return the state of a lane after so many batches; None if that is not known."""
        if not isinstance(self.pipeline, CountsRows):
            return None
        return self.pipeline.state_after(batches)

    def __len__(self) -> int:
        return len(self.pipeline)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "pipeline":  # while a copy is being unpickled
            raise AttributeError(name)
        return getattr(self.pipeline, name)


class _ActivatedIterator(DatasetIterator[Any]):
    def __init__(self, inner: DatasetIterator[Any], pool: CachePool) -> None:
        self.inner = inner
        self.pool = pool

    def __next__(self) -> Any:
        with activated(self.pool):
            return next(self.inner)

    @property
    def row(self) -> int:
        return self.inner.row

    def state_dict(self) -> State:
        return self.inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        with activated(self.pool):
            self.inner.load_state_dict(state)


def with_cache_pool(pipeline: Pipeline, pool: CachePool | None) -> Pipeline:
    """Return `pipeline` with `pool`, or as it is without one."""
    return pipeline if pool is None else CachedPipeline(pipeline, pool)
