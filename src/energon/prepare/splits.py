"""Divide shards and samples between splits: train, val, test or any others."""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from energon.errors import ConfigError, EnergonError
from energon.formats.meta.braces import escape_braces, expand_braces
from energon.formats.meta.info import (
    DatasetInfo,
    Split,
    describe_unmatched,
    excludes_any,
    load_info,
    load_split,
)
from energon.messages import counted
from energon.prepare.verify.quarantine import Exclusions

T = TypeVar("T")
DEFAULT_NAMES = ("train", "val", "test")


def parse_ratio(text: str) -> dict[str, float]:
    """Return the ratio of each split from text such as "8,1,1" or "train:9,holdout:1".

    Raises:
        ConfigError: If the text is malformed.
    """
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    named = [entry.partition(":")[::2] if ":" in entry else None for entry in entries]
    if not any(named) and len(entries) <= len(DEFAULT_NAMES):
        named = list(zip(DEFAULT_NAMES, entries, strict=False))
    ratios: dict[str, float] = {}
    for entry in named:
        try:
            name, number = entry or ("", "")
            ratio = float(number)
        except ValueError:
            ratio = -1.0
        if not name or not 0 <= ratio < float("inf") or name.strip() in ratios:
            raise ConfigError(
                f'split ratio {text!r}: expected "8,1,1" for train, val and test, or names as in '
                '"train:9,holdout:1"'
            )
        if "/" in name:
            raise ConfigError(f"split ratio {text!r}: the name of a split must not contain '/'")
        ratios[name.strip()] = ratio
    if not any(ratios.values()):
        raise ConfigError(f"split ratio {text!r}: at least one split needs more than 0")
    return ratios


def split_by_ratio(shards: Sequence[T], ratios: Mapping[str, float]) -> dict[str, Sequence[T]]:
    """Assign every shard to a split, consecutive ones together.

    Each split with a ratio above 0 gets at least one shard if there are enough.

    Example:
        >>> split_by_ratio(["a", "b", "c", "d"], {"train": 98, "val": 1, "test": 1})
        {'train': ['a', 'b'], 'val': ['c'], 'test': ['d']}
    """
    nonempty = [name for name, ratio in ratios.items() if ratio > 0]
    total = sum(ratios.values())
    exact = {name: len(shards) * ratios[name] / total for name in nonempty}
    counts = {name: int(exact[name]) for name in nonempty}
    by_rest = sorted(nonempty, key=lambda name: counts[name] - exact[name])
    for name in by_rest[: len(shards) - sum(counts.values())]:
        counts[name] += 1
    for name in nonempty:
        richest = max(nonempty, key=lambda other: counts[other])
        if counts[name] == 0 and counts[richest] > 1:
            counts[name], counts[richest] = 1, counts[richest] - 1
    parts: dict[str, Sequence[T]] = {}
    start = 0
    for name in ratios:
        stop = start + counts.get(name, 0)
        parts[name] = shards[start:stop]
        start = stop
    return {name: own for name, own in parts.items() if own}


def split_samples_by_ratio(
    counts: Mapping[str, int], ratios: Mapping[str, float]
) -> tuple[dict[str, list[str]], dict[str, dict[str, tuple[int, int]]]]:
    """Assign every sample to a split, consecutive ones together; splits may share shards.

    Each split with a ratio above 0 gets at least one sample if there are enough.

    Args:
        counts: Number of samples by shard.
        ratios: Ratio by name of the split.

    Returns:
        The shards of each split, and for shared ones the range of its own samples, as in
        `energon.formats.meta.info.Split`.

    Example:
        >>> split_samples_by_ratio({"a": 10, "b": 10}, {"train": 3, "val": 1})
        ({'train': ['a', 'b'], 'val': ['b']}, {'train': {'b': (0, 5)}, 'val': {'b': (5, 10)}})
    """
    edges = split_by_ratio(range(sum(counts.values())), ratios)
    parts: dict[str, list[str]] = {}
    ranges: dict[str, dict[str, tuple[int, int]]] = {}
    for name, numbers in edges.items():
        parts[name] = []
        begin = 0
        for shard, count in counts.items():
            start = max(numbers[0] - begin, 0)
            stop = min(numbers[-1] + 1 - begin, count)
            if start < stop:
                parts[name].append(shard)
                if (start, stop) != (0, count):
                    ranges.setdefault(name, {})[shard] = (start, stop)
            begin += count
    return parts, ranges


def split_by_folder(shards: Sequence[str]) -> dict[str, list[str]]:
    """Make each folder of shards a split: the first folder in which the paths differ.

    Example:
        >>> split_by_folder(["shards/train/0.tar", "shards/train/1.tar", "shards/val/0.tar"])
        {'train': ['shards/train/0.tar', 'shards/train/1.tar'], 'val': ['shards/val/0.tar']}

    Raises:
        ConfigError: If shards are not in folders.
    """
    folders = [shard.split("/")[:-1] for shard in shards]
    levels = zip(*folders, strict=False)
    common = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    if len(set(map(tuple, folders))) == 1:
        common -= 1  # a single split, named by the folder that contains all shards
    parts: dict[str, list[str]] = {}
    for shard, folder in zip(shards, folders, strict=True):
        if len(folder) <= common or common < 0:
            raise ConfigError(
                f"shard {shard!r} is in no folder that could be a split; expected folders such as "
                "train/ and val/ that contain all shards"
            )
        parts.setdefault(folder[common], []).append(shard)
    first = [name for name in DEFAULT_NAMES if name in parts]
    return {name: parts[name] for name in (*first, *parts)}


def split_by_pattern(shards: Sequence[str], patterns: Sequence[str]) -> dict[str, list[str]]:
    """Give each split the shards that match its patterns.

    Args:
        shards: Paths below the dataset folder.
        patterns: As in `train:shards/train_.*`: a name and a regular expression for the
            beginning of a path, in which braces are expanded first. Names may occur repeatedly.

    Raises:
        ConfigError: If a pattern is malformed or matches no shard.
    """
    parts: dict[str, dict[str, None]] = {}
    for entry in patterns:
        name, colon, pattern = entry.partition(":")
        if not colon or not name or not pattern:
            raise ConfigError(f"split part {entry!r}: expected NAME:REGEX, e.g. train:train/.*")
        try:
            expressions = [re.compile(text) for text in _expand(pattern)]
        except re.error as error:
            raise ConfigError(f"split part {entry!r}: {error}") from error
        matching = [shard for shard in shards if any(e.match(shard) for e in expressions)]
        if not matching:
            raise ConfigError(
                f"split part {entry!r} matches none of {counted(len(shards), 'shard')}, the "
                f"first of which is {shards[0]!r}; patterns are regular expressions, so any text "
                "is written .*, not *"
            )
        parts.setdefault(name, {}).update(dict.fromkeys(matching))
    return {name: list(shards) for name, shards in parts.items()}


def _expand(pattern: str) -> list[str]:
    # {3} and {2,5} count repetitions; {a,b}, {00..12} and, with zeros, {02,05} are names.
    if re.search(r"\{(?!(0|[1-9]\d*)?,?(0|[1-9]\d*)?\})", pattern):
        return expand_braces(pattern)
    return [pattern]


logger = logging.getLogger("energon")
UNITS = ("auto", "shard", "sample")
SHUFFLE_SEED = 42


@dataclass(frozen=True)
class SplitRequest:
    """How to split a dataset, see `energon.prepare.dataset.prepare_dataset`.

    Raises:
        ConfigError: If it is invalid.
    """

    ratio: Mapping[str, float] | None = None
    parts: Sequence[str] = ()
    by_folder: bool = False
    unit: str = "auto"
    shuffle: bool = False
    exclude_from: Sequence[str | os.PathLike[str]] = ()

    def __post_init__(self) -> None:
        choices = [bool(self.ratio), bool(self.parts), self.by_folder]
        if not any(choices):
            raise ConfigError(
                "none of split_ratio, split_parts and split_by_folder is given, so no "
                "shard belongs to a split"
            )
        if sum(choices) > 1:
            raise ConfigError("choose one of split_ratio, split_parts and split_by_folder")
        if not isinstance(self.ratio or {}, Mapping):
            raise ConfigError(
                f"split_ratio={self.ratio!r}: expected a ratio by name of the split, such as "
                "{'train': 8, 'val': 1, 'test': 1}"
            )
        if self.unit not in UNITS:
            raise ConfigError(f"split_unit {self.unit!r}: expected one of {', '.join(UNITS)}")

    def check(self, shards: Sequence[str]) -> None:
        """Check the request against the shards before anything is written.

        Raises:
            ConfigError: If a pattern matches none of them.
        """
        if self.parts:
            split_by_pattern(shards, self.parts)
        if self.by_folder:
            split_by_folder(shards)

    def excluded_of(self, dataset: str) -> dict[str, list[str]]:
        """Return the samples of a dataset that quarantine files exclude, by file.

        Raises:
            ConfigError: If a file is invalid.
            DatasetNotFoundError: If there is no such file or folder.
        """
        excluded: dict[str, list[str]] = {}
        for path in self.exclude_from:
            excluded |= Exclusions(path, [dataset]).of(dataset)
        return excluded


def check_excluded(
    dataset: Path,
    excluded: Mapping[str, Sequence[str]],
    present: Split | None,
    shards: Sequence[str],
) -> None:
    """Check that excluded shards exist, or did when the dataset was last prepared.

    Args:
        dataset: The folder.
        excluded: What quarantine files exclude, by file.
        present: Its current splits.
        shards: All shards on disk.

    Raises:
        ConfigError: If an entry matches no shard.
    """
    try:
        names = {*shards, *load_info(dataset).shard_counts}
    except EnergonError:
        names = set(shards)
    lists = [] if present is None else [(present.origin, present.exclude)]
    for origin, entries in [*lists, *excluded.items()]:
        unmatched = describe_unmatched(entries, names)
        if unmatched:
            more = f" ({len(unmatched)} such entries)" if len(unmatched) > 1 else ""
            raise ConfigError(f"{origin}: {unmatched[0]}{more}; correct the entry, or delete it")


def split_dataset(
    info: DatasetInfo,
    request: SplitRequest,
    present: Split | None,
    excluded: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Split:
    """Return the splits of a dataset. Current exclusions are kept.

    Entries for shards that the dataset no longer has are dropped.

    Args:
        info: Its shards.
        request: How to split it.
        present: Its current splits, if any.
        excluded: What quarantine files exclude, by file.
    """
    shards = list(info.shard_counts)
    exclude = dict.fromkeys(() if present is None else present.exclude)
    for entries in excluded.values():
        exclude |= dict.fromkeys(entries)
    exclude = {entry: None for entry in exclude if excludes_any(entry, info.shard_counts)}
    if request.parts:
        by_name = split_by_pattern(shards, request.parts)
        _warn_of_overlap(by_name)
        return named_split(by_name, list(exclude))
    if request.by_folder:
        return named_split(split_by_folder(shards), list(exclude))
    ratio = request.ratio or {}
    if request.shuffle:
        random.Random(SHUFFLE_SEED).shuffle(shards)
    nonempty = [name for name, part in ratio.items() if part > 0]
    few = len(shards) < len(nonempty)
    if request.unit == "shard" or (request.unit == "auto" and not few):
        return named_split(split_by_ratio(shards, ratio), list(exclude))
    if request.unit == "auto":
        logger.warning(
            "%s cannot be divided between %s; the splits will share shards, each with its own "
            "samples (sample_ranges in split.yaml, which Megatron-Energon does not know)",
            counted(len(shards), "shard"),
            counted(len(nonempty), "split"),
        )
    counts = {shard: info.shard_counts[shard] for shard in shards}
    parts, ranges = split_samples_by_ratio(counts, ratio)
    return named_split(parts, list(exclude), ranges)


def _warn_of_overlap(parts: Mapping[str, Sequence[str]]) -> None:
    """Warn of shards that are in several splits: training would see the samples that test it."""
    splits: dict[str, list[str]] = {}
    for name, shards in parts.items():
        for shard in shards:
            splits.setdefault(shard, []).append(name)
    shared = [shard for shard, names in splits.items() if len(names) > 1]
    if shared:
        logger.warning(
            "%s in several splits, the first of them %s in %s, so these share samples; change the "
            "patterns of the splits if that is not intended",
            counted(len(shared), "shard is", "shards are"),
            shared[0],
            " and ".join(splits[shared[0]]),
        )


def named_split(
    parts: Mapping[str, Sequence[str]],
    exclude: Sequence[str],
    sample_ranges: Mapping[str, Mapping[str, tuple[int, int]]] | None = None,
) -> Split:
    """Return a split of shards by name; names are not patterns even if they contain braces."""
    patterns = {name: list(map(escape_braces, shards)) for name, shards in parts.items()}
    return Split(patterns, exclude, sample_ranges=sample_ranges or {})


def present_split(dataset: Path) -> Split | None:
    """Return the current splits of a dataset, or None if it has none that can be read."""
    try:
        return load_split(dataset)
    except EnergonError:
        return None
