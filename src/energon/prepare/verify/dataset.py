"""Check and repair a dataset of any kind, on this machine or in a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EnergonError,
    FormatError,
    ObjectChangedError,
)
from energon.formats.meta.info import (
    INFO_FILES,
    META,
    DatasetInfo,
    excludes_any,
    load_info,
    load_split,
)
from energon.formats.tables.part_table import PartTable, part_table_path
from energon.formats.tar.scan import tar_index_path
from energon.io.address import is_remote, join_address, local_path, redact
from energon.io.atomic import temporary_folder, write_atomic
from energon.io.backends.base import ObjectInfo
from energon.io.files import file_info, list_files, open_store, read_bytes
from energon.io.threads import run_in_threads
from energon.prepare.dataset import Indexing, dataset_locked, index_dataset
from energon.prepare.engines import Engine, Progress, no_progress
from energon.prepare.files import FileState, clear_leftovers
from energon.prepare.index import IndexOptions, ShardFile, sqlite_path
from energon.prepare.remote import MAX_PARALLEL_COPIES, Mirror, check_writable
from energon.prepare.splits import named_split
from energon.prepare.verify.quarantine import QuarantineEntry, entries_without, write_quarantine
from energon.prepare.verify.verify import (
    LOST,
    Depth,
    FolderCheck,
    Problem,
    Repair,
    Report,
    ShardReport,
    missing_shard,
    upkeep_of,
    verify_shard,
)

BAD_SQLITE = ("sqlite-damaged", "sqlite-stale")


def repair_folder(
    check: FolderCheck, *, drop: bool, quarantine: str | Path | None, indexing: Indexing
) -> Repair:
    """Check a folder of shards and rewrite what is wrong in its index, see `repair_dataset`."""
    dataset = check.folder
    before = check.run()
    lost = _shards_with(before, lambda problem: problem.kind in LOST)
    if quarantine is not None:
        # A killed run may already have dropped shards, which are then only in the file.
        present = load_info(dataset).shard_counts
        write_lost(quarantine, before, dropped=entries_without(quarantine, present) if drop else ())
    repairable = _shards_with(before, lambda problem: problem.repairable)
    stale = [name for name in repairable if name not in lost]
    dropped = lost if drop else []
    options = IndexOptions(indexing.checksum)
    if (indexing.after_kill or not before.ok) and (drop or not lost):
        shards = [name for name in load_info(dataset).shard_counts if name not in dropped]
        if not shards:
            raise ConfigError(
                f"{dataset}: no shard would be left; restore the shards, or delete the dataset"
            )
        check.reindex(stale, shards, options)
        bad_sqlite = any(problem.kind in BAD_SQLITE for problem in before.problems)
        rewrite_sqlite = bad_sqlite or bool(stale)

        def documents(info: DatasetInfo) -> Iterator[tuple[str, str]]:
            return _splits_without(dataset, dropped) if dropped else iter(())

        has_sqlite = indexing.sqlite and sqlite_path(dataset).exists()
        settings = replace(indexing, sqlite=has_sqlite)
        index_dataset(dataset, shards, settings, documents, rewrite_sqlite=rewrite_sqlite)
    elif stale:
        check.reindex(stale, stale, options)
    changed = dropped or any(problem.repairable for problem in before.problems)
    return Repair(before, check.run() if changed else before, stale, dropped)


def _shards_with(report: Report, applies: Callable[[Problem], bool]) -> list[str]:
    """Return the shards that have a problem to which a condition applies."""
    shards = (problem.shard for problem in report.problems if applies(problem))
    return list(dict.fromkeys(shard for shard in shards if shard is not None))


def write_lost(path: str | Path, *reports: Report, dropped: Iterable[QuarantineEntry] = ()) -> None:
    """List lost shards and samples in a quarantine file, after those `dropped`."""
    entries = list(dropped)
    for report in reports:
        for problem in report.problems:
            if problem.shard and (problem.kind in LOST or problem.kind == "content-damaged"):
                entries += [
                    QuarantineEntry(report.dataset, problem.shard, key, problem.message)
                    for key in problem.keys or [problem.key]
                ]
    write_quarantine(path, entries)


def _splits_without(dataset: Path, dropped: Sequence[str]) -> Iterator[tuple[str, str]]:
    try:
        split = load_split(dataset)
    except EnergonError:
        return
    parts = {
        name: [shard for shard in split.shards(name) if shard not in dropped]
        for name in split.split_parts
    }
    ranges = {
        name: {shard: numbers for shard, numbers in shards.items() if shard not in dropped}
        for name, shards in split.sample_ranges.items()
    }
    kept = load_info(dataset).shard_counts.keys() - set(dropped)
    exclude = [
        entry
        for entry in split.exclude
        if excludes_any(entry, kept) or not excludes_any(entry, dropped)
    ]
    remaining = named_split(parts, exclude, {k: v for k, v in ranges.items() if v})
    is_yaml = (dataset / META / "split.yaml").exists()
    yield Path(split.origin).name if is_yaml else "split.yaml", remaining.to_yaml()


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
        report.rename(redact(self.mirror.address))
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

        unread = [name for name in shards if name not in self._reports]
        count = min(self.engine.num_workers, MAX_PARALLEL_COPIES)
        run_in_threads(compare_one, unread, count=count)
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
        if report.problems and report.headers is not None:
            write_atomic(self._saved(name), report.headers.to_bytes())
        return report._replace(headers=None)

    def _saved(self, name: str) -> Path:
        path = self._scratch / f"{name}.headers"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _present(address: str) -> list[ObjectInfo]:
    """Return all files of a dataset, or those it may have if they cannot be listed."""
    store, _ = open_store(address)
    if store.backend.can_list:
        return list_files(address)
    with temporary_folder("verify") as folder:
        lists = [f"{META}/{name}" for name in INFO_FILES]
        for name in lists:
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
    names = [*lists, *(f"{META}/{name}" for name in DOCUMENTS)]
    for shard in shards:
        names += [shard, str(tar_index_path(shard)), str(part_table_path(shard))]
    infos = store.together(file_info, [(join_address(address, name),) for name in names])
    return [
        info._replace(key=name) for name, info in zip(names, infos, strict=True) if info is not None
    ]


def verify_dataset(
    path: str | os.PathLike[str],
    *,
    depth: Depth = "headers",
    engine: Engine | None = None,
    progress: Progress = no_progress,
) -> Report:
    """Check a prepared dataset, and return its problems. Changes nothing.

    Args:
        path: Its folder, or a file that is a dataset; a path or an address.
        depth: How much to read, see `energon.prepare.verify.verify.verify_shard`.
        engine: Where to read.
        progress: Called with the number of finished shards, and the total.

    Raises:
        DatasetNotFoundError: If there is no prepared dataset.
        ConfigError: If there is no such depth, or a cluster is to read shards in a store.
        StorageError: If a store cannot be read.
    """
    address, engine = _address(path), engine or Engine()
    upkeep = upkeep_of(address)
    if upkeep is not None:
        return upkeep.verify(address, depth)
    if not is_remote(address):
        return FolderCheck(Path(address), depth, engine, progress).run()
    _refuse_cluster(address, engine)
    with RemoteCheck.opened(address, depth, engine, progress) as check:
        return check.run()


def repair_dataset(
    path: str | os.PathLike[str],
    *,
    depth: Depth = "headers",
    drop: bool = False,
    quarantine: str | Path | None = None,
    indexing: Indexing,
) -> Repair:
    """Check a dataset and rewrite what is wrong in its index. Shards are not touched.

    Args:
        path: Its folder, or a file that is a dataset; a path or an address.
        depth: How much to check, see `verify_dataset`.
        drop: Whether to remove missing, truncated or damaged shards from the dataset. For a dataset
            without shards, this only adds a note that it had no effect.
        quarantine: A file in which to list lost shards and samples, for `energon prepare
            --exclude-from`.
        indexing: How shards are indexed.

    Raises:
        DatasetNotFoundError: If there is no prepared dataset.
        DatasetBusyError: If another process prepares it.
        ConfigError: If no shard would be left, the place is not writable, or a cluster is to
            read shards in a store.
        StorageError: If a store cannot be read or written.
    """
    address = _address(path)
    if is_remote(address):
        check_writable(
            address,
            "repair the dataset where it was uploaded from, or through the address of the object "
            "store",
        )
    upkeep = upkeep_of(address)
    if upkeep is not None:
        done = upkeep.repair(address, depth)
        if quarantine is not None:
            write_lost(quarantine, done.after)
        if drop:
            note = f"--drop had no effect: {redact(address)} is {upkeep.noun}, without shards"
            after = replace(done.after, notes=[*done.after.notes, note])
            done = done._replace(after=after)
        return done
    with _locked_check(address, depth, indexing) as (check, held):
        return repair_folder(check, drop=drop, quarantine=quarantine, indexing=held)


@contextmanager
def _locked_check(
    address: str, depth: Depth, indexing: Indexing
) -> Iterator[tuple[FolderCheck, Indexing]]:
    """Yield the check of a dataset that is locked meanwhile, and the settings for its repair."""
    engine, progress = indexing.engine, indexing.progress
    if is_remote(address):
        _refuse_cluster(address, engine)
        with RemoteCheck.opened(address, depth, engine, progress) as remote:
            load_info(remote.folder)
            with remote.mirror.changing():
                yield remote, indexing
        return
    dataset = Path(address)
    load_info(dataset)
    with dataset_locked(dataset, indexing) as held:
        clear_leftovers(dataset, load_info(dataset).shard_counts)
        yield FolderCheck(dataset, depth, engine, progress), held


def _address(path: str | os.PathLike[str]) -> str:
    address = os.fspath(path)
    return address if is_remote(address) else local_path(address)


def _refuse_cluster(address: str, engine: Engine) -> None:
    """Refuse a cluster for shards in a store, which this machine reads in any case."""
    if engine.name != "local":
        raise ConfigError(
            f"{redact(address)}: shards in stores are read by this machine, several at a time; "
            f"drop --engine {engine.name}"
        )
