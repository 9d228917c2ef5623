"""Pack datasets that are read by the library of Hugging Face."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from energon.errors import ConfigError, needs_extra
from energon.io.address import redact
from energon.io.atomic import temporary_folder
from energon.io.epath import EPath, any_path
from energon.io.files import list_files
from energon.prepare.importers.row import SKIPPED_ROW, PackSource, RowRules, Selects, every
from energon.prepare.importers.selection import HUGGING_FACE


class HuggingFaceSource(PackSource):
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
        self._left_out: list[str] = []
        opened = _open_hugging_face(self._here(address))
        self._splits: dict[str, Any] = (
            dict(opened.items()) if hasattr(opened, "items") else {"": opened}
        )

    def _here(self, address: str) -> str:
        """Return the local path of a saved folder: its files are mapped into memory."""
        folder = any_path(address) if not address.startswith(HUGGING_FACE) else None
        if not isinstance(folder, EPath):
            return address if folder is None else str(folder)
        held = ExitStack()
        copy = held.enter_context(temporary_folder("pack"))
        weakref.finalize(self, held.close)
        for found in list_files(folder):
            target = copy / found.key
            target.parent.mkdir(parents=True, exist_ok=True)
            (folder / found.key).copy(EPath(target))
        return str(copy)

    def samples(
        self, split: str, start: int = 0, is_selected: Selects = every
    ) -> Iterator[Mapping[str, Any]]:
        rows = _encoded(self._splits[split])
        classes = _class_columns(self._splits[split])
        origin = f"{self.address} {split}".strip()
        found = 0
        for number, row in enumerate(rows):
            row = _with_class_names(row, classes)
            sample = self.rules.sample(row, number, origin)
            if sample is None:
                self._left_out.append(f"{origin}, row {number + 1}: {SKIPPED_ROW}")
                continue
            found += 1
            if found > start:
                if split and self.rules.key_column is None:
                    sample["__key__"] = f"{split}/{sample['__key__']}"
                if is_selected(sample["__key__"], row):
                    yield sample


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
    """Return a row with the names of its class labels; unknown labels have none."""
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
