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
from energon.prepare.dataset import Indexing
from energon.prepare.index.index import IndexOptions
from energon.prepare.remote import (
    MAX_PARALLEL_COPIES,
    Mirror,
    Progress,
)
from energon.prepare.upkeep import Repair, Report
from energon.prepare.verify.repair import repair_at
from energon.prepare.verify.shard import (
    Depth,
    Problem,
    RemoteShard,
    ShardReport,
    missing_shard,
    verify_shard,
)
from energon.prepare.verify.verify import check_dataset

DOCUMENTS = ("index.uuid", "index.sqlite", "split.yaml", "split.json", "dataset.yaml")
"""Files that may exist below `.nv-meta`, if they cannot be listed."""


def verify_remote(address: str, *, depth: Depth, num_workers: int, progress: Progress) -> Report:
    """Check a folder of shards in a store, see `verify_dataset`.

    Args:
        address: The folder.
        depth: How much to read.
        num_workers: How many shards are read at the same time.
        progress: Called with the number of finished shards, and the total.
    """
    with RemoteCheck.opened(address, depth, num_workers, progress) as check:
        return check.run()


class RemoteCheck:
    """The check of a remote dataset, which can be repeated after some shards were indexed.

    Args:
        mirror: An up-to-date mirror of the dataset.
        depth: How much to read.
        scratch: A folder for what is found in shards.
        num_workers: How many shards are read at the same time.
        progress: Called with the number of finished shards, and the total.
    """

    def __init__(
        self, mirror: Mirror, depth: Depth, scratch: Path, num_workers: int, progress: Progress
    ) -> None:
        self.mirror = mirror
        self.depth = depth
        self._scratch = scratch
        self._count = max(1, min(num_workers, MAX_PARALLEL_COPIES))
        self._progress = progress
        self._reports: dict[str, ShardReport] = {}
        self._scanned: dict[str, ObjectInfo] = {}

    @classmethod
    @contextmanager
    def opened(
        cls, address: str, depth: Depth, num_workers: int, progress: Progress
    ) -> Iterator[RemoteCheck]:
        """Yield a check with a mirror that no one else uses meanwhile."""
        mirror = Mirror(address)
        with mirror.locked(), temporary_folder("verify") as scratch:
            mirror.fill(lambda: mirror.update(_present(address), trusting=False))
            with mirror.hidden():
                yield cls(mirror, depth, scratch, num_workers, progress)

    def run(self) -> Report:
        """Compare the shards without a report, and everything else; return the problems."""
        report = check_dataset(self.mirror.folder, self.depth, self._compare, self._open_table)
        report.rename(redact(self.mirror.address), self.mirror.said)
        return report

    def found(self, name: str) -> tuple[ObjectInfo, PartTable] | None:
        """Return the version of a shard whose headers were read, and their content."""
        if name not in self._scanned or not self._saved(name).exists():
            return None
        return self._scanned[name], PartTable.open(self._saved(name))

    def indexed_again(self, stale: Sequence[str], shards: Sequence[str]) -> None:
        """Record that shards have a different index now, so that none of them is read again.

        Args:
            stale: Shards whose index was wrong.
            shards: All shards whose index records when they were written.
        """
        for name in stale:
            self._saved(name).unlink(missing_ok=True)
        for name in shards:
            report = verify_shard(self.mirror.folder, name, "quick")
            if name not in stale:
                before = self._reports[name]
                report = before._replace(indexed=report.indexed, has_other_date=False)
            self._reports[name] = report

    def _compare(self, shards: list[str]) -> Iterator[ShardReport]:
        done = 0

        def compare_one(name: str) -> None:
            nonlocal done
            self._reports[name] = self._verify(name)
            done += 1
            self._progress(done, len(shards))

        left = [name for name in shards if name not in self._reports]
        run_in_threads(compare_one, left, count=self._count)
        return (self._reports[name] for name in shards)

    def _verify(self, name: str) -> ShardReport:
        """Compare a shard with its index."""
        folder, address = self.mirror.folder, join_address(self.mirror.address, name)
        if self.depth == "quick":
            return verify_shard(folder, name, self.depth)
        try:
            shard = RemoteShard(address)
            report = verify_shard(folder, name, self.depth, shard)
        except DatasetNotFoundError:
            return ShardReport([missing_shard(redact(address), name)], None)
        except ObjectChangedError:
            message = f"{redact(address)}: was replaced while it was checked; check it again"
            return ShardReport([Problem("index-stale", name, message, True, name)], None)
        self._scanned[name] = shard.file.info
        if report.problems and report.found is not None:
            write_atomic(self._saved(name), report.found.to_bytes())
        return report._replace(found=None)

    def _saved(self, name: str) -> Path:
        path = self._scratch / f"{name}.found"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _open_table(self, name: str) -> PartTable:
        """Return the table of a shard: the one next to it, or else what was found in the shard."""
        try:
            return PartTable.open(part_table_path(self.mirror.folder / name))
        except (FileNotFoundError, FormatError):
            return PartTable.open(self._saved(name))


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


def repair_remote(
    address: str,
    *,
    depth: Depth,
    drop: bool,
    quarantine: str | Path | None,
    indexing: Indexing,
) -> Repair:
    """Repair the index of a folder of shards in a store, see `repair_dataset`.

    Shards are read once: what the check found in them becomes their index. The index of each shard
    is uploaded at once, the files of `.nv-meta` at the end, each as a whole.
    """
    workers = indexing.engine.num_workers
    with RemoteCheck.opened(address, depth, workers, indexing.progress) as check:
        load_info(check.mirror.folder)
        place = _RemoteRepair(check, indexing)
        with check.mirror.changing():
            return repair_at(place, drop=drop, quarantine=quarantine, indexing=indexing)


class _RemoteRepair:
    """A dataset in a store.

    Args:
        check: Compares it with its index.
        indexing: How shards are indexed.
    """

    def __init__(self, check: RemoteCheck, indexing: Indexing) -> None:
        self.folder = check.mirror.folder
        self._check = check
        self._options = IndexOptions(indexing.checksum)

    def verify(self) -> Report:
        return self._check.run()

    def index_some(self, stale: Sequence[str]) -> None:
        self._index(stale, stale)

    def before_all(self, stale: Sequence[str], shards: Sequence[str]) -> None:
        self._index(stale, shards)

    def _index(self, stale: Sequence[str], shards: Sequence[str]) -> None:
        """Make sure that all `shards` have an index, and `stale` ones a new one."""
        mirror = self._check.mirror
        for name in stale:
            found = None if self._options.checksum else self._check.found(name)
            if found is not None:
                mirror.save_index(found[0], name, found[1])
            else:
                part_table_path(mirror.folder / name).unlink(missing_ok=True)
        mirror.index(shards, self._options)
        self._check.indexed_again(stale, shards)
