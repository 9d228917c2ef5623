"""Pack a dataset of Hugging Face `datasets`: a saved folder, or one by name."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from energon.errors import ConfigError
from energon.extra import needs_extra
from energon.io.address import redact
from energon.io.epath import EPath, any_path
from energon.io.files import list_files
from energon.prepare.packing.row import RowRules

SCHEME = "hf://"


class HuggingFaceSource:
    """The rows of a dataset, each of its splits a split. Media stay encoded as they are.

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
        opened = _open(self._here(address))
        self._splits: dict[str, Any] = (
            dict(opened.items()) if hasattr(opened, "items") else {"": opened}
        )

    def _here(self, address: str) -> str:
        """Return where a saved folder is on this machine: its files are mapped into memory."""
        folder = any_path(address) if not address.startswith(SCHEME) else None
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

    def samples(self, split: str, start: int) -> Iterator[Mapping[str, Any]]:
        rows = _encoded(self._splits[split])
        origin = f"{self.address} {split}".strip()
        found = 0
        for number, row in enumerate(rows):
            sample = self.rules.sample(row, number, origin)
            if sample is None:
                self._left_out.append(f"{origin}, row {number + 1}: a file is missing")
                continue
            found += 1
            if found > start:
                if split and self.rules.key_column is None:
                    sample["__key__"] = f"{split}/{sample['__key__']}"
                yield sample

    def skipped(self) -> list[str]:
        return self._left_out


def _open(address: str) -> Any:
    with needs_extra("huggingface", f"{address}: needs Hugging Face datasets"):
        import datasets
    try:
        if not address.startswith(SCHEME):
            return datasets.load_from_disk(address)
        name, _, config = address.removeprefix(SCHEME).removeprefix("datasets/").partition(":")
        return datasets.load_dataset(name, config or None, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{address}: {error}") from error


def _encoded(dataset: Any) -> Any:
    """Return a dataset whose media are bytes as they were stored, and not decoded."""
    for name, feature in (dataset.features or {}).items():
        if hasattr(feature, "decode"):
            dataset = dataset.cast_column(name, type(feature)(decode=False))
    return dataset
