"""Pack into a store: each shard is uploaded once complete, and then takes no local space."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from energon.errors import ConfigError, ObjectChangedError
from energon.formats.meta.info import INFO_FILES, META, PACK_RECORD, DatasetInfo
from energon.formats.tables.part_table import PartTable, part_table_path
from energon.io.address import join_address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.files import delete_file, list_files, write_bytes
from energon.io.threads import WaitingThreads
from energon.prepare.dataset import Indexing
from energon.prepare.importers.row import PackSource
from energon.prepare.index import IndexOptions, ShardFile
from energon.prepare.remote import INDEX_FILES, Mirror, check_writable
from energon.prepare.writers.pack import PackOptions, Target, pack_dataset


def pack_remote(
    source: PackSource,
    address: str,
    options: PackOptions | None = None,
    *,
    about: Mapping[str, Any],
    progress: Callable[[int], None] = lambda samples: None,
    indexing: Indexing | None = None,
) -> DatasetInfo:
    """Write the samples of a source to shards in a store, and prepare them, see `pack_dataset`.

    An interrupted run is continued, on any machine: uploaded shards are kept. This machine holds at
    most one shard per split and one being uploaded; when shuffling, all contents in samples
    themselves.

    Args:
        source: The source.
        address: Where to pack to.
        options: See `pack_dataset`, as for the following.
        about: Identifies the source.
        progress: Called with the number of written samples.
        indexing: How to index the shards.

    Raises:
        ConfigError: If there is another dataset already, or the place cannot be listed.
        StorageError: If the store cannot be read or written.
    """
    options = options or PackOptions()
    check_writable(address, "pack to a folder, or to an object store")
    mirror = Mirror(address)

    def fill() -> None:
        found = list_files(address)
        if not options.overwrite and found and PACK_RECORD not in {each.key for each in found}:
            raise ConfigError(
                f"{redact(address)}: is not empty, and was not made by `energon pack`; choose a "
                "new folder"
            )
        if options.overwrite:
            found = _without_shards(address, found)
        mirror.update(found)
        shards = [name for name in mirror.present() if name.endswith(".tar")]
        mirror.index(shards, IndexOptions(checksum=options.checksum))

    with mirror.locked():
        mirror.fill(fill)
        with mirror.hidden(), _Uploads(mirror) as uploads, mirror.changing():
            return pack_dataset(
                source, uploads, options, about=about, progress=progress, indexing=indexing
            )


def _without_shards(address: str, found: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Delete a dataset, beginning with the files that define it; return what is left."""
    infos = {f"{META}/{name}" for name in INFO_FILES}
    shards = [
        each.key
        for each in found
        if each.key.startswith("shards/") and each.key.endswith((".tar", *INDEX_FILES))
    ]
    gone = [*infos.intersection(each.key for each in found), *sorted(shards, reverse=True)]
    for name in gone:
        delete_file(join_address(address, name))
    return [each for each in found if each.key not in gone]


class _Uploads(Target):
    """Uploads shards, one while the next is written.

    Args:
        mirror: The mirror of the dataset.
    """

    def __init__(self, mirror: Mirror) -> None:
        super().__init__(mirror.folder)
        self._mirror = mirror
        self._threads = WaitingThreads(1, "energon-upload")
        self._running: Future[None] | None = None

    def begin(self, *, overwrite: bool) -> None:
        """Upload the record of what is packed, which tells a later run that it may continue."""
        record = join_address(self._mirror.address, PACK_RECORD)
        write_bytes(record, self.folder / PACK_RECORD)

    def take(self, shard: str) -> None:
        """Upload a shard after the previous one has arrived."""
        self.finish()
        self._running = self._threads.submit(self._upload, Path(shard))

    def finish(self) -> None:
        """Wait until everything accepted so far is uploaded."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._running is not None and kind is not None and issubclass(kind, Exception):
            # The shard being uploaded is complete, and need not be made again.
            with suppress(Exception):
                self._running.result()
        self._threads.close()

    def _upload(self, shard: Path) -> None:
        name = os.path.relpath(shard, self.folder)
        address = join_address(self._mirror.address, name)
        table = PartTable.open(part_table_path(shard))
        write_bytes(address, shard)
        state = ShardFile(address).state()
        if state.size != table.shard_size:
            raise ObjectChangedError(
                f"{redact(address)}: has {state.size} bytes, not the {table.shard_size} that were "
                "uploaded; another program writes to the same folder"
            )
        self._mirror.save_index(state, name, replace(table, shard_mtime_ns=state.mtime_ns))
