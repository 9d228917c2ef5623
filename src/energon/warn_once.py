"""Warnings that a program gives once, or once in a while, whichever worker has cause to."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

_EARLY = 0.9
"""Records of workers take a while to arrive, some longer than others."""
_given: dict[str, float] = {}


def warn_once(logger: logging.Logger, what: str, message: str, *args: Any) -> None:
    """Log a warning, unless this process or a worker of it has done so.

    Args:
        logger: To whom.
        what: Tells this warning from others.
        message: Its text, and `args` to go into it.
        args: See `message`.
    """
    if _is_due(what, math.inf):
        logger.warning(message, *args, extra={"energon_once": what})


def warn_every(seconds: float, logger: logging.Logger, what: str, message: str, *args: Any) -> bool:
    """Log a warning at most every so many seconds, all workers together; return whether it was.

    Args:
        seconds: How long to keep silent after the last time.
        logger: See `warn_once`.
        what: See `warn_once`.
        message: See `warn_once`.
        args: See `warn_once`.
    """
    if not _is_due(what, seconds):
        return False
    logger.warning(message, *args, extra={"energon_once": what, "energon_every": seconds})
    return True


def is_repeated(record: logging.LogRecord) -> bool:
    """Return whether a record that comes from a worker is a warning that was given already."""
    what = getattr(record, "energon_once", None)
    seconds = getattr(record, "energon_every", math.inf)
    return what is not None and not _is_due(what, _EARLY * seconds)


def _is_due(what: str, seconds: float) -> bool:
    now = time.monotonic()
    due = what not in _given or now - _given[what] >= seconds
    if due:
        _given[what] = now
    return due
