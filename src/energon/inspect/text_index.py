"""Text indexes: write that of a dataset, and find the samples that may have some letters.

`energon measure --text` writes the index beside that of the dataset, for searches in
`energon view`. The index that is being written is its own journal: what it has when a run is
killed, the next one keeps. Of files that have not changed since the last time, nothing is read
again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from energon.arrays import Ints
from energon.errors import EnergonError, FormatError
from energon.formats.tables.sqlite_file import SqliteFile
from energon.formats.tables.text_index import (
    TEXT_INDEX,
    IndexedFiles,
    TextIndex,
    TextIndexWriter,
    check_sqlite,
    discard,
    index_text,
    read_files,
    recover,
    trigrams,
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
from energon.io.address import is_remote, redact
from energon.io.atomic import atomic_path
from energon.io.epath import AnyPath, any_path
from energon.messages import shell_word
from energon.prepare.engines import Engine
from energon.prepare.files import reporting
from energon.sources.files.locate import local_copy
from energon.sources.kinds import kind_named
from energon.sources.measures import NumbersFiles, beside_index
from energon.sources.source import Source, SplitSource


class _Run(NamedTuple):
    """Consecutive samples whose rows in the index are consecutive, too."""

    first_row: int
    ordinal: int
    samples: int


class SourceTexts:
    """The text index of the samples of a source. May be used by any thread.

    Args:
        source: The source.
        index: The index of its dataset.

    Raises:
        FormatError: If it was made for other data, or lacks samples.
    """

    def __init__(self, source: Any, index: TextIndex) -> None:
        self._path, self._index = source.path, index
        whole, self._excluded = source.unexcluded
        self._runs = list(self._laid_out(whole))

    def _laid_out(self, whole: Any) -> Iterator[_Run]:
        about, stamp = self._index.about, whole.index_stamp()
        if about.stamp != stamp:
            raise self._stale("the dataset has changed since")
        run, ordinal = _Run(0, 0, 0), 0
        for number, (name, count, start, stop) in enumerate(whole.file_samples()):
            if start == stop:
                continue
            file = about.files.get(name)
            if file is None or file.num_samples != count or not about.is_indexed(name, start, stop):
                raise self._stale(f"it lacks samples of {name!r}")
            if stamp is None and file.stamp != whole.file_stamp(number):
                raise self._stale(f"{name!r} has changed since")
            row = file.first_row + start
            if run.samples and row == run.first_row + run.samples:
                run = run._replace(samples=run.samples + stop - start)
            else:
                if run.samples:
                    yield run
                run = _Run(row, ordinal, stop - start)
            ordinal += stop - start
        if run.samples:
            yield run

    def candidates(self, patterns: Sequence[str], start: int) -> Iterator[int] | None:
        """Return the samples from a number on that may have all patterns, ascending.

        None if all patterns are too short for the index.
        """
        if not any(map(trigrams, patterns)):
            return None
        return (ordinal for ordinal in self._found(patterns, start) if ordinal >= start)

    def _found(self, patterns: Sequence[str], start: int) -> Iterator[int]:
        excluded: Ints = self._excluded
        for first_row, ordinal, count in self._runs:
            # Without the excluded samples, numbers are smaller.
            low = max(0, start - ordinal)
            try:
                rows = self._index.candidates(patterns, first_row + low, first_row + count)
                for row in rows:
                    number = ordinal + row - first_row
                    before = int(np.searchsorted(excluded, number))
                    if before == len(excluded) or excluded[before] != number:
                        yield number - before
            except FormatError as error:
                raise _damaged(self._path) from error

    def _stale(self, problem: str) -> FormatError:
        return _unusable(self._path, problem)


def _damaged(path: AnyPath) -> FormatError:
    return _unusable(path, "it is damaged", " with --again")


def _unusable(path: AnyPath, problem: str, option: str = "") -> FormatError:
    where = redact(os.fspath(path))
    return FormatError(
        f"the text index of {where} cannot be used: {problem}; run `energon measure "
        f"{shell_word(where)} --text`{option}"
    )


def stored_texts(path: AnyPath | str) -> SqliteFile | None:
    """Return the text index of a dataset, that of a remote one copied here; None if none."""
    address = beside_index(path, TEXT_INDEX)
    file = any_path(address)
    if not file.is_file():
        return None
    return local_copy(file)


def open_texts(source: Source) -> SourceTexts | None:
    """Return the text index of the samples of a source; None if there is none.

    Raises:
        ConfigError: If SQLite cannot read it.
        FormatError: If it is damaged, or was made for other data.
    """
    if not isinstance(source, NumbersFiles) or not isinstance(source, SplitSource):
        return None
    file = stored_texts(source.path)
    if file is None:
        return None
    try:
        index = TextIndex(file)
    except FormatError as error:
        raise _damaged(source.path) from error
    return SourceTexts(source, index)


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
