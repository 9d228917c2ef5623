"""Draw the splits of samples by a hash of their keys.

A key is hashed to a number from 0 to 1, and each split has a piece of that line as long as its
ratio. So the split of a sample depends only on its key and the ratios: when samples are added, the
existing ones stay in their splits.

If stratified, the number of a key is its rank among the keys of its stratum, as a fraction: each
stratum is divided as exactly as whole samples allow. When samples are added, only those at the
edges change their split.

To shuffle, samples are written to a temporary file as they arrive, and read back in the order of
a hash of their keys, in memory that does not grow with their contents. So the order depends only on
keys and seed. Files that samples refer to stay where they are; other contents take space on disk
until everything is packed.
"""

from __future__ import annotations

import pickle
import tempfile
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError
from energon.prepare.importers.row import PackSource, Row


def shuffled(
    samples: Iterator[Mapping[str, Any]], seed: int, folder: Path
) -> Iterator[Mapping[str, Any]]:
    """Yield the samples in an order derived from their keys.

    Args:
        samples: The samples.
        seed: Determines the order.
        folder: A folder with space for their contents.
    """
    purpose = b"order %d" % seed
    hashes, starts = array("Q"), array("Q", [0])
    with tempfile.TemporaryFile(dir=folder, prefix=".shuffle.") as file:
        for sample in samples:
            hashes.append(keyed_hash(sample["__key__"], purpose))
            pickle.dump(dict(sample), file, pickle.HIGHEST_PROTOCOL)
            starts.append(file.tell())
        for place in np.argsort(np.array(hashes, np.uint64), kind="stable").tolist():
            file.seek(starts[place])
            # This process has just written it.
            yield pickle.load(file)


PEEKED_SAMPLES = 1000
"""With fewer samples than this, each split gets one if there are enough."""

_PURPOSE = b"energon split"
_RANGE = 1 << 64


def keyed_hash(key: str, purpose: bytes = _PURPOSE) -> int:
    """Return a number below 2^64 for a key."""
    data = key.encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(data, digest_size=8, key=purpose).digest(), "big")


class SplitDraw:
    """Returns the split of a sample.

    Args:
        ratios: Ratio by name of the split.
        strata: For each stratum the hashes of all of its keys, ascending; None draws each sample
            independently.
        column: The name of the stratum in rows.
    """

    def __init__(
        self,
        ratios: Mapping[str, float],
        *,
        strata: Mapping[str, NDArray[np.uint64]] | None = None,
        column: str = "",
    ) -> None:
        total = sum(ratios.values())
        self.names = [name for name, ratio in ratios.items() if ratio > 0]
        self.edges = [edge / total for edge in accumulate(ratios[name] for name in self.names)]
        self.edges[-1] = 1.0
        self.strata = strata
        self.column = column
        self.moved: dict[str, str] = {}
        """By key, samples that go to a different split than their number says."""

    def __call__(self, key: str, row: Row) -> str:
        """Return the split of a sample."""
        if key in self.moved:
            return self.moved[key]
        return self.names[bisect_right(self.edges, self.number(key, row))]

    def number(self, key: str, row: Row) -> float:
        """Return the number of a sample, from 0 up to but not including 1."""
        hashed = keyed_hash(key)
        if self.strata is None:
            return (hashed >> 11) / (1 << 53)
        name = stratum_of(row, self.column)
        hashes = self.strata[name]
        rank = int(np.searchsorted(hashes, np.uint64(hashed)))
        # Strata that are too small for all splits give their samples to different ones.
        phase = (keyed_hash(name) >> 11) / (1 << 53)
        return min((rank + phase) / len(hashes), 1 - 2**-53)


def open_draw(
    source: PackSource, ratios: Mapping[str, float], stratify: str | None = None
) -> SplitDraw:
    """Return the rule that assigns the samples of a source to splits.

    Args:
        source: The samples. If stratified, the keys of all are read; otherwise those of the first.
        ratios: Ratio by name of the split.
        stratify: "folder", or a column whose values are divided alike; None for neither.

    Raises:
        ConfigError: If there is no such column.
    """
    if stratify is not None:
        draw = SplitDraw(ratios, strata=_strata(source, stratify), column=stratify)
    else:
        draw = SplitDraw(ratios)
    draw.moved = _moved(draw, first_keys(source, PEEKED_SAMPLES + 1))
    return draw


def stratum_of(row: Row, column: str) -> str:
    """Return the stratum of a sample.

    Raises:
        ConfigError: If its row has no such column.
    """
    if column not in row:
        raise ConfigError(f"--stratify {column}: there is no such column, only {', '.join(row)}")
    return str(row[column])


def first_keys(source: PackSource, count: int) -> list[tuple[str, Row]]:
    """Return the keys and rows of the first samples, without reading their contents."""
    found: list[tuple[str, Row]] = []

    def is_last(key: str, row: Row) -> bool:
        found.append((key, row))
        return len(found) >= count

    for split in source.split_names():
        for _ in source.samples(split, is_selected=is_last):
            return found[:count]
    return found


def _strata(source: PackSource, column: str) -> dict[str, NDArray[np.uint64]]:
    hashes: dict[str, array[int]] = {}

    def note(key: str, row: Row) -> bool:
        hashes.setdefault(stratum_of(row, column), array("Q")).append(keyed_hash(key))
        return False

    for split in source.split_names():
        for _ in source.samples(split, is_selected=note):
            pass
    return {name: np.sort(np.array(found, np.uint64)) for name, found in hashes.items()}


def _moved(draw: SplitDraw, samples: Iterable[tuple[str, Row]]) -> dict[str, str]:
    """Return which samples go to splits that would otherwise have none, the nearest ones."""
    found = list(samples)
    if len(found) > PEEKED_SAMPLES:
        return {}
    numbers = {key: draw.number(key, row) for key, row in found}
    splits = {key: draw(key, row) for key, row in found}
    counts = Counter(splits.values())
    moved: dict[str, str] = {}
    for place, name in enumerate(draw.names):
        if counts[name]:
            continue
        middle = ((draw.edges[place - 1] if place else 0.0) + draw.edges[place]) / 2
        rich = [key for key in numbers if counts[splits[key]] > 1]
        if not rich:
            break
        nearest = min(rich, key=lambda key: abs(numbers[key] - middle))
        counts[splits[nearest]] -= 1
        counts[name] += 1
        moved[nearest] = splits[nearest] = name
    return moved
