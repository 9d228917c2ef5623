"""Batches of a run as its trainer gets them: after the hooks of a task encoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from energon.errors import ConfigError
from energon.stages.lane import Lane, Present
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.getters import get_train_dataset
from energon.viewer.images import picture
from energon.viewer.parts import ShownArray, show_array, value_tree
from energon.viewer.run import ShownRun
from energon.worker import WorkerConfig

MAX_PICTURES = 32


class ShownField(NamedTuple):
    """A field of a batch."""

    name: str
    array: ShownArray | None
    """If it is an array or tensor."""
    pictures: list[str]
    """If the array can be images: `data:` addresses of the first."""
    html: Markup
    """Of all else."""


@dataclass(frozen=True, eq=False)
class EncodedRun:
    """The batches of a run, made by a task encoder. May be used by many threads.

    Args:
        path: What it reads.
        split_part: Which split.
        run: Its order.
        encoder: Class of the task encoder.
        allow: What data may do, see `get_train_dataset`.
    """

    path: str
    split_part: str
    run: ShownRun
    encoder: type[Any]
    allow: Collection[str] = ()
    _lock: Lock = field(default_factory=Lock)

    def batch(self, step: int, rank: int) -> list[ShownField]:
        """Return the fields of the batch of a rank.

        Raises:
            ConfigError: If the run ends before, or batches take samples that nobody knows.
        """
        run = self.run.run
        if rank >= run.workers.world_size:
            raise ConfigError(f"there is no rank {rank}, only {run.workers.world_size} ranks")
        turn, number = divmod(step * run.workers.world_size + rank, run.lanes)
        turn -= run.first_turn
        state = self._dataset.state_after(turn) if turn >= 0 else None
        if state is None:
            raise ConfigError(
                "the batch cannot be made by itself: samples are packed or grouped, the data end, "
                "or the mix or the lanes have changed; restore_sample of the loader makes it again"
            )
        lane = Lane(
            number, run.lanes, seed=run.recipe.seed, present=Present(batch=turn + run.first_turn)
        )
        with self._lock:  # hooks draw from generators of the process
            batch = next(self._dataset.open_lane(lane, state), None)
        if batch is None:
            raise ConfigError(f"there is no step {step}: the run ends before")
        return [_show(name, value) for name, value in _fields(batch)]

    @cached_property
    def _dataset(self) -> SavableDataset:
        run = self.run.run
        workers = WorkerConfig(
            rank=0,
            world_size=run.workers.world_size,
            num_workers=0,
            lanes=run.lanes,
            seed_offset=run.recipe.seed,
        )
        dataset = get_train_dataset(
            self.path,
            split_part=self.split_part,
            worker_config=workers,
            batch_size=run.batch_size,
            task_encoder=self.encoder(),
            allow=self.allow,
        )
        return replace(dataset, plan=run.recipe)


def _fields(batch: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(batch):
        yield from ((each.name, getattr(batch, each.name)) for each in fields(batch))
    elif isinstance(batch, Mapping):
        yield from ((str(name), value) for name, value in batch.items())
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        yield from ((str(number), value) for number, value in enumerate(batch))
    else:
        yield type(batch).__name__, batch


def _show(name: str, value: Any) -> ShownField:
    array = _as_array(value)
    if array is None:
        return ShownField(name, None, [], value_tree(value))
    return ShownField(name, show_array(name, array), list(_pictures(array)), Markup())


def _as_array(value: Any) -> NDArray[Any] | None:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if not hasattr(value, "numpy") or str(value.dtype) == "torch.bfloat16":
            value = value.float()
        return np.asarray(value)
    return value if isinstance(value, np.ndarray) and not value.dtype.hasobject else None


def _pictures(array: NDArray[Any]) -> Iterator[str]:
    """Yield the images in an array of images, as bytes or as floats around 0 to 1."""
    if array.ndim != 4 or not array.size or array.dtype.kind not in "uf":
        return
    if array.shape[1] in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.shape[3] not in (1, 3) or min(array.shape[1:3]) < 4:
        return
    for pixels in array[:MAX_PICTURES]:
        if pixels.dtype != np.uint8:
            values = np.nan_to_num(pixels.astype(np.float32))
            low, high = min(0.0, float(values.min())), max(1.0, float(values.max()))
            # Normalised images lie on both sides of 0: all of their range is shown.
            pixels = ((values - low) / (high - low) * 255).astype(np.uint8)
        yield picture(np.repeat(pixels, 3 // pixels.shape[2], axis=2))
