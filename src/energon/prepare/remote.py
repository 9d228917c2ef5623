"""Prepare datasets in object stores: a local folder stands for them meanwhile.

Shards that are new or changed are indexed by ranges first, so that what works on the folder
finds all of them known and reads none. At the end the files that are new are uploaded, each as a
whole, and those last that say what the dataset consists of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from energon.errors import DatasetNotFoundError
from energon.io.address import redact
from energon.io.files import list_files
from energon.metadataset.kind import advice
from energon.prepare.index.index import IndexOptions
from energon.prepare.index.shards import COMPRESSED
from energon.prepare.mirror import Mirror, Progress


@contextmanager
def standing_in(
    address: str,
    *,
    exclude: Sequence[str] = (),
    options: IndexOptions | None = None,
    progress: Progress = lambda done, total: None,
) -> Iterator[Path]:
    """Give a local folder that stands for a remote dataset, and upload what was made in it.

    Nothing is uploaded to `.nv-meta` after an exception.

    Args:
        address: The dataset.
        exclude: Regular expressions; shards in whose path one is found are not indexed.
        options: How shards are indexed.
        progress: Called with the number of shards whose index is known, and of all.

    Raises:
        DatasetNotFoundError: If there are no shards.
        FormatError: If a shard is damaged.
        StorageError: If the store cannot be read or written.
    """
    mirror = Mirror(address)

    def fill() -> None:
        found = list_files(address)
        if not any(each.key.endswith((".tar", *COMPRESSED)) for each in found):
            raise DatasetNotFoundError(
                f"{redact(address)}: there is no .tar file in this folder or below: it "
                f"{advice(address)}"
            )
        mirror.update(found)
        shards = [name for name in mirror.present() if name.endswith(".tar")]
        wanted = [name for name in shards if not any(re.search(each, name) for each in exclude)]
        mirror.index(wanted, IndexOptions() if options is None else options, progress)

    with mirror.locked():
        mirror.fill(fill)
        with mirror.changing(), mirror.hidden():
            yield mirror.folder
