"""Expand patterns, folders and lists of these to the addresses of shards."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from energon.errors import ConfigError, DatasetNotFoundError, SecurityError
from energon.formats.meta.braces import expand_braces
from energon.io.address import redact, scheme_of
from energon.io.backends.local import walk_files
from energon.io.files import describe_missing, list_files, match_files
from energon.limits import is_allowed, refusal
from energon.messages import list_names

ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_SEPARATOR = re.compile(r"::(?![^\[]*\])")
MAX_NESTING = 10


def expand_urls(urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the addresses of the shards that a pattern or list names.

    Strings may contain several patterns separated by `::`, `${NAME}` for the value of WDS_NAME
    in the environment, and braces: `shard-{000..127}.tar`. Local patterns with `*` stand for the
    matching files, folders for the archives in them, both sorted.

    Raises:
        DatasetNotFoundError: If no file matches a pattern, or a folder has no archives.
        ConfigError: If there are no shards, braces do not pair, or a variable is not set.

    Example:
        >>> expand_urls("a-{0..2}.tar")
        ['a-0.tar', 'a-1.tar', 'a-2.tar']
    """
    if not isinstance(urls, str | os.PathLike | Iterable):
        raise ConfigError(
            f"{urls!r} names no shards; expected a pattern, a folder, or a list of these"
        )
    listed = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    for pattern in listed:
        if not isinstance(pattern, str | os.PathLike):
            raise ConfigError(
                f"{pattern!r:.100} is not the address of a shard; expected text or a path"
            )
    expanded = [url for pattern in listed for url in _expand(os.fspath(pattern))]
    if not expanded:
        raise ConfigError("there are no shards: the list of addresses is empty")
    return expanded


def expand_source(source: str | Iterable[str], max_urls: float = 1e6) -> list[str]:
    """Return the addresses that a pattern, or any iterable of addresses, stands for."""
    urls = expand_urls(source)
    if len(urls) > max_urls:
        raise ConfigError(f"{len(urls)} shards are more than max_urls={max_urls}")
    return urls


def check_variables(
    pattern: str, *, origin: str, allow: Collection[str] = (), is_remote: bool = False
) -> None:
    """Raise SecurityError if an address in a document refers to the environment without permission.

    Args:
        pattern: The address.
        origin: The document.
        allow: "env" permits it.
        is_remote: Whether the document is remote; then it is never permitted.
    """
    variable = _VARIABLE.search(pattern)
    if variable is None:
        return
    if is_remote:
        raise SecurityError(
            f"{origin}: {variable[0]} reads the environment, which a remote document may not; "
            "write its value, or copy the document to a local folder"
        )
    if not is_allowed("env", allow):
        raise refusal(
            "env",
            f"{origin}: {variable[0]} reads the environment, where secrets are; write what it "
            "stands for",
        )


def envlookup(m: re.Match[str] | str) -> str:
    """Return the value of `${name}` in patterns: WDS_name in the environment.

    Args:
        m: The name, or a match with it as the first group.
    """
    name = m if isinstance(m, str) else m[1]
    try:
        return os.environ[f"WDS_{name}"]
    except KeyError:
        raise ConfigError(
            f"${{{name}}} in the address of a shard stands for WDS_{name} of the environment, "
            "which is not set"
        ) from None


def envsubst(s: str) -> str:
    """Return a pattern with every `${NAME}` replaced by its value."""
    return _VARIABLE.sub(envlookup, s)


def is_local(url: str) -> bool:
    """Return whether an address is a path or a `file:` address."""
    return url.startswith("file:") or not ("://" in url or url.startswith("pipe:") or url == "-")


def local_path(url: str) -> str | None:
    """Return the path of a local address, or None if it is not local."""
    if not is_local(url):
        return None
    if url.startswith("file:"):
        from urllib.request import url2pathname

        return url2pathname(urlsplit(url).path)
    return url


def _expand(pattern: str) -> Iterator[str]:
    for part in _SEPARATOR.split(_with_variables(pattern)):
        for url in expand_braces(part):
            yield from _listed(url)


def _with_variables(pattern: str) -> str:
    for _ in range(MAX_NESTING):
        expanded = envsubst(pattern)
        if expanded == pattern:
            return expanded
        pattern = expanded
    raise ConfigError(
        f"{pattern!r}: these variables refer to each other; set them to texts without ${{…}}"
    )


def _listed(url: str) -> list[str]:
    path = local_path(url)
    if path is None:
        return _remote_archives(url) if _is_remote_pattern(url) else [url]
    if os.path.isdir(path):
        return _archives(path)
    if ("*" in path or "?" in path) and not os.path.exists(path):
        folder, files = match_files(_with_plain_brackets(path))
        if not files:
            raise DatasetNotFoundError(f"{url}: no file matches this pattern")
        return [os.path.join(folder, file.key) for file in files]
    return [url]


def _with_plain_brackets(pattern: str) -> str:
    """Return a pattern in which `[` means itself: webdataset knows no sets of characters."""
    return pattern.replace("[", "[[]")


def _is_remote_pattern(url: str) -> bool:
    """Return whether an address is a pattern for objects of a store that can list them."""
    # Web servers cannot list, and a question mark in their addresses begins a query.
    is_store = scheme_of(url) not in ("pipe", "http", "https", "")
    return url != "-" and is_store and (url.endswith("/") or "*" in url)


def _remote_archives(pattern: str) -> list[str]:
    """Return the addresses of objects that match a pattern, or of the archives in a folder."""
    folder = pattern.partition("*")[0].rpartition("/")[0]
    files = list_files(folder)
    if not files:
        raise DatasetNotFoundError(describe_missing(folder))
    urls = [f"{folder}/{file.key}" for file in files]
    if pattern.endswith("/"):
        urls = [url for url in urls if url.endswith(ARCHIVES)]
    else:
        urls = [url for url in urls if fnmatchcase(url, _with_plain_brackets(pattern))]
    if not urls:
        raise DatasetNotFoundError(
            f"{redact(pattern)}: no object matches this; {redact(folder)} has "
            f"{list_names(file.key for file in files)}"
        )
    return urls


def _archives(folder: str) -> list[str]:
    names = sorted(name for name, _ in walk_files(folder) if name.endswith(ARCHIVES))
    if not names:
        raise DatasetNotFoundError(
            f"{folder}: there are no archives ({', '.join(ARCHIVES)}) in this folder or below"
        )
    return [os.path.join(folder, name) for name in names]
