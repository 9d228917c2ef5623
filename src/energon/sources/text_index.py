"""Which samples of a dataset may have some letters in their texts, by its text index.

`energon measure --text` writes the index beside that of the dataset.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from energon.arrays import Ints
from energon.errors import FormatError
from energon.formats.tables.sqlite_file import SqliteFile
from energon.formats.tables.text_index import TEXT_INDEX, TextIndex, trigrams
from energon.io.address import redact
from energon.io.epath import AnyPath, any_path
from energon.messages import shell_word
from energon.sources.files.locate import local_copy
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
