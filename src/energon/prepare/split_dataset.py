"""Decide which samples of a dataset are in which split."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from energon.errors import ConfigError, EnergonError
from energon.formats.braces import escape_braces
from energon.formats.info import DatasetInfo, load_info
from energon.formats.split import Split, describe_unmatched, excludes_any, load_split
from energon.prepare.quarantine import load_quarantine
from energon.prepare.splits import (
    split_by_folder,
    split_by_pattern,
    split_by_ratio,
    split_samples_by_ratio,
)

log = logging.getLogger("energon")
UNITS = ("auto", "shard", "sample")
SHUFFLE_SEED = 42


@dataclass(frozen=True)
class SplitRequest:
    """How a dataset is to be split, see `energon.prepare.dataset.prepare_dataset`.

    Raises:
        ConfigError: If it makes no sense.
    """

    ratio: Mapping[str, float] | None = None
    parts: Sequence[str] = ()
    by_folder: bool = False
    unit: str = "auto"
    shuffle: bool = False
    exclude_from: Sequence[str | os.PathLike[str]] = ()

    def __post_init__(self) -> None:
        given = [bool(self.ratio), bool(self.parts), self.by_folder]
        if not any(given):
            raise ConfigError(
                "neither split_ratio nor split_parts nor split_by_folder say which shards make up "
                "a split"
            )
        if sum(given) > 1:
            raise ConfigError("choose one of split_ratio, split_parts and split_by_folder")
        if self.unit not in UNITS:
            raise ConfigError(f"split_unit {self.unit!r}: wanted is one of {', '.join(UNITS)}")

    def check(self, shards: Sequence[str]) -> None:
        """Check before anything is written that the request fits the shards.

        Raises:
            ConfigError: If a pattern matches none of them, or a quarantine file makes no sense.
        """
        if self.parts:
            split_by_pattern(shards, self.parts)
        if self.by_folder:
            split_by_folder(shards)
        for path in self.exclude_from:
            load_quarantine(path)


def check_excluded(
    dataset: Path, request: SplitRequest, present: Split | None, shards: Sequence[str]
) -> None:
    """Check that all that is excluded is there, or was when the dataset was last prepared.

    Args:
        dataset: The folder.
        request: How it is to be split.
        present: Its splits so far.
        shards: All shards on disk.

    Raises:
        ConfigError: If an entry matches no shard.
    """
    try:
        known = {*shards, *load_info(dataset).shard_counts}
    except EnergonError:
        known = set(shards)
    lists = [] if present is None else [(present.origin, present.exclude)]
    lists += [(str(path), load_quarantine(path)) for path in request.exclude_from]
    for origin, entries in lists:
        unmatched = describe_unmatched(entries, known)
        if unmatched:
            more = f" ({len(unmatched)} such entries)" if len(unmatched) > 1 else ""
            raise ConfigError(f"{origin}: {unmatched[0]}{more}; correct the entry, or delete it")


def split_dataset(info: DatasetInfo, request: SplitRequest, present: Split | None) -> Split:
    """Return the splits of a dataset. What was excluded before stays excluded.

    Entries for shards that the dataset no longer has are dropped.

    Args:
        info: Its shards.
        request: How to split it.
        present: Its splits so far, if there are any.
    """
    shards = list(info.shard_counts)
    exclude = dict.fromkeys(() if present is None else present.exclude)
    for path in request.exclude_from:
        exclude |= dict.fromkeys(load_quarantine(path))
    exclude = {entry: None for entry in exclude if excludes_any(entry, info.shard_counts)}
    if request.parts:
        return named_split(split_by_pattern(shards, request.parts), list(exclude))
    if request.by_folder:
        return named_split(split_by_folder(shards), list(exclude))
    ratio = request.ratio or {}
    if request.shuffle:
        random.Random(SHUFFLE_SEED).shuffle(shards)
    wanted = [name for name, part in ratio.items() if part > 0]
    few = len(shards) < len(wanted)
    if request.unit == "shard" or (request.unit == "auto" and not few):
        return named_split(split_by_ratio(shards, ratio), list(exclude))
    if request.unit == "auto":
        log.warning(
            "%d shards are too few for %d splits, so splits share shards; Megatron-Energon does "
            "not know that, see the documentation of `energon prepare`",
            len(shards),
            len(wanted),
        )
    counts = {shard: info.shard_counts[shard] for shard in shards}
    parts, ranges = split_samples_by_ratio(counts, ratio)
    return named_split(parts, list(exclude), ranges)


def named_split(
    parts: Mapping[str, Sequence[str]],
    exclude: Sequence[str],
    sample_ranges: Mapping[str, Mapping[str, tuple[int, int]]] | None = None,
) -> Split:
    """Return a split of shards by their names, which are no patterns even if they have braces."""
    patterns = {name: list(map(escape_braces, shards)) for name, shards in parts.items()}
    return Split(patterns, exclude, sample_ranges=sample_ranges or {})


def present_split(dataset: Path) -> Split | None:
    """Return the splits that a dataset has so far, or None if it has none that can be read."""
    try:
        return load_split(dataset)
    except EnergonError:
        return None
