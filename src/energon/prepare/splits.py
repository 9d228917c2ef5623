"""Deal shards to train, val, test or any other splits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TypeVar

from energon.counting import counted
from energon.errors import ConfigError
from energon.formats.braces import expand_braces

T = TypeVar("T")
DEFAULT_NAMES = ("train", "val", "test")


def parse_ratio(text: str) -> dict[str, float]:
    """Return the ratio of each split, as written in "8,1,1" or "train:9,holdout:1".

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
                f'split ratio {text!r}: wanted is "8,1,1" for train, val and test, or names as in '
                '"train:9,holdout:1"'
            )
        ratios[name.strip()] = ratio
    if not any(ratios.values()):
        raise ConfigError(f"split ratio {text!r}: at least one split needs more than 0")
    return ratios


def split_by_ratio(shards: Sequence[T], ratios: Mapping[str, float]) -> dict[str, Sequence[T]]:
    """Deal every shard to a split, consecutive ones together.

    No shard is left out, and each split with a ratio above 0 gets one if there are enough.

    Example:
        >>> split_by_ratio(["a", "b", "c", "d"], {"train": 98, "val": 1, "test": 1})
        {'train': ['a', 'b'], 'val': ['c'], 'test': ['d']}
    """
    wanted = [name for name, ratio in ratios.items() if ratio > 0]
    total = sum(ratios.values())
    exact = {name: len(shards) * ratios[name] / total for name in wanted}
    counts = {name: int(exact[name]) for name in wanted}
    by_rest = sorted(wanted, key=lambda name: counts[name] - exact[name])
    for name in by_rest[: len(shards) - sum(counts.values())]:
        counts[name] += 1
    for name in wanted:
        richest = max(wanted, key=lambda other: counts[other])
        if counts[name] == 0 and counts[richest] > 1:
            counts[name], counts[richest] = 1, counts[richest] - 1
    parts: dict[str, Sequence[T]] = {}
    start = 0
    for name in ratios:
        stop = start + counts.get(name, 0)
        parts[name] = shards[start:stop]
        start = stop
    return {name: found for name, found in parts.items() if found}


def split_samples_by_ratio(
    counts: Mapping[str, int], ratios: Mapping[str, float]
) -> tuple[dict[str, list[str]], dict[str, dict[str, tuple[int, int]]]]:
    """Deal every sample to a split, consecutive ones together; splits may share shards.

    No sample is left out, and each split with a ratio above 0 gets one if there are enough.

    Args:
        counts: Number of samples by shard.
        ratios: Ratio by name of the split.

    Returns:
        The shards of each split, and for those that it shares which samples are its own, as in
        `energon.formats.split.Split`.

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
    """Make each folder of shards a split: the first folder in which their paths differ.

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
        common -= 1  # a single split, named by the folder that all shards are in
    parts: dict[str, list[str]] = {}
    for shard, folder in zip(shards, folders, strict=True):
        if len(folder) <= common or common < 0:
            raise ConfigError(
                f"shard {shard!r} is in no folder that could be a split; wanted are folders like "
                "train/ and val/ with all shards in them"
            )
        parts.setdefault(folder[common], []).append(shard)
    first = [name for name in DEFAULT_NAMES if name in parts]
    return {name: parts[name] for name in (*first, *parts)}


def split_by_pattern(shards: Sequence[str], patterns: Sequence[str]) -> dict[str, list[str]]:
    """Give each split the shards that match its patterns.

    Args:
        shards: Paths below the dataset folder.
        patterns: As in `train:shards/train_.*`: a name and a regular expression for the
            beginning of a path, in which braces are expanded first. Names may come again.

    Raises:
        ConfigError: If a pattern is malformed or matches no shard.
    """
    parts: dict[str, dict[str, None]] = {}
    for entry in patterns:
        name, colon, pattern = entry.partition(":")
        if not colon or not name or not pattern:
            raise ConfigError(f"split part {entry!r}: wanted is NAME:REGEX, e.g. train:train/.*")
        try:
            expressions = [re.compile(text) for text in _expand(pattern)]
        except re.error as error:
            raise ConfigError(f"split part {entry!r}: {error}") from error
        found = [shard for shard in shards if any(e.match(shard) for e in expressions)]
        if not found:
            raise ConfigError(
                f"split part {entry!r} matches none of {counted(len(shards), 'shard')}, the "
                f"first of which is {shards[0]!r}; patterns are regular expressions, so any text "
                "is .* and not *"
            )
        parts.setdefault(name, {}).update(dict.fromkeys(found))
    return {name: list(shards) for name, shards in parts.items()}


def _expand(pattern: str) -> list[str]:
    # {3} and {2,5} count repetitions; {a,b}, {00..12} and, with zeros, {02,05} are names.
    if re.search(r"\{(?!(0|[1-9]\d*)?,?(0|[1-9]\d*)?\})", pattern):
        return expand_braces(pattern)
    return [pattern]
