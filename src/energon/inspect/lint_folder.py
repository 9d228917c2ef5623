"""Decode the files of a folder, and say which fail and why. Runs in worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import EmptyDatasetError, EnergonError, SecurityError
from energon.formats.meta.info import META
from energon.inspect.lint_batch import DIED, BatchReport, Finding, decode_wholly, spread
from energon.io.address import redact
from energon.io.files import list_files
from energon.prepare.crash_isolation import IsolatedCall, note
from energon.sources.files.folder import SystemFileStore

SPLIT = "files"
"""Stands for the split where there is none."""
BATCH_FILES = 64


def folder_jobs(folder: str, max_files: int | None, allow: tuple[str, ...]) -> list[IsolatedCall]:
    """Return what is to be looked at in a folder, here or in an object store.

    Args:
        folder: Where it is.
        max_files: How many files, spread over all; None for all.
        allow: What the user allows.

    Raises:
        DatasetNotFoundError: If there is no such folder.
        EmptyDatasetError: If it has no files.
    """
    SystemFileStore(folder)
    names = [found.key for found in list_files(folder) if not found.key.startswith(f"{META}/")]
    if not names:
        raise EmptyDatasetError(f"{redact(folder)}: has no files")
    names = [names[place] for place in spread(len(names), max_files)]
    return [
        IsolatedCall(
            number, (folder, start, tuple(names[start : start + BATCH_FILES]), allow), ordinals
        )
        for number, start in enumerate(range(0, len(names), BATCH_FILES))
        if (ordinals := range(start, min(len(names), start + BATCH_FILES)))
    ]


def lint_files(
    folder: str, start: int, names: Sequence[str], allow: tuple[str, ...], ordinals: Sequence[int]
) -> BatchReport:
    """Decode some files.

    Args:
        folder: Where they are.
        start: Number of the first of `names`.
        names: Their paths below it.
        allow: What the user allows.
        ordinals: Numbers of files.
    """
    unchecked: dict[str, int] = {}
    store, decoder = SystemFileStore(folder), SampleDecoder("rgb8", allow=allow)

    def look(name: str) -> Iterator[Finding]:
        try:
            decode_wholly(decoder, name, store.get_raw(name)[0])
        except SecurityError:
            extension = name.rpartition(".")[2]
            unchecked[extension] = unchecked.get(extension, 0) + 1
        except (EnergonError, ImportError, MemoryError) as error:
            reason = str(error) if isinstance(error, EnergonError) else repr(error)
            yield _finding(folder, name, reason)

    findings: list[Finding] = []
    for ordinal in ordinals:
        note(ordinal)
        findings += look(names[ordinal - start])
    return BatchReport(ordinals[0], len(ordinals), tuple(findings), tuple(unchecked.items()))


def report_file_death(
    folder: str, start: int, names: Sequence[str], allow: tuple[str, ...], ordinal: int
) -> BatchReport:
    """Return the report on a file whose decoding has ended the process."""
    return BatchReport(ordinal, 1, (_finding(folder, names[ordinal - start], DIED),))


def _finding(folder: str, name: str, reason: str) -> Finding:
    return Finding(redact(folder), SPLIT, reason, key=name)
