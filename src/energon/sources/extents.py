"""Where in its shard a sample lies, as far as it is wanted."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.formats.tables.part_table import PartTable
from energon.io.range_file import RangeFile

Ints = NDArray[np.int64]


class Extents(NamedTuple):
    """Where samples of one shard lie."""

    file: RangeFile
    places: Ints
    """Which of the samples that were asked for."""
    low: Ints
    """Their first bytes that are wanted."""
    high: Ints
    """The bytes behind the last that are wanted."""


def wanted_extents(
    table: PartTable, indices: Ints, parts: Container[str] | None
) -> tuple[Ints, Ints]:
    """Return from where to where to read samples of a shard.

    Args:
        table: Of the shard.
        indices: Numbers of samples in it.
        parts: Names of the parts to read; None for all.
    """
    names = table.common_parts
    if names is not None:
        wanted = [at for at, name in enumerate(names) if parts is None or name in parts]
        if wanted:
            numbers = indices[:, None] * len(names) + np.array(wanted)
            begin, size = table.extents(numbers)
            return begin.min(axis=1), (begin + size).max(axis=1)
    # Samples that differ are read with all that they have.
    return table.sample_extents(indices)
