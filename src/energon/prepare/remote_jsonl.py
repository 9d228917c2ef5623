"""Prepare a JSONL file in an object store: a copy is indexed here, and the index uploaded."""

from __future__ import annotations

from collections.abc import Mapping

from energon.io.files import write_bytes
from energon.prepare.jsonl import prepare_jsonl
from energon.prepare.remote_copy import JsonlCopy


def prepare_remote_jsonl(address: str, *, split_ratio: Mapping[str, float] | None = None) -> int:
    """Index a JSONL file, and deal its samples to splits; see `prepare_jsonl`.

    Returns:
        How many samples it has.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If the store cannot be read or written.
    """
    with JsonlCopy.opened(address) as copy:
        before = copy.splits.read_bytes() if copy.splits.exists() else None
        num_samples = prepare_jsonl(copy.path, split_ratio=split_ratio)
        if copy.splits.exists() and copy.splits.read_bytes() != before:
            write_bytes(copy.beside(copy.splits), copy.splits)
        write_bytes(copy.beside(copy.index), copy.index)
    return num_samples
