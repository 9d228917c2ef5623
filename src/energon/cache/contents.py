"""Fetched files on local disk, shared by all processes that use one folder.

| path | content |
|---|---|
| `lock` | held, shared, by every user of the folder |
| `usage` | see `io/disk_cache.py` |
| `??/KEY` | a file |
| `users/ID.lock` | held by one user |
| `users/ID/KEY` | a file that this user has pinned: another link to it |

A file that has two links is pinned, so it is not deleted for room. Each begins with a header and
a note of its source, so that truncated or overwritten files are detected and fetched again:

| bytes | content |
|---|---|
| 4 | `ENC2` |
| 4 | CRC-32 of note and data |
| 4 | bytes of the note |
| 8 | bytes of the data |
| … | the note: JSON of the source |
| … | the data |

The folder lives as long as it has users: the last one deletes it. The system releases the locks of
users that were killed; the next user of the same parent folder deletes what they have left. A disk
that is full or failing is not used for a while, as if there were no cache.

Files are stored raw, or decoded in a format of its own: a JSON header describes the value; arrays
and bytes follow unencoded.

| bytes | content |
|---|---|
| 4 | bytes of the JSON (uint32, little-endian) |
| … | JSON: `value`, and `sizes` of the blocks |
| … | the blocks, each beginning at a multiple of 64 |

In `value`, a list is `["list", items]`, and so on: everything except None, bools, numbers and
strings is such a pair.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from uuid import uuid4

import numpy as np

from energon.errors import ConfigError, EnergonError, FormatError
from energon.formats.text import parse_json
from energon.io.atomic import FileLock, is_full
from energon.io.disk_cache import CachePolicy, DiskCache, touch
from energon.io.threads import fork_safe_lock
from energon.samples.provenance import SourceInfo
from energon.sources.files.store import FileStore

FOLDER_PREFIX = "energon-cache-"
CACHE_RETRY_SECONDS = 30.0
"""How long not to write to a disk that was full."""
FULL_PAUSE = 10
"""How often the time of a scan that made no room passes before the next one."""

_MAGIC = b"ENC2"
_HEADER = struct.Struct("<4sIIQ")
_LOCK = "lock"
_USERS = "users"

CachedContent = tuple[bytes, SourceInfo]
"""The stored form of a file, and its source."""
Stored = Literal["stored", "full", "failed"]


class CacheLimits(NamedTuple):
    """Limits on the contents of a cache."""

    max_bytes: int
    max_count: int


def _entries(folder: Path) -> Iterator[Path]:
    yield from folder.glob("??/*")
    for path in folder.glob(f"{_USERS}/*/*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_nlink == 1:
                yield path  # being written, private, or deleted by others


_CONTENTS = CachePolicy(
    entries=_entries,
    is_in_use=lambda path, status: status.st_nlink > 1 or path.parent.parent.name == _USERS,
    warning="cache %s: %s; files are read from their stores instead. Lower max_cache_size_gbytes, "
    "or name another parent_cache_dir",
)


class SharedContents:
    """Files in a folder that is deleted with its last user. May be used by many threads.

    Args:
        parent: The folder to create it in.
        name: Processes that use the same name share the folder.
        limits: Limits for all processes together.

    Raises:
        ConfigError: If the parent is not writable for another reason than a full disk.
    """

    def __init__(self, parent: Path, name: str, limits: CacheLimits) -> None:
        self.limits = limits
        self.refused = 0
        self._parent = parent
        self._name = name
        self._joined: _User | None = None
        self._mutex = fork_safe_lock()
        self._retry_at = self._full_until = 0.0
        self._closed = False
        self._user()

    @property
    def path(self) -> Path | None:
        """The folder; None while the disk has no room for it."""
        user = self._joined
        return None if user is None else user.folder

    def pinned_path(self, key: str) -> Path | None:
        """Return the path of a pinned file; None without a folder."""
        user = self._joined
        return None if user is None else user.pin_path(key)

    def pin(self, key: str) -> bool:
        """Keep a file until `release`; return False if it is missing."""
        user = self._user()
        if user is None:
            return False
        try:
            os.link(user.path(key), user.pin_path(key))
        except FileExistsError:
            pass
        except OSError:
            return False
        touch(user.pin_path(key))
        return True

    def read(self, key: str) -> CachedContent | None:
        """Return a file; None if it is missing or damaged."""
        user = self._user()
        if user is None:
            return None
        for path in (user.pin_path(key), user.path(key)):
            with contextlib.suppress(OSError):
                with open(path, "rb", buffering=0) as file:
                    content = _read(file)
                if content is not None:
                    touch(path)
                    return content
                path.unlink()
        return None

    def store(
        self, key: str, content: CachedContent, *, pin: bool = True, shared: bool = True
    ) -> Stored:
        """Keep a file as long as there is room.

        Args:
            key: Its key.
            content: The file.
            pin: Whether to keep it until `release` in any case.
            shared: Whether other users may read it, and it stays after `release`.

        Returns:
            "full" if there is no room until something is released, "failed" if it cannot be
            written to disk.
        """
        user = self._user()
        if user is None or self._is_resting():
            self.refused += 1
            return "failed"
        if pin and shared and self.pin(key):
            return "stored"
        parts = _pack(content)
        if sum(map(len, parts)) > self.limits.max_bytes:
            return "failed"
        paths = [user.path(key)] * shared + [user.pin_path(key)] * pin
        try:
            return "stored" if self._write(user, parts, paths) else "full"
        except OSError as error:
            self._warn(error)
            self.refused += 1
            return "failed"

    def release(self, keys: Iterable[str]) -> None:
        """Allow files to be deleted for room."""
        user = self._joined
        if user is not None:
            for key in keys:
                user.pin_path(key).unlink(missing_ok=True)

    def usage(self) -> tuple[int, int]:
        """Return the size in bytes and the number of files, of all processes."""
        user = self._user()
        try:
            return (0, 0) if user is None else user.cache.usage()
        except OSError as error:
            self._warn(error)
            return 0, 0

    def close(self) -> None:
        """Stop using the folder."""
        with self._mutex:
            self._closed = True
            user, self._joined = self._joined, None
        if user is not None:
            user.leave()

    def _write(self, user: _User, parts: list[bytes], paths: list[Path]) -> bool:
        """Write a file; return False if there is no room."""
        began = time.monotonic()
        if began < self._full_until:
            return False
        if user.write(parts, paths) or (user.remove_killed() and user.write(parts, paths)):
            return True
        now = time.monotonic()
        self._full_until = now + FULL_PAUSE * (now - began)
        return False

    def _user(self) -> _User | None:
        """Return this user of the folder, which joins it as soon as the disk has room."""
        if self._joined is not None:
            return self._joined
        with self._mutex:
            if self._joined is None and not self._closed and not self._is_resting():
                try:
                    self._joined = _join(self._parent, self._name, self.limits)
                except OSError as error:
                    if isinstance(error, EnergonError):
                        raise
                    self._warn(error)
            return self._joined

    def _is_resting(self) -> bool:
        return time.monotonic() < self._retry_at

    def _warn(self, error: OSError) -> None:
        self._retry_at = time.monotonic() + CACHE_RETRY_SECONDS
        _CONTENTS.warn(self.path or self._parent, error)


class _User:
    """A user of a folder that exists, until `leave`.

    Raises:
        OSError: If the disk is full.
    """

    def __init__(self, lock: FileLock, limits: CacheLimits) -> None:
        self.folder = lock.path.parent
        self.cache = DiskCache(
            self.folder,
            max_bytes=limits.max_bytes,
            max_count=limits.max_count,
            policy=_CONTENTS,
        )
        users = self.folder / _USERS
        users.mkdir(exist_ok=True)
        self._lock = lock
        self._own_lock = FileLock(users / f"{uuid4().hex}.lock", permissions=0o600)
        self._own_lock.hold()
        self._pins = self._own_lock.path.with_suffix("")
        self._pins.mkdir()

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def pin_path(self, key: str) -> Path:
        return self._pins / key

    def write(self, parts: list[bytes], paths: list[Path]) -> bool:
        """Write a file that appears at these paths once it is complete; False without room."""
        temporary = self._pins / f"{threading.get_ident()}.tmp"
        size = sum(map(len, parts))
        try:
            with self.cache.reserve(size) as has_room:
                if not has_room:
                    return False
                temporary.touch(0o600)
                os.truncate(temporary, size)
            _write(temporary, parts)
            with self.cache.exclusive():  # a scan counts each file once
                for path in paths:
                    path.parent.mkdir(exist_ok=True)
                    with contextlib.suppress(FileExistsError):
                        os.link(temporary, path)
                temporary.unlink()
            return True
        finally:
            temporary.unlink(missing_ok=True)

    def remove_killed(self) -> bool:
        """Remove the pins of users that were killed; return whether there were any."""
        locks = [path for path in self._pins.parent.glob("*.lock") if path != self._own_lock.path]
        removed = [_delete_abandoned(path, path.with_suffix("")) for path in locks]
        return any(removed)

    def leave(self) -> None:
        """Release all pins; the last user deletes the folder."""
        _delete_if_unused(self._own_lock, self._pins)
        _delete_if_unused(self._lock, self.folder)


def _join(parent: Path, name: str, limits: CacheLimits) -> _User:
    """Join, or create, a folder below `parent`.

    Raises:
        ConfigError: If the parent is not writable.
        OSError: If the disk is full.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        delete_abandoned_folders(parent)
        return _User(_hold_folder(parent / f"{_prefix()}{name}"), limits)
    except OSError as error:
        if is_full(error):
            raise
        raise ConfigError(
            f"{parent}: cannot be used for a cache: {error}; name a folder on a local disk with "
            "parent_cache_dir"
        ) from error


def delete_abandoned_folders(parent: Path) -> None:
    """Delete the folders of this user below `parent` that no process uses any more."""
    for folder in parent.glob(f"{_prefix()}*"):
        _delete_abandoned(folder / _LOCK, folder)


def _prefix() -> str:
    return f"{FOLDER_PREFIX}{os.getuid()}-"


def _hold_folder(folder: Path) -> FileLock:
    while True:
        # Private to this user: cached data may be confidential.
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = FileLock(folder / _LOCK, permissions=0o600)
        except FileNotFoundError:
            continue  # the last user has left and deleted the folder
        lock.hold(shared=True)
        if lock.is_at_path:
            return lock
        lock.close()


def _delete_abandoned(path: Path, folder: Path) -> bool:
    """Delete a folder whose users were killed; return whether that was so."""
    try:
        return _delete_if_unused(FileLock(path, create=False), folder)
    except OSError:
        return False


def _delete_if_unused(lock: FileLock, folder: Path) -> bool:
    """Close a lock; delete it and the folder if no other user holds it."""
    with lock:
        if not lock.hold(wait=False) or not lock.is_at_path:
            return False
        shutil.rmtree(folder, ignore_errors=True)
        lock.delete()
        return True


def _pack(content: CachedContent) -> list[bytes]:
    data, source = content
    note = json.dumps(
        [source.dataset_path, source.index, source.shard_name, source.file_names]
    ).encode()
    checksum = zlib.crc32(data, zlib.crc32(note))
    return [_HEADER.pack(_MAGIC, checksum, len(note), len(data)), note, data]


def _read(file: FileIO) -> CachedContent | None:
    """Return the content of a file; None if it is damaged."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, checksum, note_bytes, data_bytes = _HEADER.unpack(header)
    size = _HEADER.size + note_bytes + data_bytes
    if magic != _MAGIC or os.fstat(file.fileno()).st_size != size:
        return None
    note, data = file.read(note_bytes), file.read(data_bytes)
    if zlib.crc32(data, zlib.crc32(note)) != checksum:
        return None
    path, index, shard, names = parse_json(note, origin="the note")
    return data, SourceInfo(path, index, shard, tuple(names))


def _write(path: Path, parts: list[bytes]) -> None:
    # Unbuffered, since a buffer would be written again when the file is closed.
    with open(path, "r+b", buffering=0) as file:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]


_LENGTH = struct.Struct("<I")
_ALIGN = 64
_NOTHING = np.empty(0, np.uint8)

Blocks = list[Any]


def encode(value: Any) -> bytes:
    """Encode None, numbers, str, bytes, arrays, tensors, and lists, tuples or dicts of these.

    Raises:
        TypeError: If the value contains anything else.
    """
    blocks: Blocks = []
    tree = _encode(value, blocks)
    text = json.dumps({"value": tree, "sizes": [block.nbytes for block in blocks]}).encode()
    parts = [_LENGTH.pack(len(text)), text]
    position = _LENGTH.size + len(text)
    for block in blocks:
        gap = -position % _ALIGN
        parts += [bytes(gap), block]
        position += gap + block.nbytes
    return b"".join(parts)


def decode(data: bytes | memoryview) -> Any:
    """Decode what `encode` returned. Arrays are writable copies."""
    (length,) = _LENGTH.unpack_from(data)
    position = _LENGTH.size + length
    header = parse_json(bytes(data[_LENGTH.size : position]), origin="cached value")
    blocks: Blocks = []
    for size in header["sizes"]:
        position += -position % _ALIGN
        blocks.append(memoryview(data)[position : position + size])
        position += size
    return _decode(header["value"], blocks)


def _encode(value: Any, blocks: Blocks) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [kind.__name__, [_encode(item, blocks) for item in value]]
    if kind is dict:
        pairs = [[_encode(key, blocks), _encode(item, blocks)] for key, item in value.items()]
        return ["dict", pairs]
    if kind is bytes:
        return ["bytes", _add(memoryview(value), blocks)]
    if kind is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
        header = [value.dtype.str, list(value.shape)]
        return ["array", [*header, _add(_bytes_of(value), blocks)]]
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        return _encode_tensor(value, blocks)
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} cannot be cached as bytes")


def _encode_tensor(value: Any, blocks: Blocks) -> Any:
    import torch

    if value.layout is not torch.strided or value.is_quantized or value.is_complex():
        raise TypeError(f"a tensor of layout {value.layout} and {value.dtype} cannot be cached")
    plain = value.detach().cpu().contiguous()
    header = [str(value.dtype).removeprefix("torch."), list(value.shape)]
    flat = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else _NOTHING
    return ["tensor", [*header, _add(_bytes_of(flat), blocks)]]


def _bytes_of(array: Any) -> memoryview:
    flat: memoryview = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return flat


def _add(block: memoryview, blocks: Blocks) -> int:
    blocks.append(block)
    return len(blocks) - 1


def _decode(tree: Any, blocks: Blocks) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, content = tree
    return _DECODERS[kind](content, blocks)


def _decode_array(content: Any, blocks: Blocks) -> Any:
    dtype, shape, number = content
    return np.frombuffer(blocks[number], np.dtype(dtype)).reshape(shape).copy()


def _decode_tensor(content: Any, blocks: Blocks) -> Any:
    import torch

    dtype, shape, number = content
    if 0 in shape:
        return torch.empty(shape, dtype=_dtype(dtype))
    flat = torch.from_numpy(np.frombuffer(blocks[number], np.uint8).copy())
    return flat.view(_dtype(dtype)).reshape(shape)


def _dtype(name: str) -> Any:
    """Return the torch dtype of this name; other attributes of torch are refused."""
    import torch

    dtype = vars(torch).get(name)
    if type(dtype) is not torch.dtype:
        raise FormatError(f"a cached tensor is of {name!r}, which is not a dtype of torch")
    return dtype


_DECODERS: dict[str, Callable[[Any, Blocks], Any]] = {
    "list": lambda items, blocks: [_decode(item, blocks) for item in items],
    "tuple": lambda items, blocks: tuple(_decode(item, blocks) for item in items),
    "dict": lambda pairs, blocks: {_decode(k, blocks): _decode(v, blocks) for k, v in pairs},
    "bytes": lambda number, blocks: bytes(blocks[number]),
    "array": _decode_array,
    "tensor": _decode_tensor,
}


class Form(Protocol):
    """The form in which contents are stored."""

    def key(self, store: FileStore[Any], name: str) -> str:
        """Return the key of a file."""

    def fetch(self, store: FileStore[Any], name: str) -> CachedContent:
        """Read a file, and return its stored form and where it came from."""

    def value(self, store: FileStore[Any], name: str, data: bytes) -> Any:
        """Return the value of a file from its stored form."""


class RawForm:
    """Stores files as they are, and decodes them on every use."""

    def key(self, store: FileStore[Any], name: str) -> str:
        """Return the key of a file."""
        return _digest((store.identity, store.full_name(name)))

    def fetch(self, store: FileStore[Any], name: str) -> CachedContent:
        """Return the file, and where it came from."""
        return store.get_raw(name)

    def value(self, store: FileStore[Any], name: str, data: bytes) -> Any:
        """Return the value that the store decodes the file to."""
        return store.decode(name, data)


class DecodedForm:
    """Decodes files in the background and stores their values, which are larger but ready to use.

    A value that would need pickle is stored as the file it was decoded from.
    """

    def key(self, store: FileStore[Any], name: str) -> str:
        """Return the key of a value."""
        return _digest(("decoded", store.decoded_identity, store.full_name(name)))

    def fetch(self, store: FileStore[Any], name: str) -> CachedContent:
        """Return the value as bytes, and where its file came from."""
        raw, source = store.get_raw(name)
        try:
            return _VALUE + encode(store.decode(name, raw)), source
        except TypeError:
            return _FILE + raw, source

    def value(self, store: FileStore[Any], name: str, data: bytes) -> Any:
        """Return the value."""
        content = memoryview(data)[1:]
        if data[:1] == _VALUE:
            return decode(content)
        return store.decode(name, bytes(content))


_VALUE, _FILE = b"v", b"f"


def _digest(identity: Any) -> str:
    return hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()
