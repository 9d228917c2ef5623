"""Pack what is packed already: tar archives, compressed ones too, and files of other libraries.

Those are chunks of MosaicML Streaming (MDS) and of LitData, and datasets of Hugging Face, saved
to a folder or by name.
"""

from __future__ import annotations

import lzma
import shutil
import tarfile
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from energon.errors import ConfigError, FormatError, TruncatedError, needs_extra
from energon.formats.chunks.litdata import litdata_decoder, litdata_items, parse_litdata_index
from energon.formats.chunks.mds import MdsShard, mds_decoder, parse_mds_index
from energon.formats.chunks.records import INDEX, fields, records, unpack
from energon.formats.json_text import parse_json
from energon.formats.meta.split import splits_by_name
from energon.formats.tar.headers import split_name
from energon.io.address import redact
from energon.io.epath import AnyPath, EPath, any_path
from energon.io.files import list_files, read_document
from energon.prepare.files import reporting
from energon.prepare.importers.row import PackSource, RowRules, Wanted, every
from energon.prepare.importers.selection import (
    HUGGING_FACE,
    FileSelection,
    is_about_data,
    open_ascending,
)
from energon.prepare.index.index import COMPRESSED
from energon.utf8 import decode_utf8

SUFFIXES = (".tar", *COMPRESSED)
INDEX_SUFFIXES = (".idx", ".parts", ".json")
"""Of files that may lie beside archives and are about them."""


def is_archive(name: str) -> bool:
    """Return whether a file is a tar archive, by its name."""
    return name.lower().endswith(SUFFIXES)


class ArchiveSource(PackSource):
    """The samples of archives, in the order of their paths.

    They have splits if the paths of all archives say which they are in.

    Args:
        files: The archives, maybe with other files between them.
        prefix_keys: Whether the key of each sample begins with the name of its archive.
    """

    def __init__(self, files: FileSelection, *, prefix_keys: bool = False) -> None:
        self.folder = files.folder
        self.prefix_keys = prefix_keys
        archives = [name for name in files.names if is_archive(name)]
        self._left_out = [
            f"{name}: no archive, as others here"
            for name in files.names
            if not (is_archive(name) or name.endswith(INDEX_SUFFIXES) or is_about_data(name))
        ]
        self._splits = splits_by_name(archives, by_file=True)

    def split_names(self) -> list[str]:
        return list(self._splits)

    def samples(
        self, split: str, start: int = 0, wanted: Wanted = every
    ) -> Iterator[Mapping[str, Any]]:
        for name in self._splits[split]:
            for sample in self._of(name, start, wanted):
                start -= 1
                if sample is not None:
                    yield sample

    def skipped(self) -> list[str]:
        return self._left_out

    def _of(self, name: str, start: int, wanted: Wanted) -> Iterator[Mapping[str, Any] | None]:
        """Yield the samples of an archive; None for those that are not wanted, and not read."""
        path = self.folder / name
        prefix = f"{_stem(name)}/" if self.prefix_keys else ""
        current: str | None = None
        is_wanted = False
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
                        is_wanted = start < 0 and wanted(prefix + key, row)
                    if is_wanted:
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


def read_json_index(folder: AnyPath) -> Any:
    """Return what the index of a folder of chunks says.

    Raises:
        FormatError: If it is not JSON.
        StorageError: If it cannot be read.
    """
    path = folder / INDEX
    with reporting(path):
        text = decode_utf8(read_document(path), origin=str(path))
    return parse_json(text, origin=str(path), hint="copy the folder again, or write it again")


class MdsSource(PackSource):
    """The samples of a dataset, in the order of its shards. Images stay encoded as they are.

    Args:
        folder: The folder with `index.json`.
        rules: How columns become parts.

    Raises:
        FormatError: If the index is invalid.
        ConfigError: If a column has an encoding that is not known.
    """

    def __init__(self, folder: AnyPath, rules: RowRules) -> None:
        self.folder = folder
        self.rules = rules
        self.shards = parse_mds_index(read_json_index(folder), origin=str(folder / INDEX))
        for shard in self.shards:
            self._decoders(shard)

    def samples(
        self, split: str, start: int = 0, wanted: Wanted = every
    ) -> Iterator[Mapping[str, Any]]:
        number = 0
        for shard in self.shards:
            path = self.folder / shard.name
            skip = min(max(0, start - number), shard.count)
            number += skip
            if skip == shard.count:
                continue
            for row in self._rows(shard, skip):
                sample = self.rules.sample(row, number, str(path))
                number += 1
                if sample is not None and wanted(sample["__key__"], row):
                    yield sample

    def _rows(self, shard: MdsShard, start: int) -> Iterator[dict[str, Any]]:
        path = self.folder / shard.name
        with reporting(path):
            data = path.read_bytes()
        if shard.compression:
            data = unpack(data, path, shard.compression)
        decoders = self._decoders(shard)
        for record in records(data, path, start):
            contents = fields(record, shard.sizes, path)
            yield {
                name: decode(content)
                for name, decode, content in zip(shard.names, decoders, contents, strict=True)
            }

    def _decoders(self, shard: MdsShard) -> list[Any]:
        columns = zip(shard.encodings, shard.names, strict=True)
        return [mds_decoder(encoding, name, self.folder) for encoding, name in columns]


class LitDataSource(PackSource):
    """The items of a dataset, in the order of its chunks. JPEGs stay encoded as they are.

    Args:
        folder: The folder with `index.json`.
        rules: How the entries of items become parts. Items that are not dicts have the entries
            `0`, `1` and so on.

    Raises:
        FormatError: If the index is invalid.
        ConfigError: If items hold something that is not known.
    """

    def __init__(self, folder: AnyPath, rules: RowRules) -> None:
        self.folder = folder
        self.rules = rules
        self._index = parse_litdata_index(read_json_index(folder), origin=str(folder / INDEX))
        self._decoders = [litdata_decoder(kind, folder) for kind in self._index.formats]

    def samples(
        self, split: str, start: int = 0, wanted: Wanted = every
    ) -> Iterator[Mapping[str, Any]]:
        number = 0
        for name, count, _ in self._index.chunks:
            path = self.folder / name
            skip = min(max(0, start - number), count)
            number += skip
            if skip == count:
                continue
            with reporting(path):
                data = path.read_bytes()
            index = self._index
            for record in litdata_items(
                data, path, compression=index.compression, level=index.level, start=skip
            ):
                row = self._row(record, path)
                sample = self.rules.sample(row, number, str(path))
                number += 1
                if sample is not None and wanted(sample["__key__"], row):
                    yield sample

    def _row(self, record: memoryview, path: AnyPath) -> dict[str, Any]:
        contents = fields(record, [None] * len(self._decoders), path)
        leaves = zip(self._decoders, contents, strict=True)
        return self._index.item([decode(content) for decode, content in leaves])


class HuggingFaceSource(PackSource):
    """The rows of a dataset, each of its splits a split. Media stay encoded as they are.

    Class labels are numbers, with their names in a further column: `label_name` beside `label`.

    Args:
        address: A folder that `save_to_disk` wrote, or `hf://NAME`, or `hf://NAME:CONFIG`.
        rules: How rows become samples.

    Raises:
        ConfigError: If it cannot be opened.
        MissingExtraError: If `datasets` is not installed.
    """

    def __init__(self, address: str, rules: RowRules) -> None:
        self.address = redact(address)
        self.rules = rules
        self._left_out: list[str] = []
        opened = _open_hugging_face(self._here(address))
        self._splits: dict[str, Any] = (
            dict(opened.items()) if hasattr(opened, "items") else {"": opened}
        )

    def _here(self, address: str) -> str:
        """Return where a saved folder is on this machine: its files are mapped into memory."""
        folder = any_path(address) if not address.startswith(HUGGING_FACE) else None
        if not isinstance(folder, EPath):
            return address if folder is None else str(folder)
        copy = tempfile.mkdtemp(prefix="energon-pack-")
        weakref.finalize(self, shutil.rmtree, copy, ignore_errors=True)
        for found in list_files(folder):
            target = Path(copy, found.key)
            target.parent.mkdir(parents=True, exist_ok=True)
            (folder / found.key).copy(EPath(target))
        return copy

    def split_names(self) -> list[str]:
        return list(self._splits)

    def samples(
        self, split: str, start: int = 0, wanted: Wanted = every
    ) -> Iterator[Mapping[str, Any]]:
        rows = _encoded(self._splits[split])
        classes = _class_columns(self._splits[split])
        origin = f"{self.address} {split}".strip()
        found = 0
        for number, row in enumerate(rows):
            row = _with_class_names(row, classes)
            sample = self.rules.sample(row, number, origin)
            if sample is None:
                self._left_out.append(f"{origin}, row {number + 1}: a file is missing")
                continue
            found += 1
            if found > start:
                if split and self.rules.key_column is None:
                    sample["__key__"] = f"{split}/{sample['__key__']}"
                if wanted(sample["__key__"], row):
                    yield sample

    def skipped(self) -> list[str]:
        return self._left_out


def _open_hugging_face(address: str) -> Any:
    with needs_extra("huggingface", f"{address}: needs Hugging Face datasets"):
        import datasets
    try:
        if not address.startswith(HUGGING_FACE):
            return datasets.load_from_disk(address)
        name, _, config = (
            address.removeprefix(HUGGING_FACE).removeprefix("datasets/").partition(":")
        )
        return datasets.load_dataset(name, config or None, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{address}: {error}") from error


def _class_columns(dataset: Any) -> dict[str, tuple[str, Any]]:
    """Return for each column of class labels a new column for their names, and the feature."""
    found = {}
    for column, feature in (dataset.features or {}).items():
        inner = getattr(feature, "feature", feature)
        if hasattr(inner, "int2str") and f"{column}_name" not in dataset.features:
            found[column] = (f"{column}_name", inner)
    return found


def _with_class_names(
    row: Mapping[str, Any], classes: Mapping[str, tuple[str, Any]]
) -> Mapping[str, Any]:
    """Return a row with the names of its class labels; those that are not known have none."""
    if not classes:
        return row
    names = {name: _names_of(row[column], feature) for column, (name, feature) in classes.items()}
    return {**row, **names}


def _names_of(label: Any, feature: Any) -> Any:
    if isinstance(label, list):
        return [_names_of(each, feature) for each in label]
    known = label is not None and 0 <= label < feature.num_classes
    return feature.int2str(label) if known else None


def _encoded(dataset: Any) -> Any:
    """Return a dataset whose media are bytes as they were stored, and not decoded."""
    for name, feature in (dataset.features or {}).items():
        if hasattr(feature, "decode"):
            dataset = dataset.cast_column(name, type(feature)(decode=False))
    return dataset
