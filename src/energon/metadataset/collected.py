"""Go on behind a problem, so that a call names all that is wrong and not only the first of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from energon.errors import ConfigError, DatasetNotFoundError, FormatError
from energon.metadataset.document import BrokenMetadataset, paths_in
from energon.metadataset.inherit import absolute
from energon.metadataset.kind import dataset_kind

_PLACE = re.compile(r"(.+?):(\d+):(\d+): ")


class Problems:
    """What was found on the way through documents."""

    def __init__(self) -> None:
        self._found: list[Exception] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a problem that is raised in here, instead of raising it."""
        try:
            yield
        except (ConfigError, DatasetNotFoundError, FormatError) as exc:
            self._found.append(exc)

    def keep_broken(self, document: BrokenMetadataset, split_part: str) -> None:
        """Keep what is wrong with a document, and which paths in a split of it lead nowhere."""
        self._found.append(ConfigError(document.message))
        for place, path in paths_in(document.raw, split_part):
            try:
                dataset_kind(absolute(path, document.folder))
            except (ConfigError, DatasetNotFoundError) as exc:
                self._found.append(DatasetNotFoundError(f"{place}: {exc}"))

    def raise_all(self) -> None:
        """Raise what was found, if anything, as one error.

        Raises:
            ConfigError: If problems are of several kinds; else, of that kind.
        """
        if not self._found:
            return
        if len(self._found) == 1:
            raise self._found[0]
        kinds = {type(problem) for problem in self._found}
        kind = kinds.pop() if len(kinds) == 1 else ConfigError
        lines = [line for problem in self._found for line in str(problem).splitlines()]
        raise kind("\n".join(_in_order(dict.fromkeys(lines))))


def _in_order(lines: Iterable[str]) -> list[str]:
    """Return lines by where they point to in each file, the files as they were come upon."""
    files: dict[str, int] = {}

    def place(line: str) -> tuple[int, ...]:
        match = _PLACE.match(line)
        if match is None:
            return (len(files),)
        file, row, column = match.groups()
        return files.setdefault(file, len(files)), int(row), int(column)

    places = {line: place(line) for line in lines}
    return sorted(places, key=places.__getitem__)
