"""Open addresses of all kinds for streaming."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from energon.errors import ConfigError, DatasetNotFoundError

Opener = Callable[..., Any]


def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> Any:
    """Open an address as a binary stream.

    Args:
        url: A path, or an address with one of the schemes in `gopen_schemes`.
        mode: "rb" or "wb".
        bufsize: Accepted for compatibility; streams are read in large pieces.
        kw: Given to the opener of the scheme.

    Raises:
        ConfigError: If nobody opens addresses of that scheme.
        DatasetNotFoundError: If there is nothing at the address.
    """
    scheme = urlsplit(url).scheme.lower() if "://" in url or url.startswith("pipe:") else ""
    opener = gopen_schemes.get(scheme or "__default__")
    if opener is None:
        raise ConfigError(
            f"{url}: nobody opens {scheme}: addresses; register an opener with "
            f'gopen_schemes["{scheme}"] = function(url, mode, bufsize)'
        )
    return opener(url, mode, bufsize, **kw)


def gopen_file(url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> Any:
    """Open a local file."""
    path = unquote(urlsplit(url).path) if url.startswith("file:") else url
    try:
        return open(path, mode, buffering=0 if mode == "rb" else -1)
    except FileNotFoundError as error:
        raise DatasetNotFoundError(f"{url}: no such file") from error


def gopen_http(url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> Any:
    """Open an address on a web server."""
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        return urlopen(url, timeout=60)
    except HTTPError as error:
        raise DatasetNotFoundError(f"{url}: {error}") from error


gopen_schemes: dict[str, Opener] = {
    "__default__": gopen_file,
    "file": gopen_file,
    "http": gopen_http,
    "https": gopen_http,
}
"""Who opens addresses of which scheme; add your own."""
