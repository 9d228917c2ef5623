"""Warnings that a program gives once, whoever of its workers comes upon their cause."""

from __future__ import annotations

import logging
from typing import Any

_ATTRIBUTE = "energon_once"
_given: set[str] = set()


def warn_once(logger: logging.Logger, what: str, message: str, *args: Any) -> None:
    """Log a warning, unless this process or a worker of it has done so.

    Args:
        logger: To whom.
        what: Tells this warning from others.
        message: Its text, and `args` to go into it.
        args: See `message`.
    """
    if _is_first(what):
        logger.warning(message, *args, extra={_ATTRIBUTE: what})


def is_repeated(record: logging.LogRecord) -> bool:
    """Return whether a record that comes from a worker is a warning that was given already."""
    what = getattr(record, _ATTRIBUTE, None)
    return what is not None and not _is_first(what)


def _is_first(what: str) -> bool:
    first = what not in _given
    _given.add(what)
    return first
