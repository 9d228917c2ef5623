"""Prepare and pack datasets in object stores: a local folder stands for them meanwhile.

The folder, a `Mirror`, has the index files of the dataset, and for each shard an empty file with
the same size and date. New or changed shards are indexed by ranges first, so that code working on
the folder finds all of them indexed and reads none. The index of each shard is uploaded as soon as
it is made: an interrupted run continues there. New files are uploaded at the end, each as a whole,
with those that define the dataset last. A shard that is packed is uploaded once complete, and then
takes no local space.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EnergonError,
    FormatError,
    ObjectChangedError,
    StorageFullError,
)
from energon.formats.meta.info import INFO_FILES, META, PACK_RECORD, DatasetInfo
from energon.formats.tables.part_table import PartTable, part_table_path
from energon.formats.text import parse_json
from energon.io.address import address_name, join_address, redact
from energon.io.atomic import atomic_path, is_full, locked, temporary_folder, write_atomic
from energon.io.backends.base import ObjectInfo
from energon.io.disk_cache import disk_cache
from energon.io.files import delete_file, list_files, open_store, read_bytes, write_bytes
from energon.io.threads import WaitingThreads, run_in_threads
from energon.limits import read_local_document
from energon.metadataset.kind import advice, explain_missing
from energon.prepare.dataset import Indexing, without_shards
from energon.prepare.engines import Progress, no_progress
from energon.prepare.files import FileState
from energon.prepare.importers.row import PackSource
from energon.prepare.index import (
    COMPRESSED_SHARDS,
    IndexOptions,
    ShardFile,
    index_contents,
    index_remote,
    known_table,
)
from energon.prepare.writers.pack import PackOptions, Target, pack_dataset

MAX_PARALLEL_COPIES = 16
"""How many shards are read, and files are copied, at the same time."""
MAX_AT_ONCE_BYTES = 8 << 20
"""Larger files are copied piece by piece."""
logger = logging.getLogger("energon")
UNFINISHED = "media.partial."
"""Files below `.nv-meta` whose names begin like this are intermediate results for the next run."""
INDEX_FILES = (".tar.idx", ".tar.parts")
FIRST = ("index.uuid", *INFO_FILES, "index.sqlite")
"""Files of `.nv-meta` in the order in which they replace the old ones; all others come later."""


def check_writable(address: str, instead: str) -> None:
    """Raise `ConfigError` if a place is not writable, and say what to do `instead`."""
    store, _ = open_store(address)
    if not store.backend.can_list:
        raise ConfigError(
            f"{redact(address)}: web servers are read only, and cannot list their files; {instead}"
        )


class Mirror:
    """A folder that stands for a remote one; kept from run to run.

    Args:
        address: The remote folder.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        digest = blake2b(address.encode(), digest_size=12).hexdigest()
        self._root = disk_cache().folder / "mirrors" / digest
        # The folder has the name of the dataset, which appears in messages.
        self.folder = self._root / address_name(address)
        self._notes = self._root / "versions.json"
        self._temporary = ExitStack()
        self._is_temporary = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for other processes of this machine that work on the same dataset.

        Raises:
            StorageFullError: If no disk has room for intermediate files.
        """
        with ExitStack() as held:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(self._root / "lock"))
            except OSError as error:
                self._retreat(error)
            try:
                yield
            except OSError as error:
                if not is_full(error):
                    raise
                raise StorageFullError(
                    f"{redact(self.address)}: this machine has no room for intermediate files "
                    f"({error.strerror}: {self.folder.parent}); set ENERGON_STORAGE_CACHE_DIR to a "
                    "folder with more space, and run it again; completed work is kept"
                ) from error
            finally:
                self._temporary.close()

    def fill(self, make: Callable[[], None]) -> None:
        """Let `make` fill the folder; repeat in a temporary one if the disk is full.

        Args:
            make: Calls `update`, and possibly `index`.
        """
        try:
            make()
        except OSError as error:
            self._retreat(error)
            make()

    def _retreat(self, error: OSError) -> None:
        """Use a temporary folder from now on, if that may help."""
        if not is_full(error) or self._is_temporary:
            raise error
        folder = self._temporary.enter_context(temporary_folder("mirror"))
        self._is_temporary = True
        logger.warning(
            "%s: the disk of %s is full, so intermediate files are kept in %s until this command "
            "ends; set ENERGON_STORAGE_CACHE_DIR to a folder with more space",
            redact(self.address),
            self._root.parent,
            folder,
        )
        self._root = folder
        self.folder = self._root / self.folder.name
        self._notes = self._root / self._notes.name
        self.folder.mkdir()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let errors refer to the address: users do not know the folder."""
        try:
            with _hide_messages(self.folder):
                yield
        except EnergonError as error:
            message = str(error).replace(str(self.folder), redact(self.address))
            raise type(error)(message) from error

    def update(self, files: Sequence[ObjectInfo], *, trusting: bool = True) -> None:
        """Update the folder to match the store.

        Args:
            files: The files in the store, by keys below the folder.
            trusting: Whether to trust the index of a shard unless this machine knows that the shard
                has changed. If not, known changes are left as they are.
        """
        infos = {file.key: file for file in files}
        shards = [name for name in infos if name.endswith((".tar", *COMPRESSED_SHARDS))]
        noted = self._noted_versions()
        # Listings without versions tell size and date.
        versions: dict[str, str | None] = {
            name: info.version or f"{info.size} bytes, {info.mtime_ns}"
            for name, info in infos.items()
        }
        changed = {name for name in infos if noted.get(name) != versions[name]}
        for name in self.present():
            if name not in infos and not name.startswith(f"{META}/{UNFINISHED}"):
                (self.folder / name).unlink()
        outdated = [
            name
            for name in infos
            if (name.startswith(f"{META}/") or name.endswith(INDEX_FILES))
            and (name in changed or not (self.folder / name).exists())
        ]
        run_in_threads(
            lambda name: self._download(infos[name]), outdated, count=MAX_PARALLEL_COPIES
        )
        for name in shards:
            self.stand_in(name, FileState(infos[name].size, infos[name].mtime_ns))
            if not trusting:
                versions[name] = noted.get(name)
            elif name in noted and name in changed:
                # Size and date may be the same although the version is not.
                part_table_path(self.folder / name).unlink(missing_ok=True)
        self._note({name: version for name, version in versions.items() if version is not None})

    def index(
        self,
        shards: Sequence[str],
        options: IndexOptions,
        progress: Progress = no_progress,
    ) -> None:
        """Index new or changed shards by ranges, and upload the results."""
        done = read = 0

        def index_one(name: str) -> None:
            nonlocal done, read
            path = self.folder / name
            if options.force or known_table(path, checksum=options.checksum) is None:
                shard = ShardFile(join_address(self.address, name))
                table = index_remote(shard, path, options)
                self.save_index(shard.state(), name, table)
                read += 1
            done += 1
            progress(done, len(shards))

        run_in_threads(index_one, shards, count=MAX_PARALLEL_COPIES)
        address = redact(self.address)
        logger.info("%s: %d of %d shards were new or changed", address, read, len(shards))

    def save_index(self, shard: FileState, name: str, table: PartTable) -> None:
        """Upload the index of a shard.

        Args:
            shard: Size and date of the shard that it belongs to.
            name: Path of the shard.
            table: What was found in it.
        """
        path = self.folder / name
        for target, content in index_contents(path, table):
            write_bytes(join_address(self.address, os.path.relpath(target, self.folder)), content)
            write_atomic(target, content)
        self.stand_in(name, shard)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Upload what the block has changed below `.nv-meta`, unless it fails.

        What may differ from the store afterwards is fetched again by the next run.
        """
        before, notes = self._digests(), self._noted_versions()
        self._note({name: notes[name] for name in notes if not name.startswith(f"{META}/")})
        yield
        after = self._digests()
        self._upload(before, after)
        changed = {f"{META}/{name}" for name in after if before.get(name) != after[name]}
        self._note({name: notes[name] for name in notes if name not in changed})

    def _digests(self) -> dict[str, str]:
        """Return a digest of each file below `.nv-meta`."""
        meta = self.folder / META
        paths = list(meta.iterdir()) if meta.is_dir() else []
        return {
            path.name: _digest(path)
            for path in paths
            if path.is_file() and path.name != ".lock" and not path.name.startswith(UNFINISHED)
        }

    def _upload(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        for name in before.keys() - after.keys():
            delete_file(join_address(self.address, f"{META}/{name}"))
        changed = [name for name, digest in after.items() if before.get(name) != digest]
        order = {name: number for number, name in enumerate(FIRST)}
        if not before.keys() & set(INFO_FILES):
            # Until these exist, no one takes the folder for a dataset.
            order |= dict.fromkeys(INFO_FILES, len(FIRST) + 1)
        for name in sorted(changed, key=lambda name: (order.get(name, len(FIRST)), name)):
            write_bytes(join_address(self.address, f"{META}/{name}"), self.folder / META / name)

    def present(self) -> list[str]:
        """Return the paths of all files in the folder, sorted."""
        return sorted(
            os.path.relpath(os.path.join(folder, name), self.folder)
            for folder, _, names in os.walk(self.folder)
            for name in names
        )

    def stand_in(self, name: str, shard: FileState) -> None:
        """Make a file with the size and date of a shard."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:  # drops any content
            file.truncate(shard.size)
        os.utime(path, ns=(shard.mtime_ns, shard.mtime_ns))

    def _note(self, versions: Mapping[str, str]) -> None:
        write_atomic(self._notes, json.dumps(versions))

    def _noted_versions(self) -> dict[str, str]:
        try:
            notes = parse_json(read_local_document(self._notes), origin=str(self._notes))
            return {name: note for name, note in notes.items() if isinstance(note, str)}
        except (FileNotFoundError, FormatError, AttributeError):
            return {}

    def _download(self, file: ObjectInfo) -> None:
        address, path = join_address(self.address, file.key), self.folder / file.key
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.size <= MAX_AT_ONCE_BYTES:
            write_atomic(path, read_bytes(address))
        else:
            store, key = open_store(address)
            with atomic_path(path) as temporary, open(temporary, "wb") as target:
                target.writelines(store.stream(key))
        # Intermediate results belong to an index of this size and date.
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))


@contextmanager
def _hide_messages(folder: Path) -> Iterator[None]:
    """Drop log messages about a folder unknown to users: they were repeated for the address."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return not isinstance(record.args, tuple) or folder not in record.args

    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


@contextmanager
def mirrored(
    address: str,
    *,
    exclude: Sequence[str] = (),
    options: IndexOptions | None = None,
    progress: Progress = no_progress,
) -> Iterator[Path]:
    """Yield a local folder that stands for a remote dataset, and upload what was made in it.

    Nothing is uploaded to `.nv-meta` after an exception.

    Args:
        address: The dataset.
        exclude: Regular expressions; shards whose path matches any of them are not indexed.
        options: How shards are indexed.
        progress: Called with the number of indexed shards, and the total.

    Raises:
        DatasetNotFoundError: If there are no shards.
        FormatError: If a shard is damaged.
        StorageError: If the store cannot be read or written.
    """
    mirror = Mirror(address)

    def fill() -> None:
        files = list_files(address)
        if not any(file.key.endswith((".tar", *COMPRESSED_SHARDS)) for file in files):
            if not files:
                raise DatasetNotFoundError(explain_missing(address))
            raise DatasetNotFoundError(
                f"{redact(address)}: there is no .tar file in this folder or below: it "
                f"{advice(address)}"
            )
        mirror.update(files)
        shards = [name for name in mirror.present() if name.endswith(".tar")]
        included = without_shards(shards, exclude) if shards else shards
        mirror.index(included, IndexOptions() if options is None else options, progress)

    with mirror.locked():
        mirror.fill(fill)
        with mirror.changing(), mirror.hidden():
            yield mirror.folder


@contextmanager
def mirrored_metadata(address: str) -> Iterator[tuple[Path, list[ObjectInfo]]]:
    """Yield a local folder with the `.nv-meta` of a remote folder, and the other files there.

    Changes below `.nv-meta` are uploaded, unless there is an exception.

    Args:
        address: The remote folder.

    Raises:
        DatasetNotFoundError: If it contains no files.
        StorageError: If the store cannot be read or written.
    """
    mirror = Mirror(address)
    with mirror.locked():
        files = list_files(address)
        if not files:
            raise DatasetNotFoundError(explain_missing(address))
        metadata = [file for file in files if file.key.startswith(f"{META}/")]
        mirror.fill(lambda: mirror.update(metadata))
        with mirror.changing(), mirror.hidden():
            yield mirror.folder, [file for file in files if META not in file.key.split("/")[:-1]]


def pack_remote(
    source: PackSource,
    address: str,
    options: PackOptions | None = None,
    *,
    identity: Mapping[str, Any],
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
        identity: Identifies the source.
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
        files = list_files(address)
        if not options.overwrite and files and PACK_RECORD not in {file.key for file in files}:
            raise ConfigError(
                f"{redact(address)}: is not empty, and was not made by `energon pack`; choose a "
                "new folder"
            )
        if options.overwrite:
            files = _without_shards(address, files)
        mirror.update(files)
        shards = [name for name in mirror.present() if name.endswith(".tar")]
        mirror.index(shards, IndexOptions(checksum=options.checksum))

    with mirror.locked():
        mirror.fill(fill)
        with mirror.hidden(), _Uploads(mirror) as uploads, mirror.changing():
            return pack_dataset(
                source, uploads, options, identity=identity, progress=progress, indexing=indexing
            )


def _without_shards(address: str, files: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Delete a dataset, beginning with the files that define it; return what is left."""
    infos = {f"{META}/{name}" for name in INFO_FILES}
    shards = [
        file.key
        for file in files
        if file.key.startswith("shards/") and file.key.endswith((".tar", *INDEX_FILES))
    ]
    gone = [*infos.intersection(file.key for file in files), *sorted(shards, reverse=True)]
    for name in gone:
        delete_file(join_address(address, name))
    return [file for file in files if file.key not in gone]


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
