"""Pack the samples of tar archives, including compressed ones."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal, Self

from energon.errors import FormatError, TruncatedError, needs_extra
from energon.formats.meta.split import splits_by_name
from energon.formats.tar.headers import split_name
from energon.io.epath import AnyPath
from energon.prepare.files import reporting
from energon.prepare.importers.row import PackSource, Selects, every
from energon.prepare.importers.selection import (
    FileSelection,
    is_about_data,
    open_ascending,
)
from energon.prepare.index.index import COMPRESSED

SUFFIXES = (".tar", *COMPRESSED)
INDEX_SUFFIXES = (".idx", ".parts", ".json")
"""Names of files next to archives that describe them."""


def is_archive(name: str) -> bool:
    """Return whether a file is a tar archive, judging by its name."""
    return name.lower().endswith(SUFFIXES)


class ArchiveSource(PackSource):
    """The samples of archives, in the order of their paths.

    They have splits if the paths of all archives tell which split they are in.

    Args:
        files: The archives, possibly among other files.
        prefix_keys: Whether to prefix the key of each sample with the name of its archive.
    """

    def __init__(self, files: FileSelection, *, prefix_keys: bool = False) -> None:
        self.folder = files.folder
        self.prefix_keys = prefix_keys
        archives = [name for name in files.names if is_archive(name)]
        self._left_out = [
            f"{name}: not an archive, unlike other files here"
            for name in files.names
            if not (is_archive(name) or name.endswith(INDEX_SUFFIXES) or is_about_data(name))
        ]
        self._splits = splits_by_name(archives, by_file=True)

    def samples(
        self, split: str, start: int = 0, is_selected: Selects = every
    ) -> Iterator[Mapping[str, Any]]:
        for name in self._splits[split]:
            for sample in self._of(name, start, is_selected):
                start -= 1
                if sample is not None:
                    yield sample

    def _of(
        self, name: str, start: int, is_selected: Selects
    ) -> Iterator[Mapping[str, Any] | None]:
        """Yield the samples of an archive; None for samples that are not needed, and not read."""
        path = self.folder / name
        prefix = f"{_stem(name)}/" if self.prefix_keys else ""
        current: str | None = None
        is_needed = False
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
                        row = {"folder": name.rpartition("/")[0]}
                        is_needed = start < 0 and is_selected(prefix + key, row)
                    if is_needed:
                        sample["__key__"] = prefix + key
                        sample[part] = _content(tar, member)
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise FormatError(f"{path}: {error}; restore the archive or recreate it") from error
        if current is not None:
            yield sample or None


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    data = file.read() if file is not None else b""
    if len(data) != member.size:
        raise TruncatedError(f"{member.name} is truncated; restore the archive")
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
    """A member of an archive that must have an end marker."""

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
