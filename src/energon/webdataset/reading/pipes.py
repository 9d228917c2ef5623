"""Commands as streams: what they write is read, or they read what is written.

A command that fails is an error, also if it fails after its last byte: at the end of the data the
exit status is waited for before anything is believed.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Collection, Sequence
from typing import Any

from energon.errors import StorageError

BROKEN_PIPE = 141
"""Exit status of a shell command that went on writing when nobody read any more."""
KILL_SECONDS = 1.0
_CHUNK_BYTES = 1 << 20
_PIPE_BYTES = 1 << 20


class Pipe:
    """A command, as a binary stream.

    Args:
        command: A line for the shell, or a list of arguments that no shell sees.
        mode: "rb" to read what it writes, "wb" to write what it reads.
        ignore_status: Exit statuses that are no failure, beside 0.
        ignore_errors: Whether no status is.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        mode: str = "rb",
        *,
        ignore_status: Collection[int] = (),
        ignore_errors: bool = False,
    ) -> None:
        self.command = command
        self.mode = mode
        self.status: int | None = None
        self._ignored = {0, *ignore_status}
        self._ignore_errors = ignore_errors
        reads = mode.startswith("r")
        self._process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            stdout=subprocess.PIPE if reads else None,
            stdin=subprocess.DEVNULL if reads else subprocess.PIPE,
            bufsize=0 if reads else -1,
        )
        self.stream: Any = self._process.stdout if reads else self._process.stdin
        _widen(self.stream)

    def tolerate(
        self,
        *,
        ignore_errors: bool | None = None,
        ignore_status: Collection[int] | None = None,
    ) -> None:
        """Change which exit statuses are no failure; None leaves that as it is."""
        if ignore_errors is not None:
            self._ignore_errors = ignore_errors
        if ignore_status is not None:
            self._ignored = {0, *ignore_status}

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes; none at the end only, if the command has not failed.

        Raises:
            StorageError: If it has.
        """
        if size < 0:
            return b"".join(iter(lambda: self.read(_CHUNK_BYTES), b""))
        data: bytes = self.stream.read(size) if self.status is None else b""
        if size and not data and self.status is None:
            self._wait(None)
        return data

    def write(self, data: bytes) -> int:
        """Hand bytes to the command.

        Raises:
            StorageError: If it does not take them.
        """
        try:
            written: int = self.stream.write(data)
            return written
        except BrokenPipeError:
            self._process.wait()
            raise StorageError(
                f"{_words(self.command)}: ended with status {self._process.returncode} before all "
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
            self._wait(None)

    def terminate(self) -> None:
        """Ask the command to end, whoever waits for what it writes; `close` it all the same."""
        if self.status is None:
            self._process.terminate()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(lambda: self.read(_CHUNK_BYTES), b"")

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None and self.status is None:
            with contextlib.suppress(OSError, ValueError):
                self.stream.close()
                self._end()

    def _end(self) -> None:
        """End a command whose output nobody wants any more."""
        # It may be about to end by itself, now that its pipe is closed.
        try:
            self.status = self._process.wait(timeout=0.02)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self.status = self._process.wait(timeout=KILL_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self.status = self._process.wait()

    def _wait(self, timeout: float | None) -> None:
        self.status = self._process.wait(timeout=timeout)
        self.stream.close()
        if self.status not in self._ignored and not self._ignore_errors:
            raise StorageError(
                f"{_words(self.command)}: ended with status {self.status}, so what it "
                f"{'wrote' if self.mode.startswith('r') else 'was given'} may be incomplete"
            )


def _widen(stream: Any) -> None:
    """Let the pipe hold more, where the system allows it."""
    try:
        import fcntl

        fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, AttributeError, OSError):
        pass


def _words(command: str | Sequence[str]) -> str:
    text = command if isinstance(command, str) else " ".join(command)
    return text if len(text) < 200 else f"{text[:197]}..."
