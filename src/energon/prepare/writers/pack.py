"""Make a prepared dataset from something else: files, tables, datasets of other libraries."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from energon.errors import ConfigError, EmptyDatasetError
from energon.formats.meta.info import META, PACK_RECORD, DatasetInfo
from energon.prepare.dataset import Indexing, dataset_locked, prepare_shards
from energon.prepare.description import Description
from energon.prepare.files import is_leftover, list_dataset_files, reporting, write_files
from energon.prepare.importers.row import PackSource, Row
from energon.prepare.index.index import index_files
from energon.prepare.splits import SplitRequest
from energon.prepare.writers.draw import PEEKED_SAMPLES, SplitRouter, open_draw
from energon.prepare.writers.shard_writer import MAX_COUNT, MAX_SIZE, ShardWriter, encode_sample
from energon.samples.field_map import FieldMap

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


class Target(Protocol):
    """The place that shards are packed to."""

    folder: Path
    """Folder of the dataset, or its mirror."""

    def begin(self, *, overwrite: bool) -> None:
        """Called when it is known what is packed; `overwrite` deletes existing shards."""

    def take(self, shard: str) -> None:
        """Called with the path of each shard that is complete."""

    def finish(self) -> None:
        """Called when the last shard is complete, before the dataset is prepared."""


class LocalOutput:
    """A local folder.

    Args:
        folder: Where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, *, overwrite: bool) -> None:
        """Delete existing shards, the last ones first, if necessary."""
        if not overwrite:
            return
        for name in (".info.json", ".info.yaml"):
            (self.folder / META / name).unlink(missing_ok=True)
        for shard in reversed(_shards(self.folder)):
            for path in (*index_files(self.folder / shard), self.folder / shard):
                path.unlink(missing_ok=True)

    def take(self, shard: str) -> None:
        """Do nothing: the shard is already in place."""

    def finish(self) -> None:
        """Do nothing."""


def pack_dataset(
    source: PackSource,
    target: str | Path | Target,
    options: PackOptions | None = None,
    *,
    about: Mapping[str, Any],
    progress: Callable[[int], None] = lambda samples: None,
    indexing: Indexing | None = None,
) -> DatasetInfo:
    """Write the samples of a source to shards, and prepare them.

    An interrupted run is continued: complete shards are kept.

    Args:
        source: The source.
        target: Folder for the dataset; `energon.prepare.writers.pack_remote` has those in stores.
        options: How to pack; None for the defaults.
        about: Identifies the source and how it is read; a run continues only if it is the same.
        progress: Called now and then with the number of written samples.
        indexing: How to index the shards, of which little is left to do.

    Raises:
        ConfigError: If there is another dataset already, a sample cannot be written, or the field
            map does not fit.
        EmptyDatasetError: If the source has no samples.
        DatasetBusyError: If another process packs or prepares it, unless `indexing` says to wait.
        DuplicateSampleKeyError: If two samples have the same key.
    """
    place = LocalOutput(Path(target)) if isinstance(target, (str, Path)) else target
    folder = place.folder
    options = options or PackOptions()
    record = {**about, **source.record(), **options.record()}
    text = json.dumps(record, indent=2, sort_keys=True, default=str)
    indexing = indexing or Indexing()
    if not options.overwrite:
        _check(folder, text)
    _check_has_samples(source, about)
    description = Description(options.sample_type, options.field_map)
    _check_field_map(source, options, str(folder))
    with reporting(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with dataset_locked(folder, indexing) as held:
        if not options.overwrite:
            _check(folder, text)  # what another process may have written in the meantime
        write_files([(folder / PACK_RECORD, text.encode())])
        place.begin(overwrite=options.overwrite)
        named = _write(source, place, options, progress)
        place.finish()
        split = SplitRequest(
            ratio=None if named else options.split_ratio or {"train": 1}, by_folder=named
        )
        return prepare_shards(folder, split, description, indexing=held)


def _check_has_samples(source: PackSource, about: Mapping[str, Any]) -> None:
    """Check that there is something to write, and how, before writing anything."""
    first = next(chain.from_iterable(map(source.samples, source.split_names())), None)
    if first is not None:
        # Files are not read for this: those in stores are fetched when they are written.
        encode_sample({k: b"" if isinstance(v, PathLike) else v for k, v in first.items()})
        return
    places, kind = about.get("source") or ["the source"], about.get("kind")
    taken_for = f", taken for {_KINDS[kind]}" if kind in _KINDS else ""
    left_out = "".join(f"; skipped: {reason}" for reason in source.skipped()[:1])
    raise EmptyDatasetError(f"{', '.join(places)}{taken_for}: no samples to pack{left_out}")


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
    found, count = set[str](), 0
    parts = (source.samples(split) for split in source.split_names())
    for sample in islice(chain.from_iterable(parts), PEEKED_SAMPLES):
        count += 1
        found.update(name for name in sample if not name.startswith("__"))
        if not field_map.unmapped(found):
            return
    if count < PEEKED_SAMPLES:
        field_map.check_parts(found, origin=origin)
    else:
        logger.warning(
            "field_map: none of the first %d samples has a part for %s; if no sample has one, the "
            "dataset will be refused after all shards are written, and the same command with "
            "another field_map then keeps them",
            count,
            ", ".join(map(repr, field_map.unmapped(found))),
        )


def _write(
    source: PackSource, place: Target, options: PackOptions, progress: Callable[[int], None]
) -> bool:
    """Write all shards; return whether those of each split are in a folder of that name."""
    parts = source.split_names()
    if options.split_ratio is None:
        before = 0
        for part in parts:
            with _writer(place, part, options) as writer:
                deal = SplitRouter({part: writer}, _always(part), options.shuffle_seed, before)
                deal.write(source, [part], place.folder, progress)
                before += writer.num_samples
        return parts != [""]
    if not options.is_drawn:
        with _writer(place, "", options) as writer:
            deal = SplitRouter({"": writer}, _always(""), options.shuffle_seed)
            deal.write(source, parts, place.folder, progress)
        return False
    draw = open_draw(source, options.split_ratio, options.stratify)
    with ExitStack() as stack:
        writers = {name: stack.enter_context(_writer(place, name, options)) for name in draw.names}
        deal = SplitRouter(writers, draw, options.shuffle_seed)
        deal.write(source, parts, place.folder, progress)
    for name, writer in writers.items():
        if not writer.num_samples:
            logger.warning("split %r has no samples: too few for a ratio this small", name)
    return True


def _writer(place: Target, split: str, options: PackOptions) -> ShardWriter:
    return ShardWriter(
        place.folder / "shards" / split / "%05d.tar",
        options.maxcount,
        options.maxsize,
        resume=True,
        checksum=options.checksum,
        post=place.take,
    )


def _always(split: str) -> Callable[[str, Row], str]:
    return lambda key, row: split


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
