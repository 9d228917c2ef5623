"""Index the texts of the samples of some datasets, for searches in `energon view`.

The index that is being written is its own journal: what it has when a run is killed, the next one
keeps. Of files that have not changed since the last time, nothing is read again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from energon.arrays import Ints
from energon.errors import EnergonError, FormatError
from energon.formats.tables.sqlite_file import SqliteFile
from energon.formats.tables.text_index import (
    TEXT_INDEX,
    IndexedFiles,
    TextIndexWriter,
    check_sqlite,
    discard,
    index_text,
    read_files,
    recover,
)
from energon.inspect.measure import (
    READ_TOGETHER,
    MeasuredDataset,
    MeasureReport,
    Progress,
    SampleRange,
    measure_failed,
    run_measure,
)
from energon.inspect.where import texts_of
from energon.io.address import is_remote
from energon.io.atomic import atomic_path
from energon.prepare.engines import Engine
from energon.prepare.files import reporting
from energon.sources.kinds import kind_named
from energon.sources.text_index import stored_texts


def index_texts(
    path: str | os.PathLike[str],
    *,
    again: bool = False,
    engine: Engine | None = None,
    wait: bool = False,
    allow: Collection[str] = (),
    progress: Progress = lambda done, total: None,
) -> list[MeasureReport]:
    """Index the texts of a dataset, or of each dataset of a metadataset.

    Args:
        path: Where it is.
        again: Whether to index again the samples that are indexed.
        engine: Where to read samples; None for processes of this machine.
        wait: Whether to wait for another process that writes the dataset.
        allow: What datasets may do, see `energon.allow`.
        progress: Called with the number of finished samples, and the total.

    Raises:
        DatasetNotFoundError: If there is no dataset.
        ConfigError: If a dataset cannot be indexed, or SQLite has no index of trigrams.
        DatasetBusyError: If another process writes the dataset.
        SampleError: If a sample cannot be read.
    """
    check_sqlite()
    return run_measure(
        path,
        TEXT_INDEX,
        lambda dataset, file: _TextStore(dataset, file, again=again),
        read_texts,
        engine=engine,
        wait=wait,
        allow=allow,
        progress=progress,
    )


def read_texts(source: Any, kind: str, ordinals: Ints) -> list[str]:
    """Return the texts of samples as they are indexed."""
    contents = kind_named(kind, os.fspath(source.path)).contents(source)
    found = []
    for start in range(0, len(ordinals), READ_TOGETHER):
        own = ordinals[start : start + READ_TOGETHER].tolist()
        contents.read_ahead(own)
        for ordinal in own:
            where = source.locate(ordinal)
            try:
                texts = texts_of(contents.files(ordinal), where.key)
                found.append("\n".join(map(index_text, texts)))
            except EnergonError as error:
                what = "reading the texts"
                raise measure_failed(source, where.shard, where.key, what, error) from error
    return found


class _TextStore:
    """The text index of a dataset.

    Args:
        dataset: The dataset.
        path: Where the index is until it is complete.
        again: Whether to index again what is indexed.
    """

    def __init__(self, dataset: MeasuredDataset, path: Path, *, again: bool) -> None:
        self._dataset, self._path = dataset, path
        self._old: SqliteFile | None = None
        self._writer: TextIndexWriter | None = None
        self._about = IndexedFiles() if again else self._continued()
        if again:
            discard(path)

    def _continued(self) -> IndexedFiles:
        """Return the files of the index of a run that was killed, or else of the complete one."""
        if self._path.exists():
            try:
                return recover(self._path)
            except FormatError:
                discard(self._path)
        try:
            old = stored_texts(self._dataset.address)
            about = IndexedFiles() if old is None else read_files(old)
        except FormatError:
            return IndexedFiles()  # it is replaced
        if about.is_sparse:
            return IndexedFiles()
        self._old = old
        return about

    def is_measured(self, piece: SampleRange) -> bool:
        """Return whether all samples of a piece are indexed."""
        file, known = self._dataset.files[piece.file], self._about.files.get(piece.file)
        if known is None or known[:2] != file:
            return False
        return self._about.is_indexed(piece.file, piece.start, piece.stop)

    def add(self, piece: SampleRange, results: list[str]) -> None:
        """Index the texts of a piece."""
        with reporting(self._path):
            self._opened().add(piece.file, piece.start, results)

    def _opened(self) -> TextIndexWriter:
        if self._writer is None:
            if self._old is not None:
                self._copy(self._old, self._path)
            self._writer = TextIndexWriter(self._path, self._about)
            self._writer.number(self._dataset.files)
        return self._writer

    def write(self) -> None:
        """Complete the index and put it beside that of the dataset, unless nothing has changed."""
        dataset, about = self._dataset, self._about
        is_same = about.stamp == dataset.index and about.files.keys() == dataset.files.keys()
        if is_same and not self._path.exists():
            return
        with reporting(self._path):
            self._opened().finish(dataset.index, dataset.files)
        self._writer = None
        if is_remote(dataset.target):
            dataset.upload(self._path)
        else:
            self._copy(self._path, Path(dataset.target))
            discard(self._path)

    def _copy(self, file: SqliteFile, target: Path) -> None:
        with reporting(target), atomic_path(target) as temporary:
            if isinstance(file, bytes):
                Path(temporary).write_bytes(file)
            else:
                shutil.copyfile(file, temporary)

    def close(self) -> None:
        """Close the index; if it is not complete, the next run continues it."""
        if self._writer is not None:
            self._writer.close()
