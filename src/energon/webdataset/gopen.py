"""Open addresses of all kinds for streaming, to read or write.

Supported are local paths and `file:`, "-" for standard input and output, `pipe:` with a shell
command (if allowed), and everything that energon's storage supports: http(s), s3, gs, az, ….
Programs can add openers to `gopen_schemes`.

Rules in the environment rewrite addresses, to use other copies of the same data. GOPEN_REWRITE or
WDS_REWRITE contains rules separated by semicolons: a regular expression for the beginning of an
address, an equals sign, and the replacement. The first matching rule is applied, once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from subprocess import PIPE as PIPE
from typing import Any

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    StorageAccessError,
    StorageError,
)
from energon.io.address import redact, scheme_of
from energon.io.files import open_store
from energon.io.threads import read_here
from energon.webdataset import security
from energon.webdataset.names import __getattr__ as __getattr__
from energon.webdataset.reading.urls import is_local, local_path

BROKEN_PIPE = 141
"""Exit status of a shell command that continued to write after its pipe was closed."""
KILL_SECONDS = 1.0
_CHUNK_BYTES = 1 << 20


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
        # Not `__del__`: of garbage in a cycle, the stream may be finalized first, with a warning.
        release = weakref.finalize(self, _release, self.proc, self.stream)
        release.atexit = reads  # writers that were not closed may write their ends at exit

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
            self.status = _end(self.proc)
        else:
            with contextlib.suppress(BrokenPipeError):
                self.stream.close()
            self.wait_for_child()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(lambda: self.read(_CHUNK_BYTES), b"")

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
    """Enlarge the buffer of a pipe, where the system allows it.

    Parsing takes 4 to 5 times the CPU time for texts of 1 kB if each read returns 64 kB.
    """
    try:
        import fcntl

        fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _CHUNK_BYTES)
    except (ImportError, AttributeError, OSError):
        pass


def _release(proc: subprocess.Popen[bytes], stream: Any) -> None:
    """Close the stream of a command whose `Pipe` no longer exists, and end the command."""
    with contextlib.suppress(OSError, ValueError):
        stream.close()
        _end(proc)


def _end(proc: subprocess.Popen[bytes]) -> int:
    """End a command whose output is no longer needed, and return its status."""
    # It may be about to end on its own, now that its pipe is closed.
    for stop, seconds in ((proc.terminate, 0.02), (proc.kill, KILL_SECONDS)):
        try:
            return proc.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            stop()
    return proc.wait()


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


logger = logging.getLogger("energon")


def tell(variable: str, message: str, *args: object) -> None:
    """Log a line; if an environment variable is set, show it even if logging is not configured.

    Args:
        variable: The variable; unset, empty or 0 disables it.
        message: The format of the line.
        args: Its arguments.
    """
    if os.environ.get(variable, "0") in ("", "0"):
        logger.debug(message, *args)
    elif logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(message, *args)
    else:
        sys.stderr.write(f"{message % args}\n")


def rewrite_url(url: str) -> str:
    """Return the address to open for `url`.

    Raises:
        ConfigError: If a rule is malformed.
        SecurityError: If there are rules, and the lock is on; see `security`.
    """
    text = os.environ.get("GOPEN_REWRITE") or os.environ.get("WDS_REWRITE") or ""
    if text:
        security.check_lock("rewrite")
    for pattern, replacement in _rules(text):
        rewritten = pattern.sub(replacement, url, count=1) if pattern.match(url) else url
        if rewritten != url:
            return rewritten
    return url


@lru_cache(maxsize=16)
def _rules(text: str) -> list[tuple[re.Pattern[str], str]]:
    rules = []
    for rule in filter(None, text.split(";")):
        pattern, equals, replacement = rule.partition("=")
        try:
            if not equals:
                raise ValueError("there is no equals sign")
            rules.append((re.compile(f"^(?:{pattern})"), replacement))
        except (ValueError, re.error) as error:
            raise ConfigError(
                f"GOPEN_REWRITE: rule {rule!r}: {error}; expected REGEX=REPLACEMENT, with "
                "semicolons between rules"
            ) from error
    return rules


Opener = Callable[..., Any]
_MODES = ("rb", "wb")


def gopen(
    url: str | os.PathLike[str],
    mode: str = "rb",
    bufsize: int = 8192,
    *,
    allow: Collection[str] = (),
    **kw: Any,
) -> Any:
    """Open an address as a binary stream.

    Args:
        url: A path, or an address.
        mode: "rb" or "wb".
        bufsize: Passed to openers of the program; built-in ones choose their own.
        allow: "shell" permits a command.
        kw: Passed to the opener of the scheme.

    Raises:
        ConfigError: If there is no opener for the scheme.
        DatasetNotFoundError: If there is nothing at the address.
        SecurityError: If it is a command, and that is not allowed.

    Example:
        >>> with gopen("photos/shard-0.tar") as stream:
        ...     stream.read(5)
        b'0.png'
    """
    allowed = security.resolve(allow)
    if url == "-" and mode in _MODES:
        return sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
    url = os.fspath(url)
    if is_local(url):
        security.check_lock("file", allowed)
        if mode in _MODES:
            return _open_file(rewrite_url(url), mode, buffering=-1)
    return open_url(url, mode, bufsize, allowed=allowed, options=kw)


def open_url(
    url: str,
    mode: str = "rb",
    bufsize: int = 8192,
    *,
    allowed: Collection[str] = (),
    options: dict[str, Any] | None = None,
) -> Any:
    """Open an address with permissions resolved earlier; see `security.resolve`."""
    if mode not in _MODES:
        raise ConfigError(f"gopen(mode={mode!r}): expected rb or wb")
    url = rewrite_url(url)
    tell("GOPEN_VERBOSE", "opening %s (%s)", redact(url), mode)
    if url == "-":
        return _Standard(sys.stdin.buffer if mode == "rb" else sys.stdout.buffer)
    scheme = _scheme(url)
    opener = gopen_schemes.get(scheme)
    if opener is None and not is_local(url):
        opener = gopen_schemes["__default__"]
    if opener is not None and opener is not _BUILT_IN.get(scheme, gopen_remote):
        return opener(url, mode, bufsize, **(options or {}))
    if scheme == "pipe":
        security.require("shell", allowed, f"{redact(url)} is a command for the shell")
        return _open_pipe(url, mode, options or {})
    return _open_file(url, mode) if is_local(url) else gopen_remote(url, mode)


def _scheme(url: str) -> str:
    """Return the scheme of an address; programs may register ones like "mine:x"."""
    before, colon, _ = url.partition(":")
    if colon and before.lower() in gopen_schemes:
        return before.lower()
    return scheme_of(url) or "file"


def _open_pipe(url: str, mode: str, options: dict[str, Any]) -> Pipe:
    return Pipe(url[len("pipe:") :], mode=mode, ignore_status=(BROKEN_PIPE,), **options)


def _open_file(url: str, mode: str, *, buffering: int | None = None) -> Any:
    path = local_path(url) or url
    try:
        return open(path, mode, buffering=_buffering(mode, buffering))
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = "no such file" if mode == "rb" else "there is no such folder to write to"
        raise DatasetNotFoundError(f"{url}: {missing}") from error
    except PermissionError as error:
        raise StorageAccessError(f"{url}: {error.strerror}; check its permissions") from error
    except OSError as error:
        raise StorageError(f"{url}: {error.strerror or error}") from error


def _buffering(mode: str, default: int | None) -> int:
    """Return the size of the buffer: GOPEN_BUFFER or the default, or none for reading."""
    size = os.environ.get("GOPEN_BUFFER")
    if size is None:
        return default if default is not None else 0 if mode == "rb" else -1
    try:
        return int(size)
    except ValueError as error:
        raise ConfigError(f"GOPEN_BUFFER={size!r}: expected a number of bytes") from error


class _Standard:
    """Standard input or output, which stays open when this is closed."""

    def __init__(self, stream: Any) -> None:
        self.read = getattr(stream, "read1", None) or stream.read
        self.write = getattr(stream, "write", None)
        self.flush = stream.flush

    def close(self) -> None:
        """Flush what was written."""
        self.flush()


def reader(url: str | os.PathLike[str], **kw: Any) -> Any:
    """Open an address to read from."""
    return gopen(url, "rb", **kw)


def set_options(
    obj: Any,
    timeout: float | None = None,
    ignore_errors: bool | None = None,
    ignore_status: Collection[int] | None = None,
    handler: Any = None,
) -> bool:
    """Set which failures of a command are ignored; return whether `obj` is a command.

    Args:
        obj: What `gopen` returned.
        timeout: Stored as an attribute only: closing never waits for a command.
        ignore_errors: Whether to ignore every exit status; None leaves the setting unchanged.
        ignore_status: Exit statuses besides 0 that are not failures; None leaves them unchanged.
        handler: Accepted for compatibility.
    """
    if not isinstance(obj, Pipe):
        return False
    if timeout is not None:
        obj.timeout = timeout
    if ignore_errors is not None:
        obj.ignore_errors = ignore_errors
    if ignore_status is not None:
        obj.ignore_status = [0, *ignore_status]
    return True


def gopen_file(url: str, mode: str = "rb", bufsize: int = 8192) -> Any:
    """Open a path or a `file:` address."""
    return _open_file(url, mode, buffering=-1)


def gopen_pipe(url: str, mode: str = "rb", bufsize: int = 8192) -> Any:
    """Open `pipe:` and a command, if that is allowed."""
    security.require("shell", security.resolve(), f"{redact(url)} is a command for the shell")
    return _open_pipe(url, mode, {})


def gopen_remote(url: str, mode: str = "rb", bufsize: int = 8192) -> Any:
    """Open an address of a store or a web server in this process, without starting a program."""
    if mode != "rb":
        from energon.io.epath import open_writer

        return open_writer(url)
    try:
        return RemoteReader(url)
    except DatasetNotFoundError as error:
        raise DatasetNotFoundError(_explain_missing(url) or str(error)) from None


def _explain_missing(url: str) -> str | None:
    """Return which part of an address is wrong; None if the store does not list its objects."""
    from energon.io.files import describe_missing, has_files

    try:
        if has_files(url):
            folder = redact(url).rstrip("/")
            return f"{folder} is a folder; write {folder}/ for the archives in it"
        return describe_missing(url)
    except DatasetNotFoundError as error:
        return str(error)
    except StorageError:  # the store cannot be listed
        return None


def gopen_error(url: str, *args: Any, **kw: Any) -> Any:
    """Raise ConfigError: an opener for disabled schemes."""
    raise ConfigError(f"{redact(url)}: no opener for addresses of this scheme")


gopen_curl = gopen_gsutil = gopen_ais = gopen_hf = gopen_htgs = gopen_remote

_REMOTE = ("http", "https", "sftp", "ftps", "s3", "gs", "az", "ais", "hf")
_BUILT_IN: dict[str, Opener] = {
    "__default__": gopen_remote,
    "pipe": gopen_pipe,
    **dict.fromkeys(_REMOTE, gopen_remote),
}
gopen_schemes: dict[str, Opener] = dict(_BUILT_IN)
"""Openers by scheme: functions of url, mode and bufsize. Those added by a program take precedence
over the built-in ones, which they can call. `__default__` is used for unknown schemes."""

info: dict[str, Any] = {}
"""For programs to set: identifies their messages."""
