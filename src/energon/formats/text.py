"""Read JSON and the rows of CSV text within the limits, with errors that name the file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from energon.errors import FormatError
from energon.limits import DOCUMENT_DEPTH, check_document
from energon.messages import counted


def parse_json(text: str | bytes, *, origin: str, hint: str = "") -> Any:
    """Return the value that a JSON document describes.

    Args:
        text: The document.
        origin: Its name in messages.
        hint: Appended to messages.

    Raises:
        FormatError: If it is not JSON, or exceeds the limits.
    """
    more = f"; {hint}" if hint else ""
    check_document(len(text), origin)
    try:
        # Of bytes, Python skips the byte order mark itself.
        value = json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except RecursionError:
        raise _too_deep(origin) from None
    except ValueError as error:
        raise FormatError(f"{origin}: is not JSON: {error}{more}") from error
    marks: tuple[Any, Any] = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    # Most documents have few brackets, which need not be followed.
    if sum(map(text.count, marks)) > DOCUMENT_DEPTH.value:
        _check_depth(value, origin)
    return value


def _check_depth(value: Any, origin: str) -> None:
    level: list[Any] = [[value]]  # the outer one is not part of the document
    for _ in range(DOCUMENT_DEPTH.value + 1):
        inner = [each.values() if type(each) is dict else each for each in level]
        level = [each for values in inner for each in values if type(each) in (dict, list)]
        if not level:
            return
    raise _too_deep(origin)


def _too_deep(origin: str) -> FormatError:
    return FormatError(
        f"{origin}: nested deeper than {DOCUMENT_DEPTH.value} levels; {DOCUMENT_DEPTH.hint}"
    )


def csv_rows(
    lines: Iterable[str], *, origin: str, delimiter: str = ","
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number of the line in which each row ends, and its values by column.

    Args:
        lines: The text, with its line ends as they are.
        origin: Its name in messages.
        delimiter: What separates columns.

    Raises:
        FormatError: If the first line does not name columns, or a row has other fields.
    """
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        columns = reader.fieldnames or ()
        _check_delimiter(columns, origin, delimiter)
        check_columns(columns, origin)
        for row in reader:
            if None in row or None in row.values():
                # Missing ones are None; None is also the name of a list of those too many.
                count = sum(value is not None for value in row.values()) - (None in row)
                count += len(row.get(None, ()))
                raise FormatError(
                    f"{origin}:{reader.line_num}: found {counted(count, 'field')}, expected "
                    f"{len(columns)}, as in the first line"
                )
            yield reader.line_num, row
    except csv.Error as error:
        raise FormatError(f"{origin}:{reader.line_num}: {error}") from error


def check_columns(columns: Sequence[str], origin: str) -> None:
    """Refuse columns with the same name: only the last of them would be read."""
    first: dict[str, int] = {}
    for number, name in enumerate(columns, start=1):
        if first.setdefault(name, number) != number:
            raise FormatError(
                f"{origin}: columns {first[name]} and {number} have the same name, {name!r}; "
                "rename or remove one of them"
            )


def _check_delimiter(columns: Sequence[str], origin: str, delimiter: str) -> None:
    """Refuse a single column whose name seems to be several names with another separator."""
    if len(columns) != 1:
        return
    other = next((each for each in (",", ";", "\t", "|") if each in columns[0]), None)
    if other is not None:
        raise FormatError(
            f"{origin}: has one column, {columns[0]!r}, in which {other!r} seems to separate "
            f"columns; expected {delimiter!r}"
        )
