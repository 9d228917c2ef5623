"""Narrow a line of samples to nested ranges, and exclude samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from energon.arrays import Ints
from energon.errors import ConfigError

if TYPE_CHECKING:
    from fractions import Fraction


def include_ordinals(ordinals: Ints, excluded: Ints) -> Ints:
    """Return the raw indices of samples that are numbered without `excluded`.

    Args:
        ordinals: Numbers among the samples that are left.
        excluded: Raw indices that are skipped, ascending, each once.

    Example:
        >>> include_ordinals(np.arange(5), np.array([0, 3])).tolist()
        [1, 2, 4, 5, 6]
    """
    before = excluded - np.arange(len(excluded))
    return ordinals + np.searchsorted(before, ordinals, side="right")


def exclude_indices(indices: Ints, excluded: Ints) -> Ints:
    """Return the ordinals of raw `indices`, none of which is in `excluded`.

    Edges of ranges may be in `excluded`: their ordinals are those of the next sample that is left.
    """
    return indices - np.searchsorted(excluded, indices)


Bound = int | str
"""A number of samples, a percentage like "12.5%", or "end"."""

_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")


def resolve_range(num_samples: int, subsets: Sequence[tuple[Bound, Bound]]) -> tuple[int, int]:
    """Return [start, stop) of `num_samples` after all `subsets`, the innermost first.

    Absolute bounds count samples of the dataset and must be within it. Percentages are of
    what the absolute range leaves, those of outer levels of what the inner ones leave.

    Raises:
        ConfigError: If a bound is malformed or out of range, or there are two absolute ranges.

    Example:
        >>> resolve_range(1000, [(100, 500), ("50%", "100%")])
        (300, 500)
    """
    start, stop = 0, num_samples
    absolute = [subset for subset in subsets if not _is_relative(subset)]
    if len(absolute) > 1:
        raise ConfigError(
            f"subsets {absolute[0]} and {absolute[1]} are both absolute; only one level can be, "
            'use percentages like "50%" on the others'
        )
    for first, last in absolute:
        low = _absolute(first, num_samples)
        high = _absolute(last, num_samples)
        if not 0 <= low <= high <= num_samples:
            raise ConfigError(
                f"subset [{first}, {last}] does not lie within the {num_samples} samples"
            )
        start, stop = low, high
    relative = [subset for subset in subsets if _is_relative(subset)]
    if not relative:
        return start, stop
    from fractions import Fraction

    low_share, high_share = Fraction(0), Fraction(1)
    for first, last in relative:
        begin, end = _share(first), _share(last)
        if not 0 <= begin <= end <= 1:
            raise ConfigError(f"subset [{first}, {last}] is not a range within 0% and 100%")
        width = high_share - low_share
        low_share, high_share = low_share + begin * width, low_share + end * width
    size = stop - start
    return start + int(size * low_share), start + int(size * high_share)


def _is_relative(subset: tuple[Bound, Bound]) -> bool:
    kinds = {isinstance(bound, str) and bound.strip() != "end" for bound in subset}
    if subset[1] == "end" and isinstance(subset[0], str):
        return True
    if len(kinds) > 1:
        raise ConfigError(
            f"subset {list(subset)} mixes a percentage with a number of samples; use one kind"
        )
    return kinds.pop()


def _absolute(bound: Bound, num_samples: int) -> int:
    return num_samples if bound == "end" else int(bound)


def _share(bound: Bound) -> Fraction:
    from fractions import Fraction

    if bound == "end":
        return Fraction(1)
    match = _PERCENT.fullmatch(str(bound).strip())
    if match is None:
        raise ConfigError(f'subset bound {bound!r}: expected a percentage like "12.5%"')
    return Fraction(match[1]) / 100
