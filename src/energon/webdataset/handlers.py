"""Handlers of failing items: continue without the item, end the stage, or raise.

A handler is called with the exception. True drops the item and continues, False ends the stage as
if its data had ended there; raising ends the run.

Errors about missing permissions or packages concern all items: skipping them would make a run
without any data look like one that has ended. These handlers therefore always raise them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from energon.errors import MissingExtraError, SecurityError
from energon.messages import describe_error

Handler = Callable[[Exception], bool]


def reraise_exception(exn: Exception) -> bool:
    """Raise the error: the default everywhere.

    Example:
        >>> reraise_exception(ValueError("damaged"))
        Traceback (most recent call last):
        ValueError: damaged
    """
    raise exn


def ignore_and_continue(exn: Exception) -> bool:
    """Drop the item silently.

    Example:
        >>> ignore_and_continue(ValueError("damaged"))
        True
    """
    _raise_if_all_fail(exn)
    return True


def warn_and_continue(exn: Exception) -> bool:
    """Drop the item, and warn.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_and_continue(ValueError("damaged"))
        True
        >>> str(caught[0].message)
        'ValueError: damaged'
    """
    _raise_if_all_fail(exn)
    warnings.warn(_words(exn), stacklevel=2)
    return True


def ignore_and_stop(exn: Exception) -> bool:
    """End the stage silently.

    Example:
        >>> ignore_and_stop(ValueError("damaged"))
        False
    """
    _raise_if_all_fail(exn)
    return False


def warn_and_stop(exn: Exception) -> bool:
    """End the stage, and warn.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_and_stop(ValueError("damaged"))
        False
    """
    _raise_if_all_fail(exn)
    warnings.warn(_words(exn), stacklevel=2)
    return False


def _raise_if_all_fail(exn: Exception) -> None:
    if isinstance(exn, SecurityError | MissingExtraError):
        raise exn


def _words(exn: Exception) -> str:
    notes = getattr(exn, "__notes__", ())
    return "; ".join([describe_error(exn), *notes])
