"""Pipelines: a source and stages after it, as one immutable value.

Every method returns a new pipeline. What a pipeline iterates over is a function of its stages,
its seed and the epoch; epochs are counted as loops begin. How far the latest loop is can be
saved and restored if all stages can.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from energon.errors import ConfigError
from energon.webdataset.reexport import reexport
from energon.webdataset.running.dataset import TorchLookalike, with_length
from energon.webdataset.running.loop import EpochCounter, Extent, Loop, Passes, Scope, WorkerNotes
from energon.webdataset.running.place import Place, current_place
from energon.webdataset.stages.base import Context, Stage, State, close, describe
from energon.webdataset.stages.draws import default_seed
from energon.webdataset.stages.make import as_stages


class DataPipeline(TorchLookalike):
    """A source and the stages after it.

    Stages are the ones of this package, functions from iterator to iterator, or objects with
    `run(iterator)`. The first one may be any iterable, or a function without arguments. None is
    left out, lists are taken as several stages.

    Args:
        stages: The source and what comes after it.
        seed: What all random choices of the stages depend on; None means WDS_SEED of the
            environment, or 0.
    """

    def __init__(self, *stages: Any, seed: int | None = None) -> None:
        self.stages: tuple[Stage, ...] = as_stages(stages)
        self.seed = default_seed(seed)
        self._check_overrides()
        self.extent = Extent()
        self._epochs = EpochCounter()
        self._loop: Loop | None = None
        self._pending: State | None = None

    def __iter__(self) -> Iterator[Any]:
        place = current_place()
        state, self._pending = self._pending, None
        if state is not None:
            self._loop = Loop.restore(self, place, state)
            self._epochs.set(self._loop.epoch + 1)
        else:
            self._loop = Loop.begin(self, place, self._epochs.begin(), before=self._loop)
        return self._loop

    def open(self, context: Context) -> Iterator[Any]:
        """Return the items of one pass, opened stage after stage."""
        if not self.stages:
            raise ConfigError("a pipeline without stages has nothing to iterate over")
        items: Iterator[Any] = iter(())
        for number, stage in enumerate(self.stages):
            items = stage.open(items, context.at(number))
        return items

    def open_passes(self, place: Place, *, epoch: int, count: int | None) -> Passes:
        """Return the items of several passes that begin with `epoch`; None means no end."""
        return Passes(
            lambda number: self.open(Context(place, self.seed, number)), epoch=epoch, count=count
        )

    def compose(self, *stages: Any) -> Self:
        """Return this pipeline with more stages at its end."""
        changed = self._changed(
            stages=(*self.stages, *as_stages(stages, has_source=bool(self.stages)))
        )
        changed._check_overrides()
        return changed

    def append(self, stage: Any) -> Self:
        """Return this pipeline with one more stage."""
        return self.compose(stage)

    def stage(self, i: int) -> Stage:
        """Return stage number `i`, counted from 0."""
        return self.stages[i]

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1, *, scope: Scope = "job") -> Self:
        """Return this pipeline with loops of so many items, of which the next goes on.

        Items are what leaves the pipeline: samples, or batches after `batched`. All ranks get
        the same number, and the workers of a rank share it. The data is repeated, reshuffled,
        for as long as it takes.

        Args:
            nsamples: How many items.
            nbatches: Another name for the same.
            scope: Who shares the items: all ranks of the job, the workers of each rank, or each
                worker gets that many for itself.
        """
        items = max(nsamples, nbatches)
        if items < 1:
            raise ConfigError(f"with_epoch({items}): an epoch has one item or more")
        return self._changed(extent=Extent(passes=None, items=items, scope=scope, goes_on=True))

    def repeat(self, nepochs: int | None = None, nbatches: int | None = None) -> Self:
        """Return this pipeline with loops of several passes.

        Args:
            nepochs: How many; None or -1 means no end.
            nbatches: After how many items of this worker to end anyway; None means never.
        """
        passes = None if nepochs in (None, -1) else nepochs
        items = None if nbatches in (None, -1) else nbatches
        if (passes is not None and passes < 1) or (items is not None and items < 1):
            raise ConfigError(f"repeat({nepochs}, {nbatches}): expected numbers of 1 or more")
        return self._changed(extent=Extent(passes=passes, items=items, scope="worker"))

    def with_length(self, n: int | None = None, silent: bool = False) -> Self:
        """Return this pipeline with a length, that `len` returns.

        Args:
            n: The length; None counts the samples that the indexes of its shards list.
            silent: Accepted for compatibility.
        """
        sized: Self = with_length(self, n)
        return sized

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be number `epoch`, here and in workers that start with it."""
        self._epochs.set(epoch)
        self._loop = None

    def state_dict(self) -> State:
        """Return where the latest loop is: the next item of it comes first after a restore.

        Raises:
            StateError: If a stage cannot be saved; it is named.
        """
        if self._pending is not None:
            return self._pending
        if self._loop is None:
            return Loop.state_before(self, self._epochs.epochs)
        return self._loop.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Let the next loop go on where `state` was saved.

        Raises:
            StateError: If it was saved by another pipeline, or elsewhere in the job.
        """
        Loop.check(self, state)
        self._pending = state

    @property
    def worker_notes(self) -> WorkerNotes:
        """Where workers of other processes have stopped."""
        return self._epochs.notes

    def describe(self) -> list[Any]:
        """Return what a saved state has to agree with, as JSON."""
        return [describe(stage) for stage in self.stages]

    def close(self) -> None:
        """Give back what the latest loop holds: files, processes, connections."""
        close(self._loop)
        self._loop = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __add__(self, other: Any) -> Any:
        from torch.utils.data import ChainDataset

        return ChainDataset([self, other])  # type: ignore[list-item]

    def __repr__(self) -> str:
        names = ", ".join(str(describe(stage)["stage"]) for stage in self.stages)
        return f"<{type(self).__name__}: {names}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loop": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _check_overrides(self) -> None:
        """Raise ConfigError if a file in a cache stands for two of the shards."""
        urls = getattr(self.stages[0], "urls", None) if self.stages else None
        for stage in self.stages if isinstance(urls, tuple) else ():
            cache = getattr(getattr(stage, "opening", None), "cache", None)
            if cache is not None:
                cache.check_overrides(urls)

    def _changed(self, **changes: Any) -> Self:
        """Return a copy with other settings, that has not begun yet."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.__dict__.update(_epochs=EpochCounter(), _loop=None, _pending=None, **changes)
        return copied


__getattr__ = reexport(__name__, {"PipelineStage": "stages.make"})
