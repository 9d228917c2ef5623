"""Pack shards anew: tar archives, compressed ones too, to shards of another size."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from energon.errors import FormatError, TruncatedError
from energon.extra import needs_extra
from energon.formats.tar import split_name
from energon.prepare.files import list_files, reporting
from energon.prepare.shards import COMPRESSED

SUFFIXES = (".tar", *COMPRESSED)


class ShardSource:
    """The samples of all archives below a folder, in the order of their paths.

    Args:
        folder: The folder.
        prefix_keys: Whether the key of each sample begins with the name of its archive.
    """

    def __init__(self, folder: Path, *, prefix_keys: bool = False) -> None:
        self.folder = folder
        self.prefix_keys = prefix_keys
        self.archives = [name for name in list_files(folder) if name.endswith(SUFFIXES)]

    def split_names(self) -> list[str]:
        return [""]

    def samples(self, split: str, start: int) -> Iterator[Mapping[str, Any]]:
        number = 0
        for name in self.archives:
            for sample in self._of(name):
                if number >= start:
                    yield sample
                number += 1

    def skipped(self) -> list[str]:
        return []

    def _of(self, name: str) -> Iterator[Mapping[str, Any]]:
        path = self.folder / name
        prefix = f"{_stem(name)}/" if self.prefix_keys else ""
        sample: dict[str, Any] = {}
        try:
            with reporting(path), _open(path) as tar:
                for member in tar:
                    names = split_name(member.name) if member.isreg() else None
                    if names is None:
                        continue
                    key, part = names
                    if sample and sample["__key__"] != prefix + key:
                        yield sample
                        sample = {}
                    sample["__key__"] = prefix + key
                    sample[part] = _content(tar, member)
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise FormatError(f"{path}: {error}; restore the archive or write it again") from error
        if sample:
            yield sample


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    data = file.read() if file is not None else b""
    if len(data) != member.size:
        raise TruncatedError(f"{member.name} is cut off, restore the archive")
    return data


@contextmanager
def _open(path: Path) -> Iterator[tarfile.TarFile]:
    if not path.name.endswith((".tar.zst", ".tzst")):
        with tarfile.open(path, "r:*") as tar:
            yield tar
        return
    with needs_extra("formats", f"{path}: zst needs zstandard"):
        import zstandard
    with open(path, "rb") as file:
        stream: BinaryIO = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        try:
            with tarfile.open(fileobj=stream, mode="r|", name=str(path)) as tar:
                yield tar
        except zstandard.ZstdError as error:
            raise FormatError(f"{path}: {error}; restore the archive") from error


def _stem(name: str) -> str:
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name
