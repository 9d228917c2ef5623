"""Prepare datasets in object stores: a local folder stands for them meanwhile.

The folder has the index files of the dataset, and for each shard a file of the same size and
date that takes no space. Shards that are new or changed are indexed by ranges first, so that
what works on the folder finds all of them known and reads none. At the end the files that are
new are uploaded, each as a whole, and those last that say what the dataset consists of. The
index of each shard is uploaded as soon as it is made: a run that was broken off goes on there.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from energon.errors import DatasetNotFoundError, EnergonError
from energon.formats.info import META
from energon.formats.part_table_file import part_table_path
from energon.formats.tar_index import encode_tar_index, tar_index_path
from energon.io.address import address_name, join_address, redact
from energon.io.atomic import write_atomic
from energon.io.backend import ObjectInfo
from energon.io.disk_cache import disk_cache
from energon.io.files import delete_file, list_files, read_bytes, write_bytes
from energon.io.range_file import RemoteFile
from energon.io.threads import WaitingThreads
from energon.prepare.index import IndexOptions, known_table
from energon.prepare.remote_scan import index_remote
from energon.prepare.shards import COMPRESSED

MAX_PARALLEL = 16
"""Shards that are indexed, and files that are copied, at the same time."""
log = logging.getLogger("energon")
INDEX_FILES = (".tar.idx", ".tar.parts")
INFO_FILES = (".info.yaml", ".info.json")
FIRST = ("index.uuid", *INFO_FILES, "index.sqlite")
"""Files of `.nv-meta` in the order in which they replace the old ones; all others follow."""

Progress = Callable[[int, int], None]


@contextmanager
def standing_in(
    address: str,
    *,
    exclude: Sequence[str] = (),
    options: IndexOptions | None = None,
    progress: Progress = lambda done, total: None,
) -> Iterator[Path]:
    """Give a local folder that stands for a remote dataset, and upload what was made in it.

    Nothing is uploaded to `.nv-meta` after an exception.

    Args:
        address: The dataset.
        exclude: Regular expressions; shards in whose path one is found are not indexed.
        options: How shards are indexed.
        progress: Called with the number of shards whose index is known, and of all.

    Raises:
        DatasetNotFoundError: If there are no shards.
        FormatError: If a shard is damaged.
        StorageError: If the store cannot be read or written.
    """
    mirror = _Mirror(address)
    with mirror.locked():
        mirror.update()
        mirror.index(exclude, IndexOptions() if options is None else options, progress)
        before = mirror.digests()
        try:
            with _unsaid(mirror.folder):
                yield mirror.folder
        except EnergonError as error:
            # Who reads the message knows the dataset by its address.
            said = str(error).replace(str(mirror.folder), redact(address))
            raise type(error)(said) from error
        mirror.upload(before)


@contextmanager
def _unsaid(folder: Path) -> Iterator[None]:
    """Drop what is logged of a folder that nobody knows: all of it was said of the address."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return not isinstance(record.args, tuple) or folder not in record.args

    log.addFilter(is_of_others)
    try:
        yield
    finally:
        log.removeFilter(is_of_others)


class _Mirror:
    """A folder that stands for a remote one; kept from run to run."""

    def __init__(self, address: str) -> None:
        self.address = address
        digest = blake2b(address.encode(), digest_size=12).hexdigest()
        self._root = disk_cache().folder / "mirrors" / digest
        # The folder has the name of the dataset, which goes into messages.
        self.folder = self._root / address_name(address)
        self._notes = self._root / "versions.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for other processes of this machine that prepare the same dataset."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self._root / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def update(self) -> None:
        """Bring the folder up to what the store has."""
        found = {each.key: each for each in list_files(self.address)}
        shards = [name for name in found if name.endswith((".tar", *COMPRESSED))]
        if not shards:
            raise DatasetNotFoundError(
                f"{redact(self.address)}: there is no .tar file in this folder or below; upload "
                "shards first"
            )
        known = self._known_versions()
        versions = {name: _version(each) for name, each in found.items()}
        changed = {name for name in found if known.get(name) != versions[name]}
        for name in self._present():
            if name not in found:
                (self.folder / name).unlink()
        wanted = [
            name
            for name in found
            if (name.startswith(f"{META}/") or name.endswith(INDEX_FILES))
            and (name in changed or not (self.folder / name).exists())
        ]
        _together(self._download, wanted)
        for name in shards:
            self._stand_in(found[name])
            if name in known and name in changed:
                # Size and date may be the same, the version is not.
                part_table_path(self.folder / name).unlink(missing_ok=True)
        write_atomic(self._notes, json.dumps(versions))

    def index(self, exclude: Sequence[str], options: IndexOptions, progress: Progress) -> None:
        """Index the shards that are new or changed."""
        shards = [name for name in self._present() if name.endswith(".tar")]
        wanted = [name for name in shards if not any(re.search(each, name) for each in exclude)]
        done = read = 0

        def index_one(name: str) -> None:
            nonlocal done, read
            known = known_table(self.folder / name, checksum=options.checksum)
            if options.force or known is None:
                self._index(name, options)
                read += 1
            done += 1
            progress(done, len(wanted))

        _together(index_one, wanted)
        place = redact(self.address)
        log.info("%s: %d of %d shards were new or changed", place, read, len(wanted))

    def digests(self) -> dict[str, str]:
        """Return a digest of each file below `.nv-meta`."""
        meta = self.folder / META
        paths = list(meta.iterdir()) if meta.is_dir() else []
        return {
            path.name: blake2b(path.read_bytes()).hexdigest()
            for path in paths
            if path.is_file() and path.name != ".lock"
        }

    def upload(self, before: dict[str, str]) -> None:
        """Upload the files of `.nv-meta` that differ from what was there `before`."""
        after = self.digests()
        for name in before.keys() - after.keys():
            delete_file(join_address(self.address, f"{META}/{name}"))
        changed = [name for name, digest in after.items() if before.get(name) != digest]
        order = {name: place for place, name in enumerate(FIRST)}
        if not before.keys() & set(INFO_FILES):
            # Before they are there, nobody takes the folder for a dataset.
            order |= dict.fromkeys(INFO_FILES, len(FIRST) + 1)
        for name in sorted(changed, key=lambda name: (order.get(name, len(FIRST)), name)):
            write_bytes(join_address(self.address, f"{META}/{name}"), self.folder / META / name)

    def _present(self) -> list[str]:
        return sorted(
            os.path.relpath(os.path.join(folder, name), self.folder)
            for folder, _, names in os.walk(self.folder)
            for name in names
        )

    def _known_versions(self) -> dict[str, str | None]:
        try:
            known: dict[str, str | None] = json.loads(self._notes.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return known

    def _download(self, name: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, read_bytes(join_address(self.address, name)))

    def _stand_in(self, shard: ObjectInfo) -> None:
        """Make a file of the size and date of a shard."""
        path = self.folder / shard.key
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.truncate(shard.size)
        os.utime(path, ns=(shard.mtime_ns, shard.mtime_ns))

    def _index(self, name: str, options: IndexOptions) -> None:
        """Index a shard by ranges, and upload the result."""
        path = self.folder / name
        table = index_remote(RemoteFile(join_address(self.address, name)), path, options)
        for target, content in (
            (tar_index_path(path), encode_tar_index(table.sample_offset)),
            (part_table_path(path), table.to_bytes()),
        ):
            write_bytes(join_address(self.address, os.path.relpath(target, self.folder)), content)
            write_atomic(target, content)


def _version(found: ObjectInfo) -> str:
    """Return what differs whenever a file does; size and date where listings do not say more."""
    return found.version or f"{found.size} bytes, {found.mtime_ns}"


def _together(run: Callable[[str], None], items: Sequence[str]) -> None:
    """Call `run` for all items, in parallel; stop at the first failure."""
    threads = WaitingThreads(MAX_PARALLEL, "energon-prepare")
    running = [threads.submit(run, item) for item in items]
    try:
        for future in running:
            future.result()
    finally:
        for future in running:
            future.cancel()
        threads.close()
