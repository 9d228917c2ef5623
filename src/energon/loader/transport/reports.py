"""Carry log records and exceptions from a worker to the training process.

What the library or hooks log in a worker appears wherever the training program has configured it to
appear: in its files and formats, at its levels. Records travel as lines of JSON.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import socket
import threading
import traceback
from dataclasses import dataclass
from typing import Any, Protocol

from energon.errors import WorkerError
from energon.loader.transport.pickling import BatchPickler
from energon.messages import is_repeated

_MAX_READ = 1 << 16
_MAX_TEXT = 1 << 16
_FORMATTER = logging.Formatter()


def explicit_levels() -> dict[str, int]:
    """Return the levels that this process has set for loggers, by name; "" is the root."""
    levels = {"": logging.root.level}
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET:
            levels[name] = logger.level
    return levels


class LogSender(logging.Handler):
    """Sends the records of a worker to the other end of a socket.

    A record that cannot be sent, or that is logged by a fork of the worker, goes to stderr.

    Args:
        channel: The socket.
        process_name: The process name in the records.
    """

    def __init__(self, channel: TakesLines, *, process_name: str) -> None:
        super().__init__()
        self._channel = channel
        self._process_name = process_name
        self._pid = os.getpid()

    def install(self, levels: dict[str, int]) -> None:
        """Replace all handlers, and give loggers the levels of the parent."""
        for name, level in levels.items():
            logging.getLogger(name or None).setLevel(level)
        logging.root.handlers[:] = [self]
        # A process forked from the training process has its handlers, too.
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger) and logger.handlers:
                logger.handlers[:] = [] if logger.propagate else [self]

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        try:
            line = self._line(record)
        except Exception:
            self.handleError(record)
            return
        try:
            if os.getpid() != self._pid:
                raise ConnectionError("the socket belongs to another process")
            self._channel.sendall(line)
        except OSError:
            if logging.lastResort is not None:
                logging.lastResort.handle(record)

    def _line(self, record: logging.LogRecord) -> bytes:
        values: dict[str, Any] = {
            name: value
            for name, value in vars(record).items()
            if value is None or isinstance(value, str | int | float)
        }
        values["msg"] = record.getMessage()[:_MAX_TEXT]
        values["args"] = None
        values["processName"] = self._process_name
        if record.exc_info and not record.exc_text:
            values["exc_text"] = _FORMATTER.formatException(record.exc_info)[:_MAX_TEXT]
        values["exc_info"] = None
        return json.dumps(values).encode() + b"\n"


class TakesLines(Protocol):
    """What lines of records are sent through: a socket, or its like."""

    def sendall(self, data: bytes, /) -> None:
        """Send lines; raise OSError if that is not possible."""


class RecordLines:
    """Passes records to the loggers of this process as their lines arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Process the records that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            _handle(logging.makeLogRecord(json.loads(line)))


class LogReceiver:
    """Passes the records that arrive at a socket to the loggers of this process."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._lines = RecordLines()
        # Loaders in several threads drain each other's sockets, and so may a handler of records.
        self._lock = threading.RLock()

    def drain(self) -> None:
        """Process the records that have arrived."""
        with self._lock:
            while data := self._read():
                self._lines.feed(data)

    def _read(self) -> bytes:
        """Return the bytes received; b"" if there are none, also once the other side is gone."""
        try:
            return self._channel.recv(_MAX_READ)
        except OSError:
            return b""


def _handle(record: logging.LogRecord) -> None:
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno) and not is_repeated(record):
        logger.handle(record)


class RemoteTraceback(Exception):
    """Shows where in the worker an exception was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text}"


@dataclass(frozen=True)
class RemoteError:
    """An exception in transit: pickled if possible, and described in any case."""

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

        An exception that cannot be pickled becomes a `WorkerError` with the same text, and so does
        one that is not an `Exception`: SystemExit must not end the training process.
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
    """Return the exception, or None if its own constructor does not accept it."""
    if pickled is None:
        return None
    try:
        loaded = pickle.loads(pickled)
    except Exception:
        return None
    return loaded if isinstance(loaded, BaseException) else None
