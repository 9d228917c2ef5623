"""Draw the splits of samples by a hash of their keys, and pass each to the writer of its split.

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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError
from energon.prepare.importers.row import PackSource, Row
from energon.prepare.importers.selection import fetched
from energon.prepare.writers.shard_writer import ShardWriter


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


SPLIT_COLUMN = "__split__"
"""Holds the split of a sample on its way into a shard."""


class SplitRouter:
    """Distributes samples to the writers of splits, after those that they already have.

    Args:
        writers: A writer for each split.
        route: Returns the split of a sample, given its key and row.
        shuffle_seed: Determines the order of samples; None keeps that of the source.
        before: How many samples were written to other splits.
    """

    def __init__(
        self,
        writers: Mapping[str, ShardWriter],
        route: Callable[[str, Row], str],
        shuffle_seed: int | None,
        before: int = 0,
    ) -> None:
        self.writers = writers
        self.route = route
        self.seed = shuffle_seed
        self.before = before
        self.left = {split: writer.num_samples for split, writer in writers.items()}

    def write(
        self,
        source: PackSource,
        parts: Sequence[str],
        folder: Path,
        progress: Callable[[int], None],
    ) -> None:
        """Write the samples of some splits of a source."""
        for sample in fetched(self._new_samples(source, parts, folder)):
            self.writers[sample[SPLIT_COLUMN]].write(sample)
            if self.num_samples % 100 == 0:
                progress(self.num_samples)
        for split, left in self.left.items():
            if left:
                raise self._changed(split)
        progress(self.num_samples)

    @property
    def num_samples(self) -> int:
        """Samples written so far, including those of earlier runs."""
        return self.before + sum(writer.num_samples for writer in self.writers.values())

    def _new_samples(
        self, source: PackSource, parts: Sequence[str], folder: Path
    ) -> Iterator[Mapping[str, Any]]:
        if self.seed is not None:
            everything = self._routed(source, parts, 0, lambda split, key: True)
            for sample in shuffled(everything, self.seed, folder):
                if self._is_new(sample[SPLIT_COLUMN], sample["__key__"]):
                    yield sample
            return
        start = 0
        if len(parts) == len(self.left) == 1:
            # The source can skip what the only writer has, except the last sample, which is
            # compared.
            ((split, done),) = self.left.items()
            start, self.left[split] = max(0, done - 1), min(1, done)
        yield from self._routed(source, parts, start, self._is_new)

    def _routed(
        self,
        source: PackSource,
        parts: Sequence[str],
        start: int,
        is_new: Callable[[str, str], bool],
    ) -> Iterator[dict[str, Any]]:
        """Yield samples that are new, with the names of their splits."""
        routed: deque[tuple[str, str]] = deque()

        def is_selected(key: str, row: Row) -> bool:
            split = self.route(key, row)
            if not is_new(split, key):
                return False
            routed.append((key, split))
            return True

        for part in parts:
            for sample in source.samples(part, start, is_selected):
                # Sources may ask about samples before they have yielded the ones before these.
                key, split = routed.popleft()
                while key != sample["__key__"]:
                    key, split = routed.popleft()
                yield {**sample, SPLIT_COLUMN: split}

    def _is_new(self, split: str, key: str) -> bool:
        """Return whether a sample comes after those that its writer has."""
        if not self.left[split]:
            return True
        self.left[split] -= 1
        if not self.left[split] and key != self.writers[split].last_key:
            raise self._changed(split)
        return False

    def _changed(self, split: str) -> ConfigError:
        writer = self.writers[split]
        return ConfigError(
            f"{Path(writer.pattern).parent}: the last of {writer.num_samples} samples in the "
            f"shards is {writer.last_key!r}, which is no longer in the source; pass "
            "--overwrite to rewrite all shards"
        )
