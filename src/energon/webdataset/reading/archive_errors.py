"""Damaged archives as programs expect them that were written for the tar library of Python."""

from __future__ import annotations

import tarfile

from energon.errors import FormatError, TruncatedError


class DamagedArchiveError(FormatError, tarfile.ReadError):
    """An archive is damaged."""


class CutOffArchiveError(TruncatedError, tarfile.ReadError):
    """An archive ends before its content does."""


def as_read_error(error: Exception) -> Exception:
    """Return an error of the format of an archive as a `tarfile.ReadError`, any other as it is."""
    if type(error) is TruncatedError:
        found: FormatError = CutOffArchiveError(*error.args)
    elif type(error) is FormatError:
        found = DamagedArchiveError(*error.args)
    else:
        return error
    found.__cause__ = error.__cause__
    return found.with_traceback(error.__traceback__)
