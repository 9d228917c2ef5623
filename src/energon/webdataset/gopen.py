"""Open addresses of all kinds for streaming, in both directions.

Known are local paths and `file:`, "-" for standard input and output, `pipe:` with a command for
the shell (if that is allowed), and whatever energon's storage knows: http(s), s3, gs, az, ….
Openers of your own go into `gopen_schemes`.

Addresses are rewritten by rules in the environment, to use other copies of the same data:
GOPEN_REWRITE, or WDS_REWRITE, holds rules with semicolons between them: a regular expression
for the beginning of an address, an equals sign, and what stands there instead. The first rule
that fits is used, once. USE_AIS_FOR names schemes whose objects are asked of the AIStore at
AIS_ENDPOINT.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Collection
from functools import lru_cache
from subprocess import PIPE
from typing import Any

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    StorageAccessError,
    StorageError,
)
from energon.io.address import redact, scheme_of
from energon.webdataset import security
from energon.webdataset.reading.streams import BROKEN_PIPE, Pipe, RemoteReader, RemoteWriter
from energon.webdataset.reading.urls import is_local, local_path
from energon.webdataset.utils import reexport

logger = logging.getLogger("energon")


def tell(variable: str, message: str, *args: object) -> None:
    """Log a line; if the environment asks for it, show it even where logging is not set up.

    Args:
        variable: Asks for it, unless it is unset, empty or 0.
        message: The line, and `args` to go into it.
        args: See `message`.
    """
    if os.environ.get(variable, "0") in ("", "0"):
        logger.debug(message, *args)
    elif logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(message, *args)
    else:
        sys.stderr.write(f"{message % args}\n")


_PROVIDERS = {"gs": "gcp", "s3": "aws", "az": "azure", "ais": "ais"}


def rewrite_url(url: str) -> str:
    """Return the address that is to be opened for `url`.

    Raises:
        ConfigError: If a rule is malformed, or AIStore is asked for without an endpoint.
        SecurityError: If there are rules, and the lock is on; see `security`.
    """
    text = os.environ.get("GOPEN_REWRITE") or os.environ.get("WDS_REWRITE") or ""
    if text:
        security.check_lock("rewrite")
    for pattern, replacement in _rules(text):
        rewritten = pattern.sub(replacement, url, count=1) if pattern.match(url) else url
        if rewritten != url:
            return rewritten
    return _through_aistore(url)


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


def _through_aistore(url: str) -> str:
    scheme = scheme_of(url)
    routed = scheme and scheme in os.environ.get("USE_AIS_FOR", "").split(":")
    if scheme != "ais" and not routed:
        return url
    endpoint = os.environ.get("AIS_ENDPOINT")
    if not endpoint:
        raise ConfigError(
            f"{url}: is read through AIStore; set AIS_ENDPOINT to its address, like "
            "http://host:51080"
        )
    if scheme not in _PROVIDERS:
        raise ConfigError(
            f"USE_AIS_FOR names {scheme}; AIStore knows {', '.join(sorted(_PROVIDERS))}"
        )
    path = url[len(scheme) + 3 :]
    return f"{endpoint.rstrip('/')}/v1/objects/{path}?provider={_PROVIDERS[scheme]}"


__all__ = ["PIPE", "Pipe", "gopen", "gopen_schemes", "open_url", "rewrite_url"]

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
        bufsize: Given to openers of the program; others read in pieces of their own size.
        allow: "shell" lets the address be a command.
        kw: Given to the opener of the scheme.

    Raises:
        ConfigError: If nobody opens addresses of that scheme.
        DatasetNotFoundError: If there is nothing at the address.
        SecurityError: If it is a command, which is not allowed.

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
    """Do what `gopen` does, with what was allowed before; see `security.resolve`."""
    if mode not in _MODES:
        raise ConfigError(f"gopen(mode={mode!r}): expected rb or wb")
    url = rewrite_url(url)
    tell("GOPEN_VERBOSE", "opening %s (%s)", redact(url), mode)
    if url == "-":
        return _standard(mode)
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
    """Return the scheme of an address; openers of the program know "mine:x", too."""
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
    except FileNotFoundError as error:
        missing = "no such file" if mode == "rb" else "there is no such folder to write to"
        raise DatasetNotFoundError(f"{url}: {missing}") from error
    except PermissionError as error:
        raise StorageAccessError(f"{url}: {error.strerror}; check its permissions") from error
    except OSError as error:
        raise StorageError(f"{url}: {error.strerror or error}") from error


def _buffering(mode: str, default: int | None) -> int:
    """Return the size of a buffer: GOPEN_BUFFER, or the default; else none for reading."""
    size = os.environ.get("GOPEN_BUFFER")
    if size is None:
        return default if default is not None else 0 if mode == "rb" else -1
    try:
        return int(size)
    except ValueError as error:
        raise ConfigError(f"GOPEN_BUFFER={size!r}: expected a number of bytes") from error


class _Standard:
    """Standard input or output, which stay open when nobody reads or writes any more."""

    def __init__(self, stream: Any) -> None:
        self.read = getattr(stream, "read1", None) or stream.read
        self.write = getattr(stream, "write", None)
        self.flush = stream.flush

    def close(self) -> None:
        """Pass on what was written."""
        self.flush()


def _standard(mode: str) -> _Standard:
    return _Standard(sys.stdin.buffer if mode == "rb" else sys.stdout.buffer)


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
    """Change what a command may do without being a failure; return whether it is a command.

    Args:
        obj: What `gopen` returned.
        timeout: Kept as an attribute: commands are never waited for when they are left.
        ignore_errors: Whether no exit status is a failure; None leaves that as it is.
        ignore_status: Exit statuses that are not failures, beside 0; None leaves them as they are.
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
    """Open an address of a store or a web server, in this process: no program is started."""
    return RemoteReader(url) if mode == "rb" else RemoteWriter(url)


def gopen_error(url: str, *args: Any, **kw: Any) -> Any:
    """Raise ConfigError: the opener of schemes that are not supported."""
    raise ConfigError(f"{redact(url)}: no opener for addresses of this scheme")


gopen_curl = gopen_gsutil = gopen_ais = gopen_hf = gopen_htgs = gopen_remote

_REMOTE = ("http", "https", "sftp", "ftps", "s3", "gs", "az", "ais", "hf")
_BUILT_IN: dict[str, Opener] = {
    "__default__": gopen_remote,
    "pipe": gopen_pipe,
    **dict.fromkeys(_REMOTE, gopen_remote),
}
gopen_schemes: dict[str, Opener] = dict(_BUILT_IN)
"""Openers by scheme: functions of url, mode and bufsize. Those that a program puts here come
before what is built in, which it can call. `__default__` is for schemes that have no opener."""

info: dict[str, Any] = {}
"""For programs to put in what identifies their messages."""

__getattr__ = reexport(__name__, {"utils": "utils:"})
