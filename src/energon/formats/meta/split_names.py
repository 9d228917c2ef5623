"""Splits of datasets that have no `split.yaml`: by the names of files, or by a ratio."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from energon.errors import ConfigError
from energon.formats.meta.split import find_split

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Names of folders and beginnings of file names that say which split is in them."""

RATIO_SPLITS = ("train", "val", "test")
"""What the numbers of a ratio like "99,1,0" stand for."""

_FIRST_WORD = re.compile(r"[A-Za-z]+(?=[-_. ]|$)")


def splits_by_name(names: Sequence[str], *, by_file: bool) -> dict[str, list[str]]:
    """Return the files of each split, if their paths say it of all of them.

    Args:
        names: Paths of files.
        by_file: Whether names of files count, too, as in `train-00000.parquet`.

    Returns:
        Names of files by split; one split without a name if the paths do not say it.

    Example:
        >>> splits_by_name(["train/a.jpg", "validation/b.jpg"], by_file=False)
        {'train': ['train/a.jpg'], 'val': ['validation/b.jpg']}
        >>> splits_by_name(["train/a.jpg", "b.jpg"], by_file=False)
        {'': ['train/a.jpg', 'b.jpg']}
    """
    splits: dict[str, list[str]] = {}
    for name in names:
        split = _split_of(name, by_file=by_file)
        if split is None:
            return {"": list(names)}
        splits.setdefault(split, []).append(name)
    if len(splits) < 2:
        return {"": list(names)}
    return {name: splits[name] for name in dict.fromkeys(SPLIT_WORDS.values()) if name in splits}


def _split_of(name: str, *, by_file: bool) -> str | None:
    *folders, file = name.split("/")
    for folder in folders:
        if folder.lower() in SPLIT_WORDS:
            return SPLIT_WORDS[folder.lower()]
    word = _FIRST_WORD.match(file)
    return SPLIT_WORDS.get(word[0].lower()) if by_file and word else None


def parse_shares(ratio: Any, *, origin: str) -> list[float]:
    """Return the shares of train, val and test that a ratio stands for; they sum to 1.

    Raises:
        ConfigError: If it is no text like "99,1,0".

    Example:
        >>> parse_shares("3,1", origin="")
        [0.75, 0.25]
    """
    try:
        numbers = [float(number) for number in ratio.split(",")]
    except (AttributeError, ValueError):
        numbers = []
    known = 1 <= len(numbers) <= len(RATIO_SPLITS) and not min(numbers) < 0
    if not known or not 0 < sum(numbers) < 1e18:
        raise ConfigError(
            f"{origin}: read: split is {ratio!r}; expected up to three numbers, the shares of "
            f'{", ".join(RATIO_SPLITS)}, like "99,1,0"'
        )
    return [number / sum(numbers) for number in numbers]


def ratio_names(ratio: str | None, *, origin: str) -> list[str]:
    """Return the splits that a ratio gives something to; without a ratio, all is train."""
    if ratio is None:
        return ["train"]
    shares = zip(RATIO_SPLITS, parse_shares(ratio, origin=origin), strict=False)
    return [name for name, share in shares if share]


def ratio_range(
    ratio: str | None, split_part: str, count: int, *, what: str, origin: str
) -> tuple[int, int]:
    """Return which of `count` items belong to a split: the first, and the one behind the last.

    Args:
        ratio: The shares, like "99,1,0"; None if all are train.
        split_part: The split.
        count: How many there are.
        what: What messages call them.
        origin: Where the ratio was written, for messages.

    Raises:
        ConfigError: If there is no such split.
    """
    names = ratio_names(ratio, origin=origin)
    name = find_split(split_part, names)
    if name is None:
        hint = (
            f'say which {what} it has, as in `read: {{split: "99,1,0"}}`'
            if ratio is None
            else f"the ratio {ratio!r} gives it no {what}"
        )
        raise ConfigError(
            f"{origin}: there is no split {split_part!r}, only {', '.join(names)}; {hint}"
        )
    if ratio is None:
        return 0, count
    place = RATIO_SPLITS.index(name)
    edges = [0.0, *accumulate(parse_shares(ratio, origin=origin))]
    return round(edges[place] * count), round(edges[place + 1] * count)
