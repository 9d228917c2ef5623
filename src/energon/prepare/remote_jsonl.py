"""Prepare a JSONL file in an object store: a copy is indexed here, and the index uploaded."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from energon.errors import DatasetNotFoundError, EnergonError
from energon.formats.jsonl import jsonl_index_path, jsonl_split_path
from energon.io.address import address_name, redact
from energon.io.files import is_file, read_bytes, write_bytes
from energon.io.registry import open_store
from energon.prepare.jsonl import prepare_jsonl


def prepare_remote_jsonl(address: str, *, split_ratio: Mapping[str, float] | None = None) -> int:
    """Index a JSONL file, and deal its samples to splits; see `prepare_jsonl`.

    Returns:
        How many samples it has.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If the store cannot be read or written.
    """
    store, key = open_store(address)
    if not is_file(address):
        raise DatasetNotFoundError(f"{redact(address)}: there is no such file")
    with tempfile.TemporaryDirectory(prefix="energon-jsonl-") as folder:
        copy = Path(folder) / address_name(address)
        with open(copy, "wb") as file:
            file.writelines(store.stream(key))
        split, remote_split = Path(jsonl_split_path(copy)), jsonl_split_path(address)
        before = read_bytes(remote_split) if is_file(remote_split) else None
        if before is not None:
            split.write_bytes(before)
        try:
            num_samples = prepare_jsonl(copy, split_ratio=split_ratio)
        except EnergonError as error:
            # Who reads the message knows the file by its address.
            raise type(error)(str(error).replace(str(copy), redact(address))) from error
        if split.exists() and split.read_bytes() != before:
            write_bytes(remote_split, split)
        write_bytes(jsonl_index_path(address), Path(jsonl_index_path(copy)))
    return num_samples
