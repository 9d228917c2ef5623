"""Make a prepared dataset of what is not one: files, tables, datasets of other libraries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from energon.errors import ConfigError
from energon.formats.info import META, DatasetInfo
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.files import reporting, write_files
from energon.prepare.leftovers import is_leftover
from energon.prepare.lock import dataset_lock
from energon.prepare.packing.fetch import fetched
from energon.prepare.packing.source import PackSource
from energon.prepare.shard_writer import MAX_COUNT, MAX_SIZE, ShardWriter

RECORD = "pack.json"
"""What was packed: an interrupted run goes on only if that is the same."""


@dataclass(frozen=True)
class ShardSizes:
    """How large shards are, see `ShardWriter`."""

    maxcount: int = MAX_COUNT
    maxsize: float = MAX_SIZE


class Target(Protocol):
    """Where shards are packed to."""

    folder: Path
    """Folder of the dataset, or one that stands for it."""

    def begin(self, *, overwrite: bool) -> None:
        """Called when it is clear what is packed; `overwrite` says to delete what is there."""

    def take(self, shard: str) -> None:
        """Called with the path of each shard that is complete."""

    def finish(self) -> None:
        """Called when the last shard is complete, before the dataset is prepared."""


class Folder:
    """A folder on this machine.

    Args:
        folder: Where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, *, overwrite: bool) -> None:
        """Do nothing: what is deleted, writers of shards delete."""

    def take(self, shard: str) -> None:
        """Do nothing: the shard is where it belongs."""

    def finish(self) -> None:
        """Do nothing."""


def pack_dataset(
    source: PackSource,
    target: str | Path | Target,
    *,
    about: Mapping[str, Any],
    sizes: ShardSizes = ShardSizes(),
    overwrite: bool = False,
    checksum: bool = True,
    progress: Callable[[int], None] = lambda samples: None,
    split_ratio: Mapping[str, float] | None = None,
    sample_type: str | None = "CrudeWebdataset",
    field_map: Mapping[str, str] | None = None,
    indexing: Indexing | None = None,
) -> DatasetInfo:
    """Write the samples of a source to shards, and prepare them.

    A run that was interrupted is taken up where it was: complete shards stay.

    Args:
        source: What to pack.
        target: Folder for the dataset; `energon.prepare.pack_remote` has those in stores.
        about: What tells the source and how it is read; a run goes on only if it is the same.
        sizes: How large shards become.
        overwrite: Whether to delete a dataset that is there.
        checksum: Whether to keep a checksum of each part, for `energon verify`.
        progress: Called with the number of samples that are written, now and then.
        split_ratio: Ratio by name of the split, for sources without splits; None is all train.
        sample_type: What samples become, see `prepare_dataset`.
        field_map: How parts become the fields of the sample type.
        indexing: How the shards are indexed, of which little is left to do.

    Raises:
        ConfigError: If there is another dataset already, or a sample cannot be written.
        DatasetBusyError: If another process packs or prepares it, unless `indexing` says to wait.
        DuplicateSampleKeyError: If two samples have the same key.
    """
    place = Folder(Path(target)) if isinstance(target, (str, Path)) else target
    folder = place.folder
    record = {**about, "maxcount": sizes.maxcount, "maxsize": int(sizes.maxsize)}
    text = json.dumps(record, indent=2, sort_keys=True, default=str)
    indexing = indexing or Indexing()
    if not overwrite:
        _check(folder, text)
    with reporting(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with dataset_lock(folder, wait=indexing.wait):
        if not overwrite:
            _check(folder, text)  # what another process has written meanwhile
        write_files([(folder / META / RECORD, text.encode())])
        place.begin(overwrite=overwrite)
        splits = source.split_names()
        for split in splits:
            pattern = folder / "shards" / split / "%05d.tar"
            writer = ShardWriter(
                pattern,
                sizes.maxcount,
                sizes.maxsize,
                resume=not overwrite,
                overwrite=overwrite,
                checksum=checksum,
                post=place.take,
            )
            with writer:
                _write(source, split, writer, progress)
        place.finish()
        named = splits != [""]
        return prepare_dataset(
            folder,
            split_ratio=None if named else split_ratio or {"train": 1},
            split_by_folder=named,
            sample_type=sample_type,
            field_map=field_map,
            indexing=replace(indexing, is_locked=True),
        )


def _write(
    source: PackSource, split: str, writer: ShardWriter, progress: Callable[[int], None]
) -> None:
    done = writer.num_samples
    samples = source.samples(split, max(0, done - 1))
    if done:
        last = next(iter(islice(samples, 1)), None)
        if last is None or last["__key__"] != writer.last_key:
            raise ConfigError(
                f"{Path(writer.pattern).parent}: sample {done} is {writer.last_key!r} in the "
                "shards, and no longer in the source; pass --overwrite to write all shards anew"
            )
    for sample in fetched(samples):
        writer.write(sample)
        if writer.num_samples % 100 == 0:
            progress(writer.num_samples)
    progress(writer.num_samples)


def _check(folder: Path, text: str) -> None:
    """Refuse to mix what `text` says is packed with anything else that the folder has."""
    path = folder / META / RECORD
    present = path.read_text() if path.exists() else None
    if present is None and _has_files(folder):
        raise ConfigError(
            f"{folder}: is not empty, and was not made by `energon pack`; choose a new folder"
        )
    if present is not None and present != text:
        raise ConfigError(
            f"{folder}: was packed from something else, or in another way, see {path}; choose "
            "a new folder, or pass --overwrite"
        )


def _has_files(folder: Path) -> bool:
    """Return whether there is more than what a run leaves that was killed as it began."""
    if not folder.exists():
        return False
    names = {path.name for path in folder.iterdir()}
    inside = {path.name for path in (folder / META).iterdir()} if META in names else set()
    begun = {name for name in inside if name == ".lock" or is_leftover(name)}
    return bool(names - {META} or inside - begun)
