"""Streams from elsewhere: the output of commands, and objects of stores and web servers.

A command that fails is an error, even after its last byte: at the end of the data, its exit status
is checked before the end is reported.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from energon.errors import StorageError
from energon.io.atomic import ClosesOrAborts
from energon.io.files import open_store
from energon.io.threads import read_here

BROKEN_PIPE = 141
"""Exit status of a shell command that continued to write after its pipe was closed."""
KILL_SECONDS = 1.0
_CHUNK_BYTES = 1 << 20
_PIPE_BYTES = 1 << 20


class Pipe:
    """A command, as a binary stream.

    Args:
        args: A command line for the shell, or a list of arguments that bypasses it; further
            arguments go to `subprocess.Popen`.
        mode: "rb" to read its output, "wb" to write its input.
        timeout: Accepted for compatibility: closing never waits for a command.
        ignore_status: Exit statuses besides 0 that are not failures.
        ignore_errors: Whether to ignore every exit status.
        kw: Arguments of `subprocess.Popen`.
    """

    def __init__(
        self,
        *args: Any,
        mode: str = "rb",
        timeout: float = 7200.0,
        ignore_errors: bool = False,
        ignore_status: Collection[int] = (),
        **kw: Any,
    ) -> None:
        self.args = (args, kw)
        self.command = args[0]
        self.mode = mode
        self.timeout = timeout
        self.status: int | None = None
        self.ignore_errors = ignore_errors
        self.ignore_status = [0, *ignore_status]
        reads = mode.startswith("r")
        options = {
            "shell": isinstance(self.command, str),
            "stdout": subprocess.PIPE if reads else None,
            "stdin": subprocess.DEVNULL if reads else subprocess.PIPE,
            **kw,
            "bufsize": 0 if reads else -1,
        }
        self.proc = subprocess.Popen(*args, **options)
        self.stream: Any = self.proc.stdout if reads else self.proc.stdin
        _widen(self.stream)

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, and none only at the end.

        Raises:
            StorageError: If the command has failed.
        """
        if size < 0:
            return b"".join(iter(lambda: self.read(_CHUNK_BYTES), b""))
        data: bytes = self.stream.read(size) if self.status is None else b""
        if size and not data and self.status is None:
            self.wait_for_child()
        return data

    def readline(self) -> bytes:
        """Return the next line; see `read`."""
        line = b""
        while not line.endswith(b"\n") and (more := self.read(1)):
            line += more
        return line

    readLine = readline

    def check_status(self) -> None:
        """Raise StorageError if the command has ended, and failed."""
        if self.proc.poll() is not None:
            self.wait_for_child()

    def write(self, data: bytes) -> int:
        """Write bytes to the command.

        Raises:
            StorageError: If it does not take them.
        """
        try:
            written: int = self.stream.write(data)
            return written
        except BrokenPipeError:
            self.proc.wait()
            raise StorageError(
                f"{_words(self.command)}: ended with status {self.proc.returncode} before all "
                "was written"
            ) from None

    def close(self) -> None:
        """End the command: after reading by force, after writing by the end of its input.

        Raises:
            StorageError: If it failed on what was written.
        """
        if self.status is not None:
            return
        if self.mode.startswith("r"):
            self.stream.close()
            self._end()
        else:
            with contextlib.suppress(BrokenPipeError):
                self.stream.close()
            self.wait_for_child()

    def terminate(self) -> None:
        """Ask the command to end, even while another thread reads from it. Still `close` it."""
        if self.status is None:
            self.proc.terminate()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(lambda: self.read(_CHUNK_BYTES), b"")

    def __del__(self) -> None:
        if getattr(self, "proc", None) is not None and self.status is None:
            with contextlib.suppress(OSError, ValueError):
                self.stream.close()
                self._end()

    def _end(self) -> None:
        """End a command whose output is no longer needed."""
        # It may be about to end on its own, now that its pipe is closed.
        try:
            self.status = self.proc.wait(timeout=0.02)
        except subprocess.TimeoutExpired:
            self.proc.terminate()
            try:
                self.status = self.proc.wait(timeout=KILL_SECONDS)
            except subprocess.TimeoutExpired:
                self.proc.kill()
                self.status = self.proc.wait()

    def wait_for_child(self) -> None:
        """Wait for the end of the command.

        Raises:
            StorageError: If it failed.
        """
        self.status = self.proc.wait()
        with contextlib.suppress(BrokenPipeError):
            self.stream.close()
        if self.status not in self.ignore_status and not self.ignore_errors:
            raise StorageError(
                f"{_words(self.command)}: ended with status {self.status}, so what it "
                f"{'wrote' if self.mode.startswith('r') else 'was given'} may be incomplete"
            )


def _widen(stream: Any) -> None:
    """Enlarge the pipe's buffer, where the system allows it."""
    try:
        import fcntl

        fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, AttributeError, OSError):
        pass


def _words(command: str | Sequence[str]) -> str:
    text = command if isinstance(command, str) else " ".join(command)
    return text if len(text) < 200 else f"{text[:197]}..."


class RemoteReader:
    """The bytes of an object, from any position. Broken connections are resumed.

    Args:
        url: Its address.
    """

    def __init__(self, url: str) -> None:
        read_here()
        self._store, self._key = open_store(url)
        self._chunks: Iterator[bytes] = iter(())
        self._rest = b""
        # Opened now, so that a missing object is reported now.
        self.seek(0)

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, and none only at the end."""
        if size < 0:
            return self._rest + b"".join(self._chunks)
        data = self._rest or next(self._chunks, b"")
        self._rest = data[size:]
        return data[:size]

    def seekable(self) -> bool:
        """Return whether the stream supports random access."""
        return self._store.backend.can_range

    def seek(self, position: int) -> int:
        """Continue at byte `position`."""
        self.close()
        self._chunks = iter(self._stream(position))
        self._rest = next(self._chunks, b"")
        return position

    def close(self) -> None:
        """Close the connection."""
        if hasattr(self._chunks, "close"):
            self._chunks.close()
        self._rest = b""

    def __enter__(self) -> RemoteReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, position: int) -> Iterator[bytes]:
        return self._store.stream(self._key, position)


class RemoteWriter(ClosesOrAborts):
    """Writes an object, which appears as a whole on `close`.

    Args:
        url: Its address.
    """

    def __init__(self, url: str) -> None:
        self._store, self._key = open_store(url)
        descriptor, self._path = tempfile.mkstemp(prefix="energon-upload-")
        self._file = os.fdopen(descriptor, "wb")

    def write(self, data: Any) -> int:
        """Append bytes."""
        return self._file.write(data)

    def flush(self) -> None:
        """Do nothing: objects have no parts."""

    def close(self) -> None:
        """Write the object."""
        if self._file.closed:
            return
        self._file.close()
        try:
            self._store.write(self._key, Path(self._path))
        finally:
            os.unlink(self._path)

    def abort(self) -> None:
        """Discard what was written; an existing object stays as it is."""
        if not self._file.closed:
            self._file.close()
            os.unlink(self._path)
