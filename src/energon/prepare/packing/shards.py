"""Pack shards anew: tar archives, compressed ones too, to shards of another size."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal, Self

from energon.errors import FormatError, TruncatedError
from energon.extra import needs_extra
from energon.formats.tar import split_name
from energon.io.epath import AnyPath
from energon.prepare.files import reporting
from energon.prepare.packing.place import names_below, open_ascending
from energon.prepare.shards import COMPRESSED

SUFFIXES = (".tar", *COMPRESSED)


class ShardSource:
    """The samples of all archives below a folder, in the order of their paths.

    Args:
        folder: The folder.
        prefix_keys: Whether the key of each sample begins with the name of its archive.
    """

    def __init__(self, folder: AnyPath, *, prefix_keys: bool = False) -> None:
        self.folder = folder
        self.prefix_keys = prefix_keys
        self.archives = [name for name in names_below(folder) if name.endswith(SUFFIXES)]

    def split_names(self) -> list[str]:
        return [""]

    def samples(self, split: str, start: int) -> Iterator[Mapping[str, Any]]:
        for name in self.archives:
            for sample in self._of(name, start):
                start -= 1
                if sample is not None:
                    yield sample

    def skipped(self) -> list[str]:
        return []

    def _of(self, name: str, start: int) -> Iterator[Mapping[str, Any] | None]:
        """Yield the samples of an archive; None for those before `start`, which are not read."""
        path = self.folder / name
        prefix = f"{_stem(name)}/" if self.prefix_keys else ""
        current: str | None = None
        sample: dict[str, Any] = {}
        try:
            with reporting(path), _open(path) as tar:
                for member in tar:
                    names = split_name(member.name) if member.isreg() else None
                    if names is None:
                        continue
                    key, part = names
                    if key != current:
                        if current is not None:
                            yield sample or None
                        current, sample = key, {}
                        start -= 1
                    if start < 0:
                        sample["__key__"] = prefix + key
                        sample[part] = _content(tar, member)
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise FormatError(f"{path}: {error}; restore the archive or write it again") from error
        if current is not None:
            yield sample or None


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    data = file.read() if file is not None else b""
    if len(data) != member.size:
        raise TruncatedError(f"{member.name} is cut off, restore the archive")
    return data


@contextmanager
def _open(path: AnyPath) -> Iterator[tarfile.TarFile]:
    if not path.name.endswith((".tar.zst", ".tzst")):
        with open_ascending(path) as file, _read_tar(file, "r:*") as tar:
            yield tar
        return
    with needs_extra("formats", f"{path}: zst needs zstandard"):
        import zstandard
    with open_ascending(path) as file:
        stream: BinaryIO = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        try:
            with _read_tar(stream, "r|") as tar:
                yield tar
        except zstandard.ZstdError as error:
            raise FormatError(f"{path}: {error}; restore the archive") from error


def _read_tar(file: BinaryIO, mode: Literal["r:*", "r|"]) -> tarfile.TarFile:
    return tarfile.open(fileobj=file, mode=mode, tarinfo=_Member)


class _Member(tarfile.TarInfo):
    """A member of an archive that has to have an end marker."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.EmptyHeaderError as error:  # type: ignore[attr-defined]
            raise EOFError(
                "ends without the end marker of a tar archive; members may be missing"
            ) from error


def _stem(name: str) -> str:
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name
