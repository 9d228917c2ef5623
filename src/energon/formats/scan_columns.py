"""What the samples of a shard have in common, so that a part table need not say it of each."""

from __future__ import annotations

from itertools import pairwise
from operator import lt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.formats.scan_builder import TarScan
from energon.formats.tar_window import BLOCK

Column = NDArray[Any]


def common_header(scan: TarScan) -> tuple[int, int] | None:
    """Return how samples begin, if all begin the same way.

    Returns:
        Blocks before the content of the first part of each sample, and the block in which the
        last one ends; None if samples differ.
    """
    if not scan.num_samples:
        return None
    begins = scan.sample_offset[:-1]
    gaps = scan.part_offset[scan.first_part[:-1]] - begins
    if (gaps != gaps[0]).any():
        return None
    return int(gaps[0]) // BLOCK, int(scan.sample_offset[-1]) // BLOCK


def common_schema(scan: TarScan) -> tuple[int, ...] | None:
    """Return the names of the parts that every sample has, in this order; None if they differ."""
    count = len(scan.part_name) // max(1, scan.num_samples)
    if not count or len(scan.part_name) != count * scan.num_samples:
        return None
    names = scan.part_name.reshape(-1, count)
    regular = scan.first_part[:-1] == np.arange(0, len(scan.part_name), count)
    if not regular.all() or not (names == names[0]).all():
        return None
    return tuple(names[0].tolist())


def common_key_length(scan: TarScan) -> int | None:
    """Return how many bytes every key has; None if they differ."""
    lengths = np.diff(scan.key_start)
    if not len(lengths) or (lengths != lengths[0]).any():
        return None
    return int(lengths[0])


def key_order(scan: TarScan) -> tuple[NDArray[np.int64] | None, bool]:
    """Return the samples in the order of their keys, and whether no key is there twice.

    The order is None if they are in it.
    """
    edges = scan.key_start.tolist()
    keys = [scan.key_bytes[start:stop] for start, stop in pairwise(edges)]
    if all(map(lt, keys, keys[1:])):
        return None, True
    order = sorted(range(len(keys)), key=keys.__getitem__)
    ascending = [keys[index] for index in order]
    return np.array(order), all(map(lt, ascending, ascending[1:]))


def smallest(column: Column) -> Column:
    """Return unsigned numbers in as few bytes as they need, little-endian."""
    dtype = np.min_scalar_type(int(column.max(initial=0)))
    return column.astype(dtype.newbyteorder("<"))
