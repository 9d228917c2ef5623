"""One loop over a pipeline: the items of an epoch, in one place of the job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from energon.errors import StateError
from energon.webdataset.passes import Passes
from energon.webdataset.place import Place, torch_worker_info
from energon.webdataset.stage import StageIterator, State, unpack

FORMAT = "energon webdataset state"
VERSION = 1


class Loop(StageIterator):
    """The items of one loop.

    Args:
        pipeline: What is iterated over.
        place: Where.
        epoch: Number of the loop, from 0.
        passes: Where its items come from.
        given: How many of them were given out before.
    """

    def __init__(
        self, pipeline: Any, place: Place, epoch: int, passes: Passes, *, given: int = 0
    ) -> None:
        self.epoch = epoch
        self.place = place
        self._pipeline = pipeline
        self._passes = passes
        self._given = given
        self._is_over = False
        super().__init__()

    @classmethod
    def begin(cls, pipeline: Any, place: Place, epoch: int, *, before: Loop | None) -> Loop:
        """Return loop number `epoch`; one that goes on starts where the one before stopped."""
        extent = pipeline.extent
        if not extent.goes_on:
            count = extent.passes
            first = epoch if count is None else epoch * count
            passes = pipeline.open_passes(place, epoch=first, count=count)
            return cls(pipeline, place, epoch, passes)
        if before is not None and (before.place, before.epoch + 1) == (place, epoch):
            return cls(pipeline, place, epoch, before._passes)
        return cls(pipeline, place, epoch, _advanced(pipeline, place, epoch))

    @classmethod
    def restore(cls, pipeline: Any, place: Place, state: State) -> Loop:
        """Return the loop that was saved, where it was.

        Raises:
            StateError: If it was saved elsewhere in the job.
        """
        epoch, saved, given, items = (state[name] for name in ("epoch", "place", "given", "items"))
        if saved is not None and saved != _place(place):
            raise StateError(
                f"the state is that of rank, ranks, worker, workers {saved}, and is loaded at "
                f"{_place(place)}; load it where it was saved, or use WebLoader, whose states fit "
                "any number of workers"
            )
        if items is None:
            return cls.begin(pipeline, place, epoch, before=None)
        passes = pipeline.open_passes(place, epoch=epoch, count=pipeline.extent.passes)
        passes.load_state_dict(items)
        return cls(pipeline, place, epoch, passes, given=given)

    @staticmethod
    def check(pipeline: Any, state: State) -> None:
        """Raise StateError unless `state` was saved by a pipeline like this one."""
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise StateError(
                f"this is no state of a webdataset pipeline: {str(state)[:80]}; states of loaders "
                "are loaded by loaders"
            )
        names = ("format", "version", "seed", "stages", "epoch", "place", "given", "items")
        _, version, seed, stages, *_ = unpack(state, *names)
        if version != VERSION:
            raise StateError(f"the state has version {version}, wanted is {VERSION}")
        if seed != pipeline.seed:
            raise StateError(f"the state was saved with seed {seed}, this one is {pipeline.seed}")
        present = pipeline.describe()
        for number in range(max(len(stages), len(present))):
            was, now = (each[number] if number < len(each) else None for each in (stages, present))
            if was != now:
                raise StateError(
                    f"the state was saved by another pipeline; stage {number} was "
                    f"{str(was)[:300]}, now it is {str(now)[:300]}"
                )

    @staticmethod
    def state_before(pipeline: Any, epoch: int) -> State:
        """Return the state before the first item of loop number `epoch`, anywhere."""
        return _state(pipeline, epoch, place=None, given=0, items=None)

    def state_dict(self) -> State:
        """Return where the loop is; after its end, where the next one begins."""
        if self._is_over:
            goes_on = self._pipeline.extent.goes_on
            return _state(
                self._pipeline,
                self.epoch + 1,
                place=_place(self.place),
                given=0,
                items=self._passes.state_dict() if goes_on else None,
            )
        return _state(
            self._pipeline,
            self.epoch,
            place=_place(self.place),
            given=self._given,
            items=self._passes.state_dict(),
        )

    def load_state_dict(self, state: State) -> None:
        self._pipeline.load_state_dict(state)

    def close(self) -> None:
        super().close()
        self._passes.close()

    def _run(self) -> Iterator[Any]:
        yield from self._limited()
        self._is_over = True
        if self._pipeline.extent.goes_on and torch_worker_info() is not None:
            # This process may end now, and another one go on.
            with contextlib.suppress(StateError):
                notes = self._pipeline.worker_notes
                notes.write(self.place, self.epoch + 1, self._passes.state_dict())

    def _limited(self) -> Iterator[Any]:
        share = self._pipeline.extent.share(self.place, self.epoch)
        if share is None:
            yield from self._passes
            return
        items = iter(self._passes)
        while self._given < share:
            item = next(items, _END)
            if item is _END:
                return
            self._given += 1
            yield item


_END = object()


def _advanced(pipeline: Any, place: Place, epoch: int) -> Passes:
    """Return the endless items of a place, after those of the loops before number `epoch`.

    This is for workers that start anew with every epoch. They go on where those before them have
    noted that they stopped; without notes, as of stages that cannot be saved, they go through
    all again. Sources that draw shards at random go on as well with other draws.
    """
    if any(getattr(stage, "is_endless", False) for stage in pipeline.stages):
        passes: Passes = pipeline.open_passes(place, epoch=epoch, count=None)
        return passes
    passes = pipeline.open_passes(place, epoch=0, count=None)
    noted = pipeline.worker_notes.read(place)
    done = 0
    if noted is not None and noted[0] <= epoch:
        done = pipeline.extent.items_before(place, noted[0])
        passes.load_state_dict(noted[1])
    for _ in islice(passes, pipeline.extent.items_before(place, epoch) - done):
        pass
    return passes


def _place(place: Place) -> list[int]:
    return [place.rank, place.world_size, place.worker, place.num_workers]


def _state(pipeline: Any, epoch: int, **position: Any) -> State:
    return {
        "format": FORMAT,
        "version": VERSION,
        "seed": pipeline.seed,
        "stages": pipeline.describe(),
        "epoch": epoch,
        **position,
    }
