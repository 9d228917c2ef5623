"""Carry an exception from a worker to the training process."""

from __future__ import annotations

import io
import pickle
import traceback
from dataclasses import dataclass

from energon.errors import WorkerError
from energon.loader.transport.pickling import BatchPickler


class RemoteTraceback(Exception):
    """Shows where in the worker an exception was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text}"


@dataclass(frozen=True)
class RemoteError:
    """An exception as it crosses: pickled if it can be, described in any case."""

    pickled: bytes | None
    summary: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Describe `error`, in the worker."""
        text = "".join(traceback.format_exception(error))
        summary = "".join(traceback.format_exception_only(error)).strip()
        return cls(_pickled(error), summary, text)

    def rebuild(self) -> BaseException:
        """Return the exception, with the traceback of the worker as its cause.

        One that cannot be pickled becomes a `WorkerError` with the same text, and so does one
        that is no `Exception`: SystemExit is not to end the training process.
        """
        error = _loaded(self.pickled)
        if error is None:
            error = WorkerError(
                "a worker raised an exception that cannot be sent to the training process: "
                f"{self.summary}"
            )
        elif not isinstance(error, Exception):
            error = WorkerError(f"a worker raised {self.summary}")
        error.__cause__ = RemoteTraceback(self.traceback)
        return error


def _pickled(error: BaseException) -> bytes | None:
    file = io.BytesIO()
    try:
        pickler = BatchPickler(file)
        pickler.dump(error)
    except Exception:
        return None
    return None if pickler.buffers else file.getvalue()


def _loaded(pickled: bytes | None) -> BaseException | None:
    """Return the exception, or None where its own constructor does not take it back."""
    if pickled is None:
        return None
    try:
        loaded = pickle.loads(pickled)
    except Exception:
        return None
    return loaded if isinstance(loaded, BaseException) else None
