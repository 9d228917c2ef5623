"""Tokenize the texts of JSON lines and Parquet files, and write them as token files.

The files are cut into ranges: runs of lines of about 32 MiB, or of row groups. Each range is
tokenized separately, in any process, and its tokens go to a separate file in `x.tokens-partial`,
so finished ranges of an interrupted run are not repeated. At the end they are concatenated in the
order of the data, whichever was finished first.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from energon.arguments import load_named
from energon.errors import ConfigError, DatasetBusyError, EnergonError, FormatError, needs_extra
from energon.formats.parquet import python_rows
from energon.formats.text import parse_json
from energon.formats.tokens import (
    DATA,
    TOKEN_INDEX,
    token_dtype,
    token_index_bytes,
    token_prefix,
)
from energon.io.atomic import FileLock, atomic_path, write_atomic
from energon.limits import document_lines
from energon.messages import describe_error, type_in_words
from energon.metadataset.kind import LINES, table_suffix
from energon.prepare.engines import Engine, run_batches
from energon.prepare.files import file_state, reporting, reporting_full_disks
from energon.prepare.importers.files import Table, read_rows
from energon.prepare.importers.row import RowRules
from energon.prepare.importers.selection import select

RANGE_BYTES = 32 << 20
PARTIAL = ".tokens-partial"
SETTINGS = "settings.json"
COPIED_BYTES = 8 << 20


@dataclass(frozen=True)
class TokenizeOptions:
    """How texts become tokens.

    Args:
        tokenizer: `module:function`; the function takes a text and returns numbers of 0 or more.
        text_column: The column or field with the texts.
        end_token: Ends each document, if given.
        vocabulary_size: Exclusive upper limit of tokens; below 65,500 they take two bytes, else
            four.

    Raises:
        ConfigError: If they are invalid.
    """

    tokenizer: str
    text_column: str = "text"
    end_token: int | None = None
    vocabulary_size: int | None = None

    def __post_init__(self) -> None:
        module, _, function = self.tokenizer.partition(":")
        if not module or not function:
            raise ConfigError(f"--tokenizer {self.tokenizer}: expected MODULE:FUNCTION")
        limit = self.limit
        if self.end_token is not None and not 0 <= self.end_token < limit:
            raise ConfigError(f"--end-token {self.end_token}: expected a number below {limit}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the tokens in the file."""
        return token_dtype(self.vocabulary_size)

    @property
    def limit(self) -> int:
        """Exclusive upper limit of tokens."""
        return self.vocabulary_size or int(np.iinfo(self.dtype).max) + 1


class Written(NamedTuple):
    """What was written."""

    num_documents: int
    num_tokens: int


class _Range(NamedTuple):
    """A part of a file that is tokenized separately: bytes of lines, or row groups."""

    path: str
    start: int
    stop: int


def pack_tokens(
    sources: Sequence[str],
    target: str | os.PathLike[str],
    options: TokenizeOptions,
    *,
    engine: Engine | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda documents: None,
) -> Written:
    """Write the texts of files as a pair of token files.

    An interrupted run continues where it stopped when repeated with the same arguments.

    Args:
        sources: JSON lines, compressed or not, or Parquet files on this machine; patterns, or a
            folder of them.
        target: The `.idx` or `.bin` file, or the common part of the two names.
        options: How texts become tokens.
        engine: Where to tokenize; None for processes of this machine.
        overwrite: Whether to replace existing files, and what an interrupted run left behind.
        progress: Called with the number of tokenized documents.

    Raises:
        ConfigError: If the files already exist, or the tokenizer is invalid.
        FormatError: If a file is damaged, or a row has no text.
        StorageFullError: If the disk is full.
    """
    prefix = Path(token_prefix(os.fspath(target)))
    partial = prefix.with_name(prefix.name + PARTIAL)
    _tokenizer(options.tokenizer)  # report a misspelled name at once
    ranges = [part for path in _files(sources) for part in _ranges(path)]
    settings = {
        "options": asdict(options),
        "files": {part.path: file_state(part.path) for part in ranges},
        "range_bytes": RANGE_BYTES,
    }
    with reporting(partial):
        partial.mkdir(parents=True, exist_ok=True)
        lock = FileLock(partial / "lock")
    with reporting_full_disks(partial), lock:
        if not lock.hold(wait=False):
            raise DatasetBusyError(f"{partial}: another process writes to it")
        _begin(prefix, partial, json.dumps(settings, sort_keys=True), overwrite=overwrite)
        done = sum(_num_documents(partial, number) or 0 for number in range(len(ranges)))
        progress(done)
        todo = [n for n in range(len(ranges)) if _num_documents(partial, n) is None]
        batches = [(ranges[n], n, os.fspath(partial), options) for n in todo]
        for _, documents in run_batches(engine or Engine(), tokenize_range, batches):
            done += documents
            progress(done)
        written = _join(prefix, partial, len(ranges), options)
        # First: without settings, no run continues from the remaining parts.
        (partial / SETTINGS).unlink()
        shutil.rmtree(partial)
    return written


def tokenize_range(part: _Range, number: int, folder: str, options: TokenizeOptions) -> int:
    """Write the tokens of a part of a file; return the number of documents.

    Raises:
        ConfigError: If the tokenizer is invalid.
        FormatError: If the file is damaged, or a row has no text.
    """
    tokenize = _tokenizer(options.tokenizer)
    lengths = []
    end = np.array([] if options.end_token is None else [options.end_token], np.int64)
    data = _part(Path(folder), number, DATA)
    with atomic_path(data) as temporary, open(temporary, "wb") as file:
        for text, where in _texts(part, options.text_column):
            try:
                output = tokenize(text)
            except Exception as error:
                raise FormatError(
                    f"{where}: {options.tokenizer} failed on {text[:40]!r}: {describe_error(error)}"
                ) from error
            tokens = np.concatenate((_checked(output, options, where), end))
            file.write(tokens.astype(options.dtype).tobytes())
            lengths.append(len(tokens))
    # Written last: a part that has its lengths is complete.
    write_atomic(_part(Path(folder), number, ".lengths"), np.array(lengths, "<i4").tobytes())
    return len(lengths)


def _begin(prefix: Path, partial: Path, text: str, *, overwrite: bool) -> None:
    """Make sure that nothing is overwritten unintentionally."""
    settings = partial / SETTINGS
    index, data = (prefix.with_name(prefix.name + suffix) for suffix in (TOKEN_INDEX, DATA))
    if overwrite:
        for file in (index, data):  # no index may be left without its tokens
            file.unlink(missing_ok=True)
    if index.exists():
        if not settings.exists():
            shutil.rmtree(partial)
        raise ConfigError(f"{index} already exists; choose another name, or pass --overwrite")
    begun = settings.read_text() if settings.exists() else None
    if begun != text:
        done = any(part.stat().st_size for part in partial.glob("*.lengths"))
        if begun is not None and done and not overwrite:
            raise ConfigError(
                f"{partial} was begun with other files or options; pass the same again, or pass "
                "--overwrite to start over"
            )
        for part in partial.glob("0*.*"):
            part.unlink()
    write_atomic(settings, text)


def _join(prefix: Path, partial: Path, parts: int, options: TokenizeOptions) -> Written:
    """Concatenate the tokens of all parts, and write their index."""
    pieces = [np.fromfile(_part(partial, n, ".lengths"), "<i4") for n in range(parts)]
    lengths = np.concatenate([np.zeros(0, np.int32), *pieces])
    if not len(lengths):
        raise ConfigError(f"{prefix}: there are no documents to write")
    with atomic_path(f"{prefix}{DATA}") as temporary, open(temporary, "wb") as file:
        for number in range(parts):
            with open(_part(partial, number, DATA), "rb") as part:
                shutil.copyfileobj(part, file, COPIED_BYTES)
    with atomic_path(f"{prefix}{TOKEN_INDEX}") as temporary, open(temporary, "wb") as file:
        file.writelines(token_index_bytes(options.dtype, lengths))
    return Written(len(lengths), int(lengths.sum(dtype=np.int64)))


def _files(sources: Sequence[str]) -> list[Path]:
    chosen = select(sources)
    paths = [chosen.folder / name for name in chosen.names]
    tables = [path for path in paths if table_suffix(path.name) in (*LINES, ".parquet")]
    if not tables or (len(tables) < len(paths) and not chosen.is_folder):
        other = next((path for path in paths if path not in tables), chosen.folder)
        raise ConfigError(
            f"{other}: expected {LINES[0]} or .parquet files, whose texts are tokenized"
        )
    local = [path for path in tables if isinstance(path, Path)]
    if len(local) < len(tables):
        raise ConfigError(f"{tables[0]}: texts are read from this machine; copy the files first")
    return local


def _ranges(path: Path) -> Iterator[_Range]:
    """Yield the parts of a file; a compressed one is a single part."""
    if path.suffix == ".parquet":
        yield from _group_ranges(path)
    elif path.suffix not in LINES:
        yield _Range(os.fspath(path), 0, -1)
    else:
        size = path.stat().st_size
        for start in range(0, size, RANGE_BYTES):
            yield _Range(os.fspath(path), start, min(start + RANGE_BYTES, size))


def _group_ranges(path: Path) -> Iterator[_Range]:
    with needs_extra("parquet", f"{path}: Parquet needs pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{path}: {error}") from error
    start = size = 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= RANGE_BYTES:
            yield _Range(os.fspath(path), start, group + 1)
            start, size = group + 1, 0
    if start < metadata.num_row_groups:
        yield _Range(os.fspath(path), start, metadata.num_row_groups)


def _texts(part: _Range, column: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a part of a file, and where they are."""
    path = Path(part.path)
    for row, where in _rows(path, part, column):
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str):
            there = ", ".join(map(str, islice(row, 12))) if isinstance(row, dict) else repr(row)
            kind = "no" if text is None else f"{type_in_words(text)} as"
            raise FormatError(
                f"{where}: has {kind} {column!r}, but {there[:200]}; name the column with the "
                "texts as --text-column"
            )
        yield text, where


def _rows(path: Path, part: _Range, column: str) -> Iterator[tuple[Any, str]]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path, part, column)
    elif part.stop < 0:
        for number, row in enumerate(read_rows(Table.at(path, RowRules()))):
            yield row, f"{path}, row {number + 1}"
    else:
        with open(path, "rb") as file:
            # A line belongs to the range that it begins in.
            file.seek(max(0, part.start - 1))
            lines = document_lines(file, origin=f"{path}, from byte {part.start} on")
            if part.start:
                next(lines, None)
            at = file.tell()
            for line in lines:
                if at >= part.stop:
                    break
                if line.strip():
                    where = f"{path}, byte {at}"
                    yield parse_json(line, origin=where), where
                at += len(line)


def _parquet_rows(path: Path, part: _Range, column: str) -> Iterator[tuple[Any, str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open(path, "rb") as binary:
            file = pq.ParquetFile(binary)
            names = file.schema_arrow.names
            if column not in names:
                yield dict.fromkeys(names), f"{path}"
            for group in range(part.start, part.stop):
                rows = python_rows(binary, file.metadata, group, [column], origin=str(path))
                for number, row in enumerate(rows):
                    yield row, f"{path}, row group {group}, row {number}"
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, EnergonError):
            raise
        raise FormatError(f"{path}: {error}") from error


def _checked(output: Any, options: TokenizeOptions, where: str) -> np.ndarray[Any, Any]:
    """Return the output of a tokenizer as an array, if it consists of tokens."""
    tokens = np.asarray(output)
    if tokens.ndim == 1 and not len(tokens):
        return np.zeros(0, np.int64)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"{where}: {options.tokenizer} returned {output!r:.80}, expected whole numbers"
        )
    if tokens.min() < 0 or tokens.max() >= options.limit:
        raise ConfigError(
            f"{where}: {options.tokenizer} returned tokens from {tokens.min()} to {tokens.max()}, "
            f"expected 0 to {options.limit - 1}; set their number with --vocabulary-size"
        )
    return tokens


@lru_cache(maxsize=4)
def _tokenizer(name: str) -> Callable[[str], Any]:
    """Return the function named by `module:function`; the module may be in the working directory.

    Raises:
        ConfigError: If it does not exist.
    """
    if name.startswith("__main__:"):
        raise ConfigError(
            f"--tokenizer {name}: the processes that tokenize cannot import the running program; "
            "put the function into a separate file, and name that, as in my_tokens:encode"
        )
    tokenize: Callable[[str], Any] = load_named("--tokenizer", name)
    return tokenize


def _part(folder: Path, number: int, suffix: str) -> Path:
    return folder / f"{number:06}{suffix}"


def _num_documents(folder: Path, number: int) -> int | None:
    """Return how many documents a complete part has; None if it is incomplete."""
    try:
        return os.stat(_part(folder, number, ".lengths")).st_size // 4
    except FileNotFoundError:
        return None
