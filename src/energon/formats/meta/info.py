"""`.nv-meta/.info.json`: the shards of a dataset and how many samples each has.

The order of the shards matters: their positions are the `tar_file_id`s of `index.sqlite`.
Datasets prepared by early releases have `.info.yaml` with the same content.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from energon.allow import is_allowed, refusal
from energon.errors import DatasetNotFoundError, FormatError, SecurityError
from energon.formats.json_text import parse_json
from energon.formats.meta import yaml
from energon.limits import read_local_document
from energon.local_file import decode_utf8
from energon.messages import shell_word

META = ".nv-meta"
INFO_FILES = (".info.yaml", ".info.json")
PACK_RECORD = f"{META}/pack.json"
"""What `energon pack` writes first: an interrupted run continues only if it packs the same. Where
it is and `.info.json` is not, shards are missing."""
MAX_SAMPLES = (1 << 53) - 1
"""Far more than there are, and what numbers of samples are computed with holds it."""
_ELSEWHERE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*://|pipe:")


@dataclass(frozen=True)
class DatasetInfo:
    """The result of preparing a dataset.

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


def load_info(dataset: str | os.PathLike[str], allow: Collection[str] = ()) -> DatasetInfo:
    """Read `.info.json`, or the older `.info.yaml`, of a dataset.

    Args:
        dataset: Its folder.
        allow: "outside" permits shards outside its folder.

    Raises:
        DatasetNotFoundError: If the folder is not a prepared dataset.
        FormatError: If the file is damaged.
        SecurityError: If it has shards elsewhere, which is not allowed.
    """
    root = as_path(dataset)
    folder = root / META
    for name, parse in ((".info.json", _parse), (".info.yaml", yaml.load)):
        path = folder / name
        text = read_if_present(path)
        if text is not None:
            info = _check(parse(text, origin=str(path)), str(path))
            check_inside(info.shard_counts, origin=str(path), allow=allow)
            return info
    if root.is_file():
        raise DatasetNotFoundError(f"{root}: is a file; expected the folder of a prepared dataset")
    if not root.is_dir():
        raise DatasetNotFoundError(f"{root} does not exist; expected a folder of tar shards")
    raise DatasetNotFoundError(
        f"{root} is not a prepared dataset: there is no {META}/.info.json; run `energon prepare "
        f"{shell_word(root)}`"
    )


def _parse(text: str, *, origin: str) -> Any:
    return parse_json(text, origin=origin, hint="run `energon prepare` again")


def check_inside(names: Iterable[str], *, origin: str, allow: Collection[str] = ()) -> None:
    """Raise SecurityError unless names of files stay in the folder of their dataset.

    Symbolic links may lead anywhere: the owner of the folder made them.

    Args:
        names: Paths relative to the folder.
        origin: The document that contains them.
        allow: "outside" permits paths out of the folder.
    """
    for name in names:
        if "\0" in name:
            raise FormatError(f"{origin}: {name!r} is not a file name")
        # Most names have none of these, and there may be a million of them.
        if name.startswith("pipe:"):
            raise SecurityError(
                f"{origin}: {name!r} is a command for the shell, expected the path of a file; "
                "write its output to a shard in the folder, or stream it with `energon.webdataset`"
            )
        if (name[:1] == "/" or ":" in name or ".." in name) and leads_out(name):
            if is_allowed("outside", allow):
                return
            raise refusal(
                "outside", f"{origin}: {name!r} is not in the folder of the dataset; move it there"
            )


def leads_out(name: str) -> bool:
    """Return whether a name is an address, or a path out of the folder that it is relative to."""
    within = posixpath.normpath(name)
    return bool(_ELSEWHERE.match(name)) or within == ".." or within.startswith("../")


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a `pathlib.Path`, or an object with its methods unchanged."""
    return path if hasattr(path, "read_text") else Path(path)  # type: ignore[return-value]


def read_if_present(path: Path) -> str | None:
    """Return the text of a file; None if there is none.

    Raises:
        FormatError: If it is not text in UTF-8, too large, or a folder.
    """
    try:
        # A path in a store knows how to do it.
        read = getattr(path, "read_document", partial(read_local_document, path))
        return decode_utf8(read(), origin=str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError as error:
        raise FormatError(f"{path}: is a folder, expected a file") from error


def _check(document: Any, origin: str) -> DatasetInfo:
    counts = document.get("shard_counts") if isinstance(document, dict) else None
    if not isinstance(counts, dict) or not all(
        isinstance(shard, str) and isinstance(count, int) and 0 <= count <= MAX_SAMPLES
        for shard, count in counts.items()
    ):
        raise FormatError(
            f"{origin}: expected `shard_counts` with a number of samples for each shard; run "
            "`energon prepare` again"
        )
    if sum(counts.values()) > MAX_SAMPLES:
        raise FormatError(
            f"{origin}: claims {sum(counts.values())} samples, more than {MAX_SAMPLES}; the file "
            "is damaged, run `energon prepare` again"
        )
    return DatasetInfo(dict(counts), document.get("energon_version"))
