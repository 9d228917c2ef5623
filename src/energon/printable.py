"""Make text safe to print: names come from data, and terminals obey what they are sent.

Control characters, marks that turn the direction of text, and bytes that are no text are written
as escapes, in messages of errors, in log records and in what commands print.
"""

from __future__ import annotations

import logging
import os
import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_SHORT = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def escape_text(text: str) -> str:
    r"""Return text of several lines without characters that terminals obey.

    Example:
        >>> print(escape_text("one\ntwo\x1b[2J\udcff"))
        one
        two\x1b[2J\xff
    """
    return text if text.isprintable() else _UNSAFE.sub(lambda found: _escape(found[0]), text)


def escape_line(text: str) -> str:
    r"""Return text that is to stay on one line, see `escape_text`.

    Example:
        >>> print(escape_line("a\n1.txt"))
        a\n1.txt
    """
    return escape_text(text).replace("\n", "\\n").replace("\t", "\\t")


def escape_record(record: logging.LogRecord) -> bool:
    """Escape what a log record says; a filter that lets every record pass."""
    arguments = record.args
    if isinstance(arguments, tuple):
        record.args = tuple(map(_safe_argument, arguments))
    try:
        text = record.getMessage()
    except (TypeError, ValueError, KeyError):
        return True  # whoever handles the record reports that its arguments do not fit
    if not text.isprintable():
        record.msg, record.args = escape_text(text), ()
    return True


def _safe_argument(argument: object) -> object:
    if not isinstance(argument, str | os.PathLike) or str(argument).isprintable():
        return argument
    return escape_line(str(argument))


def _escape(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:
        return f"\\x{number - 0xDC00:02x}"  # a byte that is no text
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


# Here, so that it is done before anything that logs has been imported.
logging.getLogger("energon").addFilter(escape_record)
