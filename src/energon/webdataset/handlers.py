"""What to do about an item that fails: go on without it, end the stage, or raise.

A handler is called with the exception. True leaves the item out and goes on, False ends the
stage as if its data had ended there; or it raises, which ends the run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

Handler = Callable[[Exception], bool]


def reraise_exception(exn: Exception) -> bool:
    """Raise the error: the default everywhere."""
    raise exn


def ignore_and_continue(exn: Exception) -> bool:
    """Leave the item out without a word."""
    return True


def warn_and_continue(exn: Exception) -> bool:
    """Leave the item out, and warn."""
    warnings.warn(_words(exn), stacklevel=2)
    return True


def ignore_and_stop(exn: Exception) -> bool:
    """End the stage without a word."""
    return False


def warn_and_stop(exn: Exception) -> bool:
    """End the stage, and warn."""
    warnings.warn(_words(exn), stacklevel=2)
    return False


def _words(exn: Exception) -> str:
    return f"{type(exn).__name__}: {exn}"
