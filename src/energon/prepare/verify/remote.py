"""Check and repair datasets in stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from energon.errors import DatasetNotFoundError, FormatError, ObjectChangedError
from energon.formats.meta.info import INFO_FILES, META, load_info
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.part_table_file import part_table_path
from energon.formats.tar.scan import tar_index_path
from energon.io.address import join_address, redact
from energon.io.atomic import temporary_folder, write_atomic
from energon.io.backends.base import ObjectInfo
from energon.io.files import file_info, list_files, open_store, read_bytes
from energon.io.threads import run_in_threads
from energon.prepare.engines import Engine
from energon.prepare.files import FileState
from energon.prepare.index.index import IndexOptions, ShardFile
from energon.prepare.remote import MAX_PARALLEL_COPIES, Mirror, Progress
from energon.prepare.upkeep import Report
from energon.prepare.verify.shard import (
    Depth,
    Problem,
    ShardReport,
    missing_shard,
    verify_shard,
)
from energon.prepare.verify.verify import FolderCheck

DOCUMENTS = ("index.uuid", "index.sqlite", "split.yaml", "split.json", "dataset.yaml")
"""Files that may exist below `.nv-meta`, if they cannot be listed."""


class RemoteCheck(FolderCheck):
    """The check of a dataset in a store, whose folder is an up-to-date mirror of it.

    Args:
        mirror: The mirror.
        scratch: A folder for the headers of shards.
        depth: How much to read.
        engine: How many shards are read at the same time.
        progress: Called with the number of finished shards, and the total.
    """

    def __init__(
        self, mirror: Mirror, scratch: Path, depth: Depth, engine: Engine, progress: Progress
    ) -> None:
        super().__init__(mirror.folder, depth, engine, progress)
        self.mirror = mirror
        self._scratch = scratch
        self._reports: dict[str, ShardReport] = {}
        self._scanned: dict[str, FileState] = {}

    @classmethod
    @contextmanager
    def opened(
        cls, address: str, depth: Depth, engine: Engine, progress: Progress
    ) -> Iterator[RemoteCheck]:
        """Yield a check with a mirror that no other process uses meanwhile."""
        mirror = Mirror(address)
        with mirror.locked(), temporary_folder("verify") as scratch:
            mirror.fill(lambda: mirror.update(_present(address), trusting=False))
            with mirror.hidden():
                yield cls(mirror, scratch, depth, engine, progress)

    def run(self) -> Report:
        """Compare the shards without a report, and everything else; return the problems."""
        report = super().run()
        report.rename(redact(self.mirror.address), self.mirror.said)
        return report

    def reindex(self, stale: Sequence[str], shards: Sequence[str], options: IndexOptions) -> None:
        """Index shards again, and upload their indexes; see `FolderCheck.reindex`.

        Shards are read once: their headers, which the check has read, become their index.
        """
        for name in stale:
            if name in self._scanned and self._saved(name).exists() and not options.checksum:
                table = PartTable.open(self._saved(name))
                self.mirror.save_index(self._scanned[name], name, table)
            else:
                part_table_path(self.folder / name).unlink(missing_ok=True)
            self._saved(name).unlink(missing_ok=True)
        self.mirror.index(shards, options)
        for name in shards:
            report = verify_shard(self.folder, name, "quick")
            if name not in stale:
                before = self._reports[name]
                report = before._replace(indexed=report.indexed, has_other_date=False)
            self._reports[name] = report

    def compare(self, shards: list[str]) -> Iterator[ShardReport]:
        done = 0

        def compare_one(name: str) -> None:
            nonlocal done
            self._reports[name] = self._verify(name)
            done += 1
            self.progress(done, len(shards))

        left = [name for name in shards if name not in self._reports]
        count = max(1, min(self.engine.num_workers, MAX_PARALLEL_COPIES))
        run_in_threads(compare_one, left, count=count)
        return (self._reports[name] for name in shards)

    def open_table(self, name: str) -> PartTable:
        try:
            return PartTable.open(part_table_path(self.folder / name))
        except (FileNotFoundError, FormatError):
            return PartTable.open(self._saved(name))

    def _verify(self, name: str) -> ShardReport:
        """Compare a shard with its index."""
        address = join_address(self.mirror.address, name)
        if self.depth == "quick":
            return verify_shard(self.folder, name, self.depth)
        try:
            shard = ShardFile(address)
            report = verify_shard(self.folder, name, self.depth, shard)
        except DatasetNotFoundError:
            return ShardReport([missing_shard(redact(address), name)], None)
        except ObjectChangedError:
            message = f"{redact(address)}: was replaced while it was checked; check it again"
            return ShardReport([Problem("index-stale", name, message, True, name)], None)
        self._scanned[name] = shard.state()
        if report.problems and report.found is not None:
            write_atomic(self._saved(name), report.found.to_bytes())
        return report._replace(found=None)

    def _saved(self, name: str) -> Path:
        path = self._scratch / f"{name}.found"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _present(address: str) -> list[ObjectInfo]:
    """Return all files of a dataset, or those it may have if they cannot be listed."""
    store, _ = open_store(address)
    if store.backend.can_list:
        return list_files(address)
    with temporary_folder("verify") as folder:
        infos = [f"{META}/{name}" for name in INFO_FILES]
        for name in infos:
            if file_info(join_address(address, name)) is not None:
                (folder / META).mkdir()
                (folder / name).write_bytes(read_bytes(join_address(address, name)))
                break
        else:
            return []
        try:
            shards = list(load_info(folder).shard_counts)
        except FormatError:
            shards = []  # the check reports it
    names = [*infos, *(f"{META}/{name}" for name in DOCUMENTS)]
    for shard in shards:
        names += [shard, str(tar_index_path(shard)), str(part_table_path(shard))]
    asked = [(name, join_address(address, name)) for name in names]

    def ask(name: str, place: str) -> ObjectInfo | None:
        found = file_info(place)
        return None if found is None else found._replace(key=name)

    return [found for found in store.together(ask, asked) if found is not None]
