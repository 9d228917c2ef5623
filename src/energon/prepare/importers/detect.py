"""Detect the kind of a source to pack, and open it: archives, datasets of libraries, and others."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from energon.decode.sample_decoder import is_media
from energon.errors import ConfigError, needs_extra
from energon.formats.meta.info import guess_splits
from energon.formats.tar.headers import split_name
from energon.formats.tar.parser import SampleParser
from energon.formats.tar.stream import StreamReader
from energon.io.address import redact
from energon.io.atomic import temporary_folder
from energon.io.epath import AnyPath, EPath, any_path
from energon.io.files import is_pattern, list_files
from energon.limits import TAR_PART_BYTES, UNPACKED_BYTES
from energon.metadataset.kind import (
    ARROW_KEYS,
    TABLES,
    added_kind,
    added_kinds,
    kind_entry,
    load_attribute,
    object_keys,
    table_suffix,
)
from energon.prepare.files import reporting
from energon.prepare.importers import files as sources
from energon.prepare.importers.files import FolderSource, ImageFolderSource, is_metadata
from energon.prepare.importers.row import (
    DatasetRows,
    PackSource,
    RowRules,
    RuledRow,
    Selects,
    TabularSource,
    every,
)
from energon.prepare.importers.selection import (
    HUGGING_FACE,
    FileSelection,
    is_about_data,
    open_decompressed,
    select,
    split_datasets,
)
from energon.prepare.index import COMPRESSED_SHARDS

ARCHIVE_SUFFIXES = (".tar", *COMPRESSED_SHARDS)
INDEX_SUFFIXES = (".idx", ".parts", ".json")
"""Names of files next to archives that describe them."""


def is_archive(name: str) -> bool:
    """Return whether a file is a tar archive, judging by its name."""
    return name.lower().endswith(ARCHIVE_SUFFIXES)


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
        self._splits = guess_splits(archives, by_file=True, origin=str(files.folder))

    def samples(
        self, split: str, start: int = 0, is_selected: Selects = every
    ) -> Iterator[Mapping[str, Any]]:
        for name in self._splits[split]:
            prefix = f"{_stem(name)}/" if self.prefix_keys else ""
            chosen = _NeededFiles(start, is_selected, prefix, {"folder": name.rpartition("/")[0]})
            for sample in _read(self.folder / name, chosen):
                yield {**sample, "__key__": prefix + sample["__key__"]}
            start -= chosen.num_seen


class _NeededFiles:
    """Splits the names of files into key and part, and counts samples.

    Args:
        start: How many samples to skip.
        is_selected: Returns by key and row whether a sample is needed.
        prefix: What comes before keys.
        row: The same for all samples.
    """

    def __init__(
        self, start: int, is_selected: Selects, prefix: str, row: Mapping[str, Any]
    ) -> None:
        self.num_seen = 0
        self._start, self._is_selected = start, is_selected
        self._prefix, self._row = prefix, row
        self._key: str | None = None
        self._is_needed = False

    def __call__(self, name: str) -> tuple[str, str] | None:
        """Return key and part of a file; None if it is not needed, and not read."""
        names = split_name(name)
        if names is not None and names[0] != self._key:
            self._key = names[0]
            self._is_needed = self.num_seen >= self._start and self._is_selected(
                self._prefix + self._key, self._row
            )
            self.num_seen += 1
        return names if self._is_needed else None


def _read(path: AnyPath, chosen: _NeededFiles) -> Iterator[Mapping[str, Any]]:
    with reporting(path), open_decompressed(path, advice="restore the archive") as file:
        # What is compressed is decompressed anyway.
        is_compressed = not file.seekable()
        limit = UNPACKED_BYTES if is_compressed else TAR_PART_BYTES
        parser = SampleParser(str(path), split=chosen, part_limit=limit)
        reader = StreamReader(file, parser, reads_all=is_compressed)
        while (samples := reader.next_block()) is not None:
            yield from samples


def _stem(name: str) -> str:
    for suffix in sorted(ARCHIVE_SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


class HuggingFaceSource(TabularSource):
    """The rows of a dataset, with its splits. Media keep their encoding.

    Class labels are numbers, with their names in another column: `label_name` next to `label`.

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
        opened = _open_hugging_face(self._here(address))
        super().__init__(dict(opened.items()) if hasattr(opened, "items") else {"": opened})

    def _here(self, address: str) -> str:
        """Return the local path of a saved folder: its files are mapped into memory."""
        folder = any_path(address) if not address.startswith(HUGGING_FACE) else None
        if not isinstance(folder, EPath):
            return address if folder is None else str(folder)
        held = ExitStack()
        copy = held.enter_context(temporary_folder("pack"))
        weakref.finalize(self, held.close)
        for file in list_files(folder):
            target = copy / file.key
            target.parent.mkdir(parents=True, exist_ok=True)
            (folder / file.key).copy(EPath(target))
        return str(copy)

    def rows(self, split: str, start: int) -> tuple[int, Iterator[RuledRow]]:
        classes = _class_columns(self._splits[split])
        origin = f"{self.address} {split}".strip()
        prefix = _prefix(split, self.rules)
        return 0, (
            RuledRow(_with_class_names(row, classes), number, origin, self.rules, prefix)
            for number, row in enumerate(_encoded(self._splits[split]))
        )


def _prefix(split: str, rules: RowRules) -> str:
    """Return the prefix of keys that are numbers, which begin at 0 in every split."""
    return f"{split}/" if split and rules.key_column is None else ""


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
    classes = {}
    for column, feature in (dataset.features or {}).items():
        inner = getattr(feature, "feature", feature)
        if hasattr(inner, "int2str") and f"{column}_name" not in dataset.features:
            classes[column] = (f"{column}_name", inner)
    return classes


def _with_class_names(
    row: Mapping[str, Any], classes: Mapping[str, tuple[str, Any]]
) -> Mapping[str, Any]:
    """Return a row with the names of its class labels; unknown labels have none."""
    if not classes:
        return row
    names = {name: _names_of(row[column], feature) for column, (name, feature) in classes.items()}
    return {**row, **names}


def _names_of(label: Any, feature: Any) -> Any:
    if isinstance(label, list):
        return [_names_of(each, feature) for each in label]
    has_name = label is not None and 0 <= label < feature.num_classes
    return feature.int2str(label) if has_name else None


def _encoded(dataset: Any) -> Any:
    """Return a dataset whose media are bytes as they were stored, not decoded."""
    for name, feature in (dataset.features or {}).items():
        encoded = _encoded_feature(feature)
        if encoded != feature:
            dataset = dataset.cast_column(name, encoded)
    return dataset


def _encoded_feature(feature: Any) -> Any:
    """Return a feature that does not decode its media, also those in lists and structs."""
    if isinstance(feature, Mapping):
        return {name: _encoded_feature(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_encoded_feature(inner) for inner in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_encoded_feature(feature.feature))
    if hasattr(feature, "decode") and type(feature).__name__ != "Json":
        return replace(feature, decode=False)
    return feature


class KindSource(TabularSource):
    """The rows of a dataset of a kind that a package adds, see `KindEntry.rows`.

    Args:
        kind: The name of the kind.
        address: Path or address of the dataset.
        rules: How rows become samples.
    """

    def __init__(self, kind: str, address: str, rules: RowRules) -> None:
        self.rules = rules
        self._rows: DatasetRows = load_attribute(kind_entry(kind).rows)(address)
        super().__init__(dict.fromkeys(self._rows.split_names))

    def rows(self, split: str, start: int) -> tuple[int, Iterator[RuledRow]]:
        first = 0 if self.rules.skip_missing else start  # where each row is a sample
        prefix = _prefix(split, self.rules)
        return first, (
            RuledRow(row, number, origin, self.rules, prefix)
            for number, (row, origin) in enumerate(self._rows.read(split, first), first)
        )


HUGGING_FACE_KIND = "huggingface"
FILE_KINDS = ("folder", "table", "imagefolder", "shards")
"""Kinds of sources that consist of files, apart from datasets of other libraries."""


@dataclass(frozen=True)
class DetectedSource:
    """What is to be packed.

    Args:
        kind: One of `FILE_KINDS`, "huggingface", or a kind of dataset that has rows.
        address: Where it is, for datasets of other libraries.
        files: Its files, for all other kinds.
        notes: What the user should know about how it was detected.
    """

    kind: str
    address: str = ""
    files: FileSelection | None = None
    notes: tuple[str, ...] = ()


def find_source(
    addresses: Sequence[str], *, kind: str | None = None, target: AnyPath | None = None
) -> DetectedSource:
    """Return the source at some addresses.

    Args:
        addresses: A folder, files or patterns, or `hf://NAME`.
        kind: The kind of source, if it is known.
        target: Where it is packed to, which does not belong to the source.

    Raises:
        DatasetNotFoundError: If there is nothing.
        ConfigError: If it is of no kind that can be packed.
    """
    if kind is not None and kind not in (*FILE_KINDS, HUGGING_FACE_KIND):
        _check_has_rows(kind)
    library = _kind_of_library(addresses[0]) if kind is None else kind
    if library is not None and library not in FILE_KINDS:
        if len(addresses) > 1:
            raise ConfigError(f"{addresses[0]}: is a separate dataset; pack one at a time")
        return DetectedSource(library, addresses[0])
    files, datasets = split_datasets(select(addresses, target=target))
    source = DetectedSource(kind, files=files) if kind is not None else _find_files(files)
    notes = [f"skipped: {name}/: a separate dataset" for name in datasets]
    return replace(source, notes=(*source.notes, *notes))


def open_source(
    source: DetectedSource,
    rules: RowRules,
    *,
    prefix_keys: bool = False,
    as_files: bool = False,
    label_from_folder: bool = False,
) -> PackSource:
    """Open what is to be packed.

    Args:
        source: The result of `find_source`.
        rules: How rows become samples, if it has rows.
        prefix_keys: Whether to prefix keys with the name of their original shard.
        as_files: Whether to take each file as it is, even if it seems to hold many samples.
        label_from_folder: Whether the names of folders become labels.
    """
    if label_from_folder and source.kind != "folder":
        raise ConfigError(
            f"--label-from folder is for folders of files, and this is of kind {source.kind!r}"
        )
    if source.kind not in FILE_KINDS:
        if source.kind == HUGGING_FACE_KIND:
            return HuggingFaceSource(source.address, rules)
        return KindSource(source.kind, source.address, rules)
    if source.files is None:
        raise ConfigError(f"kind {source.kind!r} needs files")
    if source.kind == "folder":
        return FolderSource(source.files, as_files=as_files, label_from_folder=label_from_folder)
    if source.kind == "imagefolder":
        return ImageFolderSource(source.files, rules)
    if source.kind == "shards":
        return ArchiveSource(source.files, prefix_keys=prefix_keys)
    return sources.open_tables(source.files, rules)


def complete_rules(source: DetectedSource, rules: RowRules) -> tuple[RowRules, list[str]]:
    """Return the rules for rows of tables, with detected columns of files.

    Returns:
        The rules, and what the user should know about them.
    """
    if isinstance(rules.root, Path) and not rules.root.is_dir():
        raise ConfigError(f"--root {rules.root}: no such folder")
    if source.kind != "table" or source.files is None or rules.file_columns:
        return rules, []
    first = next((name for name in source.files.names if sources.is_table(name)), None)
    if first is None:
        return rules, []
    path = source.files.folder / first
    opened = sources.Table.at(path, rules)
    columns = sources.find_file_columns(opened)
    root_note = ""
    if not columns and rules.root is None:
        roots = sources.find_roots(path, rules)
        if len(roots) > 1:
            raise ConfigError(
                f"{path}: the files that column {next(iter(roots.values()))[0]!r} names are in "
                f"several folders, {', '.join(map(str, roots))}; choose one with --root"
            )
        if roots:
            ((root, columns),) = roots.items()
            rules = replace(rules, root=root)
            root_note = f" in {root} (--root)"
    if columns:
        shown = " and ".join(f"column {column!r}" for column in columns)
        hold = "holds" if len(columns) == 1 else "hold"
        return replace(rules, file_columns=tuple(columns)), [
            f"{shown} {hold} paths{root_note}; packing those files. To keep the text: --part "
            f"{columns[0]}:txt"
        ]
    return rules, [
        f"column {column!r} seems to name files ({value!r}), but is kept as text: they are "
        f"not below {opened.root}; if they are elsewhere, run this again with --root FOLDER and "
        "--overwrite"
        for column, value in sources.look_like_files(opened)
    ]


def _find_files(files: FileSelection) -> DetectedSource:
    """Return the kind of files, from their names and, if these do not tell, their contents."""
    names = [name for name in files.names if not is_about_data(name)]
    if any(is_archive(name) for name in names):
        return DetectedSource("shards", files=files)
    metadata = [name for name in names if is_metadata(name)]
    if metadata and len(names) > len(metadata):
        return DetectedSource("imagefolder", files=files)
    tables = [name for name in names if _is_table(files, name, alone=len(names) == 1)]
    if tables and len(tables) == len(names):
        suffixes = sorted({str(table_suffix(name)) for name in tables})
        if len(suffixes) > 1:
            raise ConfigError(
                f"{files.folder}: has tables of several kinds, {', '.join(suffixes)}; choose some "
                f"by a pattern, like '{files.folder}/*{suffixes[0]}'"
            )
        return DetectedSource("table", files=files.only(tables))
    if len(names) == 1 and not files.is_folder:
        raise ConfigError(
            f"{files.folder / names[0]}: expected a folder, a tar archive or a table: "
            f"{', '.join(TABLES)}"
        )
    if len(tables) == 1 and "/" not in tables[0] and any(map(is_media, names)):
        path = files.folder / tables[0]
        here = sources.find_file_columns(sources.Table.at(path, RowRules()))
        if here or sources.find_roots(path, RowRules()):
            note = f"each row of {tables[0]} is a sample; --kind folder ignores the table"
            return DetectedSource("table", files=files.only(tables), notes=(note,))
    return DetectedSource("folder", files=files)


def _is_table(files: FileSelection, name: str, *, alone: bool) -> bool:
    """Return whether a file is a table; a JSON file is one if it has an array."""
    suffix = table_suffix(name)
    if suffix != ".json" or (alone and not files.is_folder):
        return suffix is not None
    if sum(each.lower().endswith(".json") for each in files.names) > sources.MAX_TABLE_ARRAYS:
        return False
    return sources.is_array(files.folder / name)


def _check_has_rows(kind: str) -> None:
    """Raise ConfigError if datasets of a kind have no rows that can be packed."""
    with_rows = [entry.name for entry in added_kinds() if entry.rows or entry.package]
    if kind not in with_rows:
        names = ", ".join((*FILE_KINDS, HUGGING_FACE_KIND, *with_rows))
        raise ConfigError(f"there is no kind of source {kind!r}; there are {names}")


def _kind_of_library(address: str) -> str | None:
    """Return which library wrote what is at an address; None if unknown."""
    if address.startswith(HUGGING_FACE) and not is_pattern(address):
        return HUGGING_FACE_KIND
    path = any_path(address)
    if path.is_file():
        return None
    added = added_kind(address)
    if added is not None and added.rows:
        return added.name
    saved = ("dataset_dict.json", "state.json")
    is_saved = any(
        (path / name).is_file() and not object_keys(str(path / name)).isdisjoint(ARROW_KEYS)
        for name in saved
    )
    return HUGGING_FACE_KIND if is_saved else None
