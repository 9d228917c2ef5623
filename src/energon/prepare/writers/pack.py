"""Make a prepared dataset from something else: files, tables, datasets of other libraries.

Splits are drawn by a hash of the keys. A key is hashed to a number from 0 to 1, and each split has
a piece of that line as long as its ratio. So the split of a sample depends only on its key and the
ratios: when samples are added, the existing ones stay in their splits.

If stratified, the number of a key is its rank among the keys of its stratum, as a fraction: each
stratum is divided as exactly as whole samples allow. When samples are added, only those at the
edges change their split.

To shuffle, samples are written to a temporary file as they arrive, and read back in the order of
a hash of their keys, in memory that does not grow with their contents. So the order depends only on
keys and seed. Files that samples refer to stay where they are; other contents take space on disk
until everything is packed.
"""

from __future__ import annotations

import json
import logging
import pickle
import tempfile
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain, islice
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError, EmptyDatasetError
from energon.formats.meta.info import META, PACK_RECORD, DatasetInfo
from energon.prepare.dataset import Description, Indexing, dataset_locked, prepare_shards
from energon.prepare.files import is_leftover, list_dataset_files, reporting, write_files
from energon.prepare.importers.row import PackSource, Row
from energon.prepare.importers.selection import fetched
from energon.prepare.index import index_paths
from energon.prepare.splits import SplitRequest
from energon.prepare.writers.shard_writer import MAX_COUNT, MAX_SIZE, ShardWriter, encode_sample
from energon.samples.field_map import FieldMap


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
        for number in np.argsort(np.array(hashes, np.uint64), kind="stable").tolist():
            file.seek(starts[number])
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
    strata = None if stratify is None else _strata(source, stratify)
    draw = SplitDraw(ratios, strata=strata, column=stratify or "")
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
    keys: list[tuple[str, Row]] = []

    def is_last(key: str, row: Row) -> bool:
        keys.append((key, row))
        return len(keys) >= count

    for split in source.split_names():
        for _ in source.samples(split, is_selected=is_last):
            return keys[:count]
    return keys


def _strata(source: PackSource, column: str) -> dict[str, NDArray[np.uint64]]:
    hashes: dict[str, array[int]] = {}

    def note(key: str, row: Row) -> bool:
        hashes.setdefault(stratum_of(row, column), array("Q")).append(keyed_hash(key))
        return False

    for split in source.split_names():
        for _ in source.samples(split, is_selected=note):
            pass
    return {name: np.sort(np.array(own, np.uint64)) for name, own in hashes.items()}


def _moved(draw: SplitDraw, samples: Sequence[tuple[str, Row]]) -> dict[str, str]:
    """Return which samples go to splits that would otherwise have none, the nearest ones."""
    if len(samples) > PEEKED_SAMPLES:
        return {}
    numbers = {key: draw.number(key, row) for key, row in samples}
    splits = {key: draw(key, row) for key, row in samples}
    counts = Counter(splits.values())
    moved: dict[str, str] = {}
    for number, name in enumerate(draw.names):
        if counts[name]:
            continue
        middle = ((draw.edges[number - 1] if number else 0.0) + draw.edges[number]) / 2
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
        route: Returns the split of a sample, given its key and row; None if there is only one.
        shuffle_seed: Determines the order of samples; None keeps that of the source.
        before: How many samples were written to other splits.
    """

    def __init__(
        self,
        writers: Mapping[str, ShardWriter],
        route: Callable[[str, Row], str] | None,
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
            split = self.route(key, row) if self.route else next(iter(self.writers))
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


logger = logging.getLogger("energon")


@dataclass(frozen=True)
class PackOptions:
    """How samples become shards, and shards a dataset.

    Args:
        maxcount: Maximum number of samples in a shard.
        maxsize: Maximum size of a shard in bytes, see `ShardWriter`.
        split_ratio: Ratio by name of the split, instead of the splits of the source. The split of a
            sample is drawn by its key. None keeps the splits of the source, or puts all samples
            into train.
        stratify: Divides each value by the same ratio: "folder", or a column; None does not.
        shuffle_seed: Determines the order of samples in the shards; None keeps that of the source.
        overwrite: Whether to delete an existing dataset.
        checksum: Whether to store a checksum of each part, for `energon verify`.
        sample_type: The type of samples, see `prepare_dataset`.
        field_map: How parts become fields of the sample type.

    Raises:
        ConfigError: If samples are to be stratified without a ratio.
    """

    maxcount: int = MAX_COUNT
    maxsize: float = MAX_SIZE
    split_ratio: Mapping[str, float] | None = None
    stratify: str | None = None
    shuffle_seed: int | None = None
    overwrite: bool = False
    checksum: bool = True
    sample_type: str | None = "CrudeWebdataset"
    field_map: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.stratify is not None and not self.is_drawn:
            raise ConfigError(
                f"stratify={self.stratify!r} needs at least two splits to divide samples between; "
                "name them with a ratio, as in --split-ratio 8,1,1"
            )

    @property
    def is_drawn(self) -> bool:
        """Whether samples are divided between several splits by ratio."""
        ratios = self.split_ratio or {}
        return sum(ratio > 0 for ratio in ratios.values()) > 1

    def record(self) -> dict[str, Any]:
        """Return the settings under which existing shards are kept."""
        drawn = {"split_ratio": dict(self.split_ratio or {}), "stratify": self.stratify}
        return {
            "maxcount": self.maxcount,
            "maxsize": int(self.maxsize),
            "shuffle_seed": self.shuffle_seed,
            **(drawn if self.is_drawn else {}),
        }


class Target:
    """The place that shards are packed to: a local folder.

    Args:
        folder: Folder of the dataset, or its mirror.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, *, overwrite: bool) -> None:
        """Called when it is known what is packed; `overwrite` deletes existing shards."""
        if not overwrite:
            return
        for name in (".info.json", ".info.yaml"):
            (self.folder / META / name).unlink(missing_ok=True)
        for shard in reversed(_shards(self.folder)):  # the last ones first
            for path in (*index_paths(self.folder / shard), self.folder / shard):
                path.unlink(missing_ok=True)

    def take(self, shard: str) -> None:
        """Called with the path of each shard that is complete."""

    def finish(self) -> None:
        """Called when the last shard is complete, before the dataset is prepared."""


def pack_dataset(
    source: PackSource,
    target: str | Path | Target,
    options: PackOptions | None = None,
    *,
    identity: Mapping[str, Any],
    progress: Callable[[int], None] = lambda samples: None,
    indexing: Indexing | None = None,
) -> DatasetInfo:
    """Write the samples of a source to shards, and prepare them.

    An interrupted run is continued: complete shards are kept.

    Args:
        source: The source.
        target: Folder for the dataset; `energon.prepare.remote` has those in stores.
        options: How to pack; None for the defaults.
        identity: Identifies the source and how it is read; a run continues only if it is the same.
        progress: Called now and then with the number of written samples.
        indexing: How to index the shards, of which little is left to do.

    Raises:
        ConfigError: If there is another dataset already, a sample cannot be written, or the field
            map does not fit.
        EmptyDatasetError: If the source has no samples.
        DatasetBusyError: If another process packs or prepares it, unless `indexing` says to wait.
        DuplicateSampleKeyError: If two samples have the same key.
    """
    target = Target(Path(target)) if isinstance(target, (str, Path)) else target
    folder = target.folder
    options = options or PackOptions()
    record = {**identity, **source.record(), **options.record()}
    text = json.dumps(record, indent=2, sort_keys=True, default=str)
    indexing = indexing or Indexing()
    if not options.overwrite:
        _check(folder, text)
    _check_has_samples(source, identity)
    description = Description(options.sample_type, options.field_map)
    _check_field_map(source, options, str(folder))
    with reporting(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with dataset_locked(folder, indexing) as held:
        if not options.overwrite:
            _check(folder, text)  # what another process may have written in the meantime
        write_files([(folder / PACK_RECORD, text.encode())])
        target.begin(overwrite=options.overwrite)
        named = _write(source, target, options, progress)
        target.finish()
        split = SplitRequest(
            ratio=None if named else options.split_ratio or {"train": 1}, by_folder=named
        )
        return prepare_shards(folder, split, description, indexing=held)


def _check_has_samples(source: PackSource, identity: Mapping[str, Any]) -> None:
    """Check that there is something to write, and how, before writing anything."""
    first = next(chain.from_iterable(map(source.samples, source.split_names())), None)
    if first is not None:
        # Files are not read for this: those in stores are fetched when they are written.
        encode_sample({k: b"" if isinstance(v, PathLike) else v for k, v in first.items()})
        return
    addresses, kind = identity.get("source") or ["the source"], identity.get("kind")
    taken_for = f", taken for {_KINDS[kind]}" if kind in _KINDS else ""
    skipped = "".join(f"; skipped: {reason}" for reason in source.skipped()[:1])
    raise EmptyDatasetError(f"{', '.join(addresses)}{taken_for}: no samples to pack{skipped}")


_KINDS = {
    "table": "tables",
    "imagefolder": "a folder with a metadata table",
    "shards": "tar archives",
}
"""What sources are taken for, by kind, where `--kind` may correct a mistake."""


def _check_field_map(source: PackSource, options: PackOptions, origin: str) -> None:
    """Check that the field map fits the known parts before writing anything.

    Raises:
        ConfigError: If it maps a field to parts that no sample has.
    """
    if not options.field_map:
        return
    field_map = FieldMap.parse(options.field_map)
    names = source.part_names()
    if names is not None:
        field_map.check_parts(names, origin=origin)
        return
    parts_seen, count = set[str](), 0
    parts = (source.samples(split) for split in source.split_names())
    for sample in islice(chain.from_iterable(parts), PEEKED_SAMPLES):
        count += 1
        parts_seen.update(name for name in sample if not name.startswith("__"))
        if not field_map.unmapped(parts_seen):
            return
    if count < PEEKED_SAMPLES:
        field_map.check_parts(parts_seen, origin=origin)
    else:
        logger.warning(
            "field_map: none of the first %d samples has a part for %s; if no sample has one, the "
            "dataset will be refused after all shards are written, and the same command with "
            "another field_map then keeps them",
            count,
            ", ".join(map(repr, field_map.unmapped(parts_seen))),
        )


def _write(
    source: PackSource, target: Target, options: PackOptions, progress: Callable[[int], None]
) -> bool:
    """Write all shards; return whether those of each split are in a folder of that name."""
    parts = source.split_names()
    if options.split_ratio is None:
        before = 0
        for part in parts:
            with _writer(target, part, options) as writer:
                deal = SplitRouter({part: writer}, None, options.shuffle_seed, before)
                deal.write(source, [part], target.folder, progress)
                before += writer.num_samples
        return parts != [""]
    if not options.is_drawn:
        with _writer(target, "", options) as writer:
            deal = SplitRouter({"": writer}, None, options.shuffle_seed)
            deal.write(source, parts, target.folder, progress)
        return False
    draw = open_draw(source, options.split_ratio, options.stratify)
    with ExitStack() as stack:
        writers = {name: stack.enter_context(_writer(target, name, options)) for name in draw.names}
        deal = SplitRouter(writers, draw, options.shuffle_seed)
        deal.write(source, parts, target.folder, progress)
    for name, writer in writers.items():
        if not writer.num_samples:
            logger.warning("split %r has no samples: too few for a ratio this small", name)
    return True


def _writer(target: Target, split: str, options: PackOptions) -> ShardWriter:
    return ShardWriter(
        target.folder / "shards" / split / "%05d.tar",
        options.maxcount,
        options.maxsize,
        resume=True,
        checksum=options.checksum,
        post=target.take,
    )


def _check(folder: Path, text: str) -> None:
    """Refuse to mix what is packed according to `text` with anything else in the folder."""
    path = folder / PACK_RECORD
    if folder.is_file():
        raise ConfigError(f"{folder}: is a file; expected a folder, or the name of a new one")
    # Asked first: a process that packs now has written its record before any other file.
    has_files = _has_files(folder)
    present = path.read_text() if path.exists() else None
    if present is None and has_files:
        raise ConfigError(
            f"{folder}: is not empty, and was not made by `energon pack`; choose a new folder"
        )
    if present is not None and present != text and _shards(folder):
        raise ConfigError(
            f"{folder}: was packed from something else, or differently, see {path}; choose a new "
            "folder, or pass --overwrite"
        )


def _shards(folder: Path) -> list[str]:
    """Return the paths of the shards that were packed into a folder."""
    shards = folder / "shards"
    if not shards.is_dir():
        return []
    return [f"shards/{name}" for name in list_dataset_files(shards) if name.endswith(".tar")]


def _has_files(folder: Path) -> bool:
    """Return whether there is more than what a run leaves behind when killed at its beginning."""
    if not folder.exists():
        return False
    names = {path.name for path in folder.iterdir()}
    inside = {path.name for path in (folder / META).iterdir()} if META in names else set()
    begun = {name for name in inside if name == ".lock" or is_leftover(name)}
    return bool(names - {META} or inside - begun)
