"""Addresses: where bytes are, as text.

An address is a path on this machine or a URL:

    data/train                                local, from the working directory
    file:///data/train                        local
    s3://bucket/train                         an object store: scheme://root/key
    https://host/train?sv=…&sig=…             a web server; the query goes with every request
    dss://train@v2/shards                     local, $NVDATASET_CACHE_DIR/train/v2/shards

The functions here work on the text alone. URLs may contain secrets (user:password@, a signature
in the query): `redact` removes them. It parses a whole address, so it is applied to addresses
before they become part of a message; `EnergonError` and the logger redact messages once more.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from energon.errors import ConfigError
from energon.messages import redact_text

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?=://)")
_QUERY_SCHEMES = frozenset({"http", "https"})


class Address(NamedTuple):
    """A URL split into what to connect to and what to request."""

    scheme: str
    root: str
    """Scheme and bucket, host or the like, with the query if there is one; never shown as it is."""
    key: str
    """Path below the root, decoded, without slashes at either end."""


def scheme_of(address: str) -> str:
    """Return the scheme of a URL in lower case, or "" for a path.

    Example:
        >>> scheme_of("s3://bucket/x"), scheme_of("/data/x"), scheme_of("pipe:cat x")
        ('s3', '', 'pipe')
    """
    if address.startswith("pipe:"):
        return "pipe"
    match = _SCHEME.match(address)
    return match[0].lower() if match else ""


def is_remote(address: str | os.PathLike[str]) -> bool:
    """Return whether an address is anything but a path, `file://` or `dss://`."""
    return scheme_of(os.fspath(address)) not in ("", "file", "dss")


def local_path(address: str | os.PathLike[str]) -> str:
    """Return the path that a local address stands for.

    Raises:
        ConfigError: If it is remote, or names a host.
    """
    text = os.fspath(address)
    scheme = scheme_of(text)
    if not scheme:
        return text
    if scheme == "dss":
        return _dss_path(text)
    parts = urlsplit(text)
    if scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{redact(text)}: expected a local path, or file:///PATH")
    return unquote(parts.path)


def split_address(address: str) -> Address:
    """Return root and key of a URL.

    Example:
        >>> split_address("s3://bucket/a/b.tar")
        Address(scheme='s3', root='s3://bucket', key='a/b.tar')
        >>> split_address("https://host/a%20b?sig=x")
        Address(scheme='https', root='https://host?sig=x', key='a b')

    Raises:
        ConfigError: If there is no bucket or host.
    """
    scheme = scheme_of(address)
    rest, query = _cut_query(address[len(scheme) + 3 :], scheme)
    parts = rest.split("/")
    count = 1 if scheme != "hf" else 3 if parts[0] in ("datasets", "spaces") else 2
    if scheme == "hf" and parts[count - 1 : count] and parts[count - 1].endswith("@refs"):
        count += 2  # the hub's own revisions: refs/convert/parquet, refs/pr/1
    root, key = "/".join(parts[:count]), "/".join(parts[count:]).strip("/")
    if not root.strip("/"):
        raise ConfigError(f"{redact(address)}: no bucket or host after {scheme}://")
    if len(parts) < count or not all(parts[:count]):
        raise ConfigError(
            f"{redact(address)}: expected hf://datasets/USER/NAME/PATH, or hf://USER/NAME/PATH "
            "for a repository of a model"
        )
    if scheme in _QUERY_SCHEMES:
        key = unquote(key)
    return Address(scheme, f"{scheme}://{root}{query}", key)


def join_address(folder: str | os.PathLike[str], path: str) -> str:
    """Return the address of `path`, which may be relative to `folder`.

    Example:
        >>> join_address("s3://bucket/a/b", "../c.yaml")
        's3://bucket/a/c.yaml'
        >>> join_address("s3://bucket/a/b", "/mnt/c.yaml")
        '/mnt/c.yaml'
        >>> join_address("https://host/a?sig=x", "b")
        'https://host/a/b?sig=x'

    Raises:
        ConfigError: If it leads out of the bucket.
    """
    base = os.fspath(folder)
    if scheme_of(path) or (path.startswith("/") and is_remote(base)):
        return path
    if not is_remote(base):
        return os.path.normpath(os.path.join(local_path(base), path))
    root, rest, query = _cut(base)
    joined = posixpath.normpath(posixpath.join("/" + rest, path)).lstrip("/")
    if f"{posixpath.normpath(posixpath.join(rest, path))}/".startswith("../"):
        raise ConfigError(f"{path!r} is outside {redact(root)}; expected a path below it, or a URL")
    return f"{root}/{joined}".rstrip("/") + query


def parent_address(address: str | os.PathLike[str]) -> str:
    """Return the folder that contains an address; the parent of a root is the root itself."""
    text = os.fspath(address)
    if not is_remote(text):
        return os.path.dirname(os.path.abspath(local_path(text)))
    root, rest, query = _cut(text)
    return f"{root}/{posixpath.dirname(rest.rstrip('/'))}".rstrip("/") + query


def address_name(address: str | os.PathLike[str]) -> str:
    """Return the last part of the path, or the bucket or host where there is none."""
    text = os.fspath(address)
    if not is_remote(text):
        return os.path.basename(os.path.normpath(local_path(text)))
    root, rest, _ = _cut(text)
    return posixpath.basename(rest.rstrip("/")) or root.rpartition("/")[2]


def redact(address: object) -> str:
    """Return an address without its password and its signature, see `redact_text`.

    Example:
        >>> redact("https://me:my 'secret'@host/x?sig=secret")
        'https://***@host/x?***'
    """
    return redact_text(str(address), is_address=True)


def shown_address(address: str | os.PathLike[str]) -> str:
    """Return an absolute address without passwords.

    Example:
        >>> shown_address("s3://bucket/x"), shown_address("/data/../x")
        ('s3://bucket/x', '/x')
    """
    text = os.fspath(address)
    return redact(text) if scheme_of(text) else os.path.abspath(text)


def same_dataset(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Return whether two addresses, shown or not, lead to the same place.

    Example:
        >>> same_dataset("/data/x/", "file:///data/y/../x"), same_dataset("/a/x", "/b/x")
        (True, False)
    """
    return os.fspath(one) == os.fspath(other) or _canonical(one) == _canonical(other)


def _canonical(address: str | os.PathLike[str]) -> str:
    text = os.fspath(address)
    try:
        return os.path.realpath(local_path(text))
    except ConfigError:  # remote
        return redact(text).rstrip("/")


def _dss_path(address: str) -> str:
    dataset, _, rest = address[len("dss://") :].partition("/")
    name, at, version = dataset.partition("@")
    cache = os.environ.get("NVDATASET_CACHE_DIR")
    if not (name and at and version):
        raise ConfigError(f"{address}: expected dss://DATASET@VERSION/PATH")
    if not cache:
        raise ConfigError(f"{address}: set NVDATASET_CACHE_DIR to the folder of dss datasets")
    return os.path.join(cache, name, version, rest)


def _cut(address: str) -> tuple[str, str, str]:
    """Return scheme and bucket or host of a URL, the rest of its path, and its query."""
    scheme = scheme_of(address)
    path, query = _cut_query(address[len(scheme) + 3 :], scheme)
    authority, _, rest = path.partition("/")
    return f"{scheme}://{authority}", rest, query


def _cut_query(text: str, scheme: str) -> tuple[str, str]:
    """Return a path and its query, with the question mark."""
    if scheme not in _QUERY_SCHEMES:
        return text, ""
    path, mark, query = text.partition("?")
    return path, mark + query
