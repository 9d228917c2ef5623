"""Where the data of a sample came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class SourceInfo:
    """One place that went into a sample.

    Args:
        dataset_path: The dataset.
        index: Number of the sample in the split, or the name of a file in a store.
        shard_name: The shard, as the dataset lists it; None where there are none.
        file_names: The files of the sample.
    """

    dataset_path: str
    index: int | str
    shard_name: str | None
    file_names: tuple[str, ...]


def add_source_info(sample: T, *sources: SourceInfo) -> T:
    """Note that `sources` went into `sample`, a dict or an object with `__sources__`; return it."""
    known = get_source_info(sample) or ()
    if isinstance(sample, dict):
        sample["__sources__"] = (*known, *sources)
    else:
        sample.__sources__ = (*known, *sources)  # type: ignore[attr-defined]
    return sample


def get_source_info(sample: Any) -> tuple[SourceInfo, ...] | None:
    """Return what went into `sample`; None if nobody noted it."""
    if isinstance(sample, dict):
        return sample.get("__sources__")
    return getattr(sample, "__sources__", None)
