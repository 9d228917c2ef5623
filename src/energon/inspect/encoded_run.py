"""Batches of a run as its trainer receives them: after the hooks of a task encoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from threading import Lock
from typing import Any

from energon.errors import ConfigError, StateError
from energon.inspect.planned_run import Moment, PlannedRun, Sighting, sighting
from energon.inspect.saved_run import ReadFrom, SavedRun
from energon.loader.hosting import InlineWorker, RankStream
from energon.loader.options import LoaderOptions
from energon.loader.state import LanePosition
from energon.messages import counted
from energon.samples.crude import key_of, sample_keys
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.getters import get_train_dataset
from energon.task_encoder.train_plan import TrainSettings
from energon.worker import WorkerConfig

MAX_WALKED = 500
"""Up to this many batches are computed to reach one that depends on those before it."""


@dataclass(frozen=True, eq=False)
class EncodedRun:
    """The batches of a run, made by a task encoder. `batch` may be called from any thread.

    Args:
        read_from: The data that it reads.
        run: Its order.
        encoder: Class of the task encoder.
        settings: The arguments that decide which samples are batches.
        positions: The positions of the lanes of a saved run.
    """

    read_from: ReadFrom
    run: PlannedRun
    encoder: type[Any]
    settings: TrainSettings
    positions: Mapping[int, LanePosition] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @classmethod
    def of(cls, saved: SavedRun, encoder: type[Any]) -> EncodedRun:
        """Return the batches of a saved run."""
        return cls(saved.read_from, saved.run, encoder, saved.settings, saved.positions)

    def batch(self, step: int, rank: int, *, exact: bool = False) -> Any:
        """Return the batch of a rank.

        Args:
            step: Number of the step.
            rank: The rank.
            exact: Whether to run the hooks on all batches of the lane since its saved position,
                however many, in case they skip samples.

        Raises:
            ConfigError: If the run ends before, or too many batches would have to be made first.
        """
        run = self.run
        if rank >= run.workers.world_size:
            raise ConfigError(f"there is no rank {rank}, only {run.workers.world_size} ranks")
        turn, lane = divmod(step * run.workers.world_size + rank, run.lanes)
        with self._lock:  # hooks draw from the global random generators
            start = self._start(lane, turn, exact=exact)
            batches = self._batches({lane: start})
            for batch in islice(batches, turn - start.batches, None):
                return batch
        raise ConfigError(f"there is no step {step}: the run ends before it")

    def samples(self, step: int) -> list[Sighting]:
        """Return the samples in the batches of a step.

        Raises:
            ConfigError: If the run ends before it, or its batches carry no keys.
        """
        ranks = range(self.run.workers.world_size)
        return [
            each
            for rank in ranks
            for each in self.sightings(self.batch(step, rank, exact=True), step, rank)
        ]

    def find_key(self, key: str, *, batches: int | None) -> list[Sighting]:
        """Return when samples with a key are seen, from the saved position on.

        Args:
            key: The key.
            batches: How many batches of all ranks to search; None for those of about one epoch,
                up to the first that has the sample.

        Raises:
            ConfigError: If no dataset of the run has such a key, or batches carry no keys.
        """
        run = self.run
        run.samples_of(key)  # exist
        samples = sum(len(leaf.source) for leaf in run.leaves)
        most = batches or -(-samples // run.batch_size)
        first = sum(each.batches for each in self.positions.values())
        sightings: list[Sighting] = []
        for number, batch in enumerate(islice(self._batches(self.positions), most), first):
            step, rank = divmod(number, run.workers.world_size)
            sightings += [e for e in self.sightings(batch, step, rank) if e.key == key]
            if sightings and batches is None:
                break
        return sightings

    def skip(self, batches: int) -> dict[int, LanePosition]:
        """Return the positions of the lanes after this many more batches of all ranks.

        Raises:
            StateError: If the data ends before that.
        """
        positions = {lane: replace(each) for lane, each in self.positions.items()}
        made = sum(1 for _ in islice(self._batches(positions, advance=True), batches))
        if made < batches:
            raise StateError(f"cannot skip {counted(batches, 'batch')}: the data ends before that")
        return {
            lane: replace(each, epoch_batches=self.positions[lane].epoch_batches)
            for lane, each in positions.items()
        }

    def _start(self, lane: int, turn: int, *, exact: bool) -> LanePosition:
        """Return a position of a lane from which to compute a batch."""
        run = self.run
        first = LanePosition(batches=run.first_turn)
        if not exact and turn >= run.first_turn:
            state = self._dataset.state_after(turn - run.first_turn)
            if state is not None:
                return LanePosition(batches=turn, state=state)
        start = self.positions.get(lane, first)
        if turn < start.batches and not any(run.changes.values()):
            start = first
        if turn < start.batches:
            raise ConfigError("the run has changed since that step; pass a state from before it")
        if not exact and turn - start.batches > MAX_WALKED:
            raise ConfigError(
                "how many samples a batch takes depends on the batches before it, and at most "
                f"{MAX_WALKED} are computed again: choose a step near the beginning of the "
                "run, or soon after its state was saved"
            )
        return start

    def _batches(
        self, positions: Mapping[int, LanePosition], *, advance: bool = False
    ) -> Iterator[Any]:
        """Yield the batches of some lanes in the order of delivery.

        Args:
            positions: Where the lanes begin.
            advance: Whether to advance `positions` themselves, and not copies of them.
        """
        own = positions if advance else {lane: replace(each) for lane, each in positions.items()}
        worker = InlineWorker(self._dataset, LoaderOptions())
        stream = RankStream([worker], own, lanes=self.run.lanes)
        with suppress(StopIteration):
            while True:
                yield stream.next_batch()

    def sightings(self, batch: Any, step: int, rank: int) -> Iterator[Sighting]:
        """Yield the samples in the batch of a step and a rank, in their order.

        Raises:
            ConfigError: If it carries no keys.
        """
        run = self.run
        key = key_of(batch)
        if key is None:
            raise ConfigError(
                f"the batches of {self.encoder.__qualname__} carry no __restore_key__, so their "
                f"samples are unknown: expected a dict or a dataclass, found "
                f"{type(batch).__name__}"
            )
        number = step * run.workers.world_size + rank
        lane = number % run.lanes
        for position, (leaf, epoch, ordinal) in enumerate(sample_keys(key)):
            moment = Moment(step, rank, number, position)
            yield sighting(run, moment, lane, None, leaf, epoch, ordinal)

    @cached_property
    def _dataset(self) -> SavableDataset:
        run, read_from, settings = self.run, self.read_from, self.settings
        workers = WorkerConfig(
            rank=0,
            world_size=run.workers.world_size,
            num_workers=0,
            lanes=run.lanes,
            seed_offset=run.recipe.seed,
        )
        dataset = get_train_dataset(
            read_from.path,
            split_part=read_from.split_part,
            exclude_from=read_from.exclude_from,
            dataset_config=read_from.dataset_config,
            split_config=read_from.split_config,
            worker_config=workers,
            batch_size=settings.batch_size,
            blend_unit=settings.blend_unit,
            packing_buffer_size=settings.packing_buffer_size,
            balance=settings.balance,
            pack=settings.pack,
            batch_cost=settings.batch_cost,
            task_encoder=self.encoder(),
        )
        return replace(dataset, plan=run.recipe)
