"""Detect the kind of a source to pack, and open it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from energon.decode.sample_decoder import is_media
from energon.errors import ConfigError
from energon.io.epath import AnyPath, any_path
from energon.io.files import is_pattern
from energon.metadataset.kind import (
    ARROW_KEYS,
    TABLES,
    added_kinds,
    kind_entry,
    load_attribute,
    table_suffix,
)
from energon.metadataset.recognition import added_kind, object_keys
from energon.prepare.importers import table
from energon.prepare.importers.archive import ArchiveSource, is_archive
from energon.prepare.importers.folder import FolderSource, ImageFolderSource, is_metadata
from energon.prepare.importers.libraries import HuggingFaceSource
from energon.prepare.importers.row import DatasetRows, PackSource, RowRules, Selects, every
from energon.prepare.importers.selection import (
    HUGGING_FACE,
    FileSelection,
    is_about_data,
    select,
    split_datasets,
)


class KindSource(PackSource):
    """The rows of a dataset of a kind that a package adds, see `KindEntry.rows`.

    Args:
        kind: The name of the kind.
        address: Path or address of the dataset.
        rules: How rows become samples.
    """

    def __init__(self, kind: str, address: str, rules: RowRules) -> None:
        self.rules = rules
        self._rows: DatasetRows = load_attribute(kind_entry(kind).rows)(address)
        self._splits = dict.fromkeys(self._rows.split_names)

    def samples(
        self, split: str, start: int = 0, is_selected: Selects = every
    ) -> Iterator[Mapping[str, Any]]:
        for number, (row, origin) in enumerate(self._rows.read(split, start), start):
            sample = self.rules.sample(row, number, origin)
            if sample is None:
                continue
            if split and self.rules.key_column is None:
                sample["__key__"] = f"{split}/{sample['__key__']}"
            if is_selected(sample["__key__"], row):
                yield sample


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
    found = DetectedSource(kind, files=files) if kind is not None else _find_files(files)
    notes = [f"skipped: {name}/: a separate dataset" for name in datasets]
    return replace(found, notes=(*found.notes, *notes))


def open_source(
    found: DetectedSource,
    rules: RowRules,
    *,
    prefix_keys: bool = False,
    as_files: bool = False,
    label_from_folder: bool = False,
) -> PackSource:
    """Open what is to be packed.

    Args:
        found: The result of `find_source`.
        rules: How rows become samples, if it has rows.
        prefix_keys: Whether to prefix keys with the name of their original shard.
        as_files: Whether to take each file as it is, even if it seems to hold many samples.
        label_from_folder: Whether the names of folders become labels.
    """
    if label_from_folder and found.kind != "folder":
        raise ConfigError(
            f"--label-from folder is for folders of files, and this is of kind {found.kind!r}"
        )
    if found.kind not in FILE_KINDS:
        if found.kind == HUGGING_FACE_KIND:
            return HuggingFaceSource(found.address, rules)
        return KindSource(found.kind, found.address, rules)
    if found.files is None:
        raise ConfigError(f"kind {found.kind!r} needs files")
    if found.kind == "folder":
        return FolderSource(found.files, as_files=as_files, label_from_folder=label_from_folder)
    if found.kind == "imagefolder":
        return ImageFolderSource(found.files, rules)
    if found.kind == "shards":
        return ArchiveSource(found.files, prefix_keys=prefix_keys)
    return table.open_tables(found.files, rules)


def complete_rules(found: DetectedSource, rules: RowRules) -> tuple[RowRules, list[str]]:
    """Return the rules for rows of tables, with detected columns of files.

    Returns:
        The rules, and what the user should know about them.
    """
    if isinstance(rules.root, Path) and not rules.root.is_dir():
        raise ConfigError(f"--root {rules.root}: no such folder")
    if found.kind != "table" or found.files is None or rules.file_columns:
        return rules, []
    first = next((name for name in found.files.names if table.is_table(name)), None)
    if first is None:
        return rules, []
    path = found.files.folder / first
    opened = table.Table.at(path, rules)
    columns = table.find_file_columns(opened)
    where = ""
    if not columns and rules.root is None:
        roots = table.find_roots(path, rules)
        if len(roots) > 1:
            raise ConfigError(
                f"{path}: the files that column {next(iter(roots.values()))[0]!r} names are in "
                f"several folders, {', '.join(map(str, roots))}; choose one with --root"
            )
        if roots:
            ((root, columns),) = roots.items()
            rules = replace(rules, root=root)
            where = f" in {root} (--root)"
    if columns:
        shown = " and ".join(f"column {column!r}" for column in columns)
        hold = "holds" if len(columns) == 1 else "hold"
        return replace(rules, file_columns=tuple(columns)), [
            f"{shown} {hold} paths{where}; packing those files. To keep the text: --part "
            f"{columns[0]}:txt"
        ]
    return rules, [
        f"column {column!r} seems to name files ({value!r}), but is kept as text: they are "
        f"not below {opened.root}; if they are elsewhere, run this again with --root FOLDER and "
        "--overwrite"
        for column, value in table.look_like_files(opened)
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
        here = table.find_file_columns(table.Table.at(path, RowRules()))
        if here or table.find_roots(path, RowRules()):
            note = f"each row of {tables[0]} is a sample; --kind folder ignores the table"
            return DetectedSource("table", files=files.only(tables), notes=(note,))
    return DetectedSource("folder", files=files)


def _is_table(files: FileSelection, name: str, *, alone: bool) -> bool:
    """Return whether a file is a table; a JSON file is one if it has an array."""
    suffix = table_suffix(name)
    if suffix != ".json" or (alone and not files.is_folder):
        return suffix is not None
    if sum(each.lower().endswith(".json") for each in files.names) > table.MAX_TABLE_ARRAYS:
        return False
    return table.is_array(files.folder / name)


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
