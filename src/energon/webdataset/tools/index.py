"""Write the indexes of tar files on disk and in object stores."""

from __future__ import annotations

import os

from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.compressed import HEAD_BYTES, compression_of
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.part_table_file import part_table_path
from energon.formats.tar.scan import encode_tar_index
from energon.io.address import address_name, is_remote, local_path, redact, scheme_of
from energon.io.atomic import temporary_folder
from energon.io.files import is_file, read_bytes, write_bytes
from energon.messages import shell_word
from energon.prepare.index.index import IndexOptions, ShardFile, index_remote, index_shard
from energon.webdataset.gopen import open_url


def can_have_index(url: str) -> bool:
    """Return whether an index can be written next to a shard: web servers are read-only."""
    return scheme_of(url) not in ("http", "https")


def index_anywhere(url: str) -> int:
    """Write the index of a shard next to it, if missing; return its number of samples.

    Shards in a store are read by ranges: their headers, and content where skipping it would take
    longer.

    Raises:
        ConfigError: If the shard is compressed, or not a file.
        FormatError: If it is damaged, truncated or has no samples.
    """
    check_plain(url)
    if not is_remote(url):
        return index_shard(local_path(url)).num_samples
    return _index_remote(url).num_samples


def check_plain(url: str) -> None:
    """Raise ConfigError if the samples of a shard have no positions to index."""
    if url == "-" or url.startswith("pipe:"):
        raise ConfigError(
            f"{redact(url)}: a stream has no place for an index; write it to a file first"
        )
    stream = open_url(url)
    try:
        is_packed = compression_of(stream.read(HEAD_BYTES) or b"") is not None
    finally:
        stream.close()
    if is_packed:
        raise ConfigError(
            f"{redact(url)}: is compressed, so its samples cannot be read one by one; write a "
            f"plain shard with `energon tar cat {shell_word(redact(url))} -o NAME.tar`"
        )


def _index_remote(url: str) -> PartTable:
    with temporary_folder("index") as folder:
        copy = folder / address_name(url)
        parts, index = _beside(url)
        before = _content(parts)
        if before is not None:
            part_table_path(copy).write_bytes(before)
        table = index_remote(ShardFile(url), copy, IndexOptions())
    content = table.to_bytes()
    if content != before or not is_file(index):
        write_bytes(parts, content)
        # Readers use an index as soon as this file exists.
        write_bytes(index, encode_tar_index(table.sample_offset))
    return table


def _beside(url: str) -> tuple[str, str]:
    """Return the addresses of the part table and of the index of a shard."""
    return f"{url}.parts", f"{os.path.splitext(url)[0]}.tar.idx"


def _content(url: str) -> bytes | None:
    try:
        return read_bytes(url)
    except DatasetNotFoundError:
        return None
