"""The dataset of a document that a factory of a program is opening, and the arguments for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from energon.compat.megatron.datasets.arguments import DatasetSubset
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError
from energon.io.epath import EPath
from energon.metadataset.leaf import Subset
from energon.task_encoder.dataset_class import DatasetOpening
from energon.worker import WorkerConfig

_opening: ContextVar[DatasetOpening | None] = ContextVar("opening", default=None)
"""The dataset of a document that a factory is opening; None if a program calls the factory."""


@contextmanager
def opening_for(opening: DatasetOpening) -> Iterator[None]:
    """Set the dataset of a document that factories called in the block are opening."""
    token = _opening.set(opening)
    try:
        yield
    finally:
        _opening.reset(token)


def current_opening() -> DatasetOpening | None:
    """Return the dataset of a document that is being opened; None outside of one."""
    return _opening.get()


def defaults_of(opening: DatasetOpening) -> dict[str, Any]:
    """Return the arguments of a factory that do not come from the document."""
    leaf, call = opening.leaf, opening.call
    worker_config = call.worker_config or WorkerConfig(rank=0, world_size=1, num_workers=0)
    defaults = {
        "path": EPath(leaf.path),
        "split_part": leaf.split_part,
        "split_config": leaf.split_config,
        "training": call.training,
        "worker_config": worker_config,
        "decoder": SampleDecoder(),
        **call.settings,
    }
    if leaf.subsets:
        defaults["subset"] = DatasetSubset(subsets=leaf.subsets)
    return defaults


def check_written(written: Mapping[str, Any], opening: DatasetOpening) -> dict[str, Any]:
    """Return the arguments that a document has for a factory.

    Raises:
        ConfigError: If it sets arguments that only the program may set.
    """
    for key in _OF_CALLS:
        if key in written:
            raise ConfigError(
                f"{opening.config.origin}: a dataset.yaml cannot set {key!r}; the program that "
                "opens the dataset does. Remove it"
            )
    found = dict(written)
    if "subset" in found:
        inner = subset_ranges(found["subset"])
        found["subset"] = DatasetSubset(subsets=(*inner, *opening.leaf.subsets))
    return found


_OF_CALLS = ("path", "worker_config", "training")


def subset_ranges(given: Any) -> tuple[Subset, ...]:
    """Return ranges of samples, the innermost first."""
    if given is None:
        return ()
    if isinstance(given, DatasetSubset):
        return given.subsets
    if isinstance(given, Mapping):
        return (tuple(given["range"]),)
    return (tuple(given),)
