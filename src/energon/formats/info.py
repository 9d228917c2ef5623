"""`.nv-meta/.info.json`: the shards of a dataset and how many samples each has.

The order of the shards counts: their places are the `tar_file_id`s of `index.sqlite`.
Datasets prepared by early releases have `.info.yaml` with the same content.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon.errors import DatasetNotFoundError, FormatError
from energon.formats import yaml
from energon.utf8 import decode_utf8

META = ".nv-meta"


@dataclass(frozen=True)
class DatasetInfo:
    """What was found when a dataset was prepared.

    Args:
        shard_counts: Number of samples by path of the shard below the dataset folder.
        energon_version: The release that prepared it; None if unknown.
    """

    shard_counts: Mapping[str, int]
    energon_version: str | None = None

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return sum(self.shard_counts.values())

    def to_json(self) -> str:
        """Return the content of `.info.json`."""
        document = {
            "energon_version": self.energon_version,
            "shard_counts": dict(self.shard_counts),
        }
        return json.dumps(document, indent=2)


def load_info(dataset: str | os.PathLike[str]) -> DatasetInfo:
    """Read `.info.json`, or the older `.info.yaml`, of a dataset.

    Raises:
        DatasetNotFoundError: If the folder is not a prepared dataset.
        FormatError: If the file is damaged.
    """
    root = as_path(dataset)
    folder = root / META
    for name, parse in ((".info.json", _parse_json), (".info.yaml", yaml.load)):
        path = folder / name
        text = read_if_present(path)
        if text is not None:
            return _check(parse(text, origin=str(path)), str(path))
    if root.is_file():
        raise DatasetNotFoundError(f"{root}: is a file; wanted is the folder of a prepared dataset")
    problem = "is not a prepared dataset" if root.is_dir() else "does not exist"
    raise DatasetNotFoundError(
        f"{root} {problem}: there is no {META}/.info.json; run `energon prepare {root}`"
    )


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of the standard library, or what has its methods as it is."""
    return path if hasattr(path, "read_text") else Path(path)  # type: ignore[return-value]


def read_if_present(path: Path) -> str | None:
    """Return the text of a file; None if there is none.

    Raises:
        FormatError: If it is no text in UTF-8, or a folder.
    """
    try:
        return decode_utf8(path.read_bytes(), origin=str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError as error:
        raise FormatError(f"{path}: is a folder, wanted is a file") from error


def _parse_json(text: str, *, origin: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise FormatError(f"{origin}: {error}; run `energon prepare` again") from error


def _check(document: Any, origin: str) -> DatasetInfo:
    counts = document.get("shard_counts") if isinstance(document, dict) else None
    if not isinstance(counts, dict) or not all(
        isinstance(shard, str) and isinstance(count, int) and count >= 0
        for shard, count in counts.items()
    ):
        raise FormatError(
            f"{origin}: wanted is `shard_counts` with a number of samples for each shard; run "
            "`energon prepare` again"
        )
    return DatasetInfo(dict(counts), document.get("energon_version"))
