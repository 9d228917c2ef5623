"""Find the Parquet files of an address, and read their footers."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence

from energon.errors import DatasetNotFoundError, FormatError
from energon.formats.meta.info import META
from energon.formats.parquet import (
    CARD,
    FOOTERS,
    TAIL_BYTES,
    CardConfig,
    ParquetFooter,
    dump_footers,
    footer_bytes,
    group_rows,
    load_footers,
    parse_card,
    parse_footer,
)
from energon.io.address import address_name, is_remote, join_address, parent_address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.backends.local import PathPattern
from energon.io.disk_cache import disk_cache
from energon.io.files import (
    file_info,
    is_file,
    is_pattern,
    list_files,
    match_files,
    open_store,
    read_bytes,
    write_bytes,
)
from energon.io.range_file import RangeFile, range_file
from energon.local_file import decode_utf8

logger = logging.getLogger("energon")

PARQUET_SUFFIX = ".parquet"
MANY_FILES = 256
"""From this many files on, reading footers one by one is worth a log message and a copy."""
GUESSED_BYTES = 64 << 10
"""How many bytes to read first at the end of a remote file; most footers are shorter."""


class ParquetFiles:
    """The files of an address, by their names below a folder.

    Args:
        address: A file, a folder of files at any depth, or a pattern with `*`, `?`, `[…]` or `**`.

    Raises:
        DatasetNotFoundError: If there are none.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.folder, self.found, self._is_noted = _find(address)
        self.is_single = bool(self.found) and self.path(self.found[0].key) == address
        if not self.found:
            raise DatasetNotFoundError(f"{redact(address)}: there are no {PARQUET_SUFFIX} files")

    def path(self, name: str) -> str:
        """Return the address of a file."""
        return join_address(self.folder, name)

    def open(self, found: ObjectInfo) -> RangeFile:
        """Return a file of `found`, open: its size and version are known from the listing."""
        address = self.path(found.key)
        return range_file(address, info=found._replace(key=open_store(address)[1]))

    def footers(self) -> list[ParquetFooter]:
        """Return the footers of all files, recorded earlier or read now.

        Raises:
            FormatError: If a file is not a Parquet file.
        """
        noted = self._noted()
        missing = [each for each in self.found if _is_new(each, noted)]
        if missing and (is_remote(self.address) or len(missing) > MANY_FILES):
            noted |= self._kept(missing)
        elif missing:
            noted |= {each.key: self.read_footer(each) for each in missing}
        return [noted[each.key] for each in self.found]

    def card(self) -> list[CardConfig]:
        """Return the configurations listed on the dataset's card, if it has one.

        Raises:
            FormatError: If it is invalid.
        """
        path = join_address(self.folder, CARD)
        is_hub = self.address.startswith("hf://")
        if is_pattern(self.address) or (is_remote(path) and not is_hub) or not is_file(path):
            return []
        return parse_card(decode_utf8(read_bytes(path), origin=redact(path)), origin=redact(path))

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Return the names of files that match any of the patterns, or are in a matching folder."""
        own = [PathPattern(f"{each}{below}") for each in patterns for below in ("", "/**")]
        names = [found.key for found in self.found]
        return [name for name in names if any(each.matches(name) for each in own)]

    def prepare(self) -> list[ParquetFooter]:
        """Record the footers of all files next to them, or else in the user's cache."""
        noted = self._noted()
        missing = [each for each in self.found if _is_new(each, noted)]
        noted |= {footer.name: footer for footer in self._read(missing)}
        footers = [noted[each.key] for each in self.found]
        if not is_pattern(self.address) and not self.address.endswith(PARQUET_SUFFIX):
            try:
                write_bytes(self._table, dump_footers(footers))
                self._is_noted = True
            except OSError as error:
                logger.warning("%s; the footers are kept in the user's cache", error)
                self._kept(self.found, read=lambda: footers)
        return footers

    def read_footer(self, found: ObjectInfo) -> ParquetFooter:
        """Return the footer of a file.

        Raises:
            FormatError: If it is not a Parquet file.
        """
        origin, file, size = redact(self.path(found.key)), self.open(found), found.size
        guessed = min(size, GUESSED_BYTES if file.is_remote else TAIL_BYTES)
        tail = file.pread(size - guessed, guessed)
        length = footer_bytes(tail, size=size, origin=origin)
        footer = tail[-length:] if length <= guessed else file.pread(size - length, length)
        rows = group_rows(parse_footer(footer, origin=origin), origin=origin)
        return ParquetFooter(found.key, size, version_of(found), footer, rows)

    def _read(self, found: Sequence[ObjectInfo]) -> list[ParquetFooter]:
        if not is_remote(self.address):
            return [self.read_footer(each) for each in found]
        store, _ = open_store(self.address)
        return store.together(self.read_footer, [(each,) for each in found])

    def _noted(self) -> dict[str, ParquetFooter]:
        """Return the footers that `energon prepare` recorded, by file."""
        if not self._is_noted:
            return {}
        try:
            noted = load_footers(read_bytes(self._table), origin=redact(self._table))
        except FormatError as error:
            logger.warning("%s", error)
            return {}
        except DatasetNotFoundError:  # deleted since it was listed
            return {}
        return {footer.name: footer for footer in noted}

    def _kept(
        self,
        found: Sequence[ObjectInfo],
        read: Callable[[], Sequence[ParquetFooter]] | None = None,
    ) -> dict[str, ParquetFooter]:
        """Return the footers of files from the user's cache, and store them there if missing.

        Args:
            found: The files.
            read: Returns footers that are not in the cache; None reads the files.
        """
        listed = repr([(each.key, each.size, version_of(each)) for each in found])
        version = hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()
        footers = disk_cache().load(
            f"{redact(self.address)}/{FOOTERS}",
            version,
            lambda: dump_footers(self._read_many(found) if read is None else read()),
            lambda data: load_footers(data, origin=redact(self.address)),
        )
        return {footer.name: footer for footer in footers}

    def _read_many(self, found: Sequence[ObjectInfo]) -> list[ParquetFooter]:
        if len(found) > MANY_FILES:
            logger.warning(
                "%s: reading the footers of %d files, which takes a while; `energon prepare` "
                "records them",
                redact(self.address),
                len(found),
            )
        return self._read(found)

    @property
    def _table(self) -> str:
        return join_address(self.folder, f"{META}/{FOOTERS}")


def version_of(found: ObjectInfo) -> str:
    """Return a value that changes with the content of a file."""
    mtime, version = str(found.mtime_ns), found.version
    # The version of a local file contains its inode number, which differs in a copy of the folder.
    is_local = version is None or (found.mtime_ns and version.endswith(mtime))
    return mtime if is_local else str(version)


def _is_new(found: ObjectInfo, noted: dict[str, ParquetFooter]) -> bool:
    footer = noted.get(found.key)
    return footer is None or (footer.size, footer.version) != (found.size, version_of(found))


def _find(address: str) -> tuple[str, list[ObjectInfo], bool]:
    """Return a folder, the files in it that match an address, and whether they are recorded."""
    if not is_pattern(address):
        about = file_info(address) if address.endswith(PARQUET_SUFFIX) else None
        if about is not None:
            return parent_address(address), [about._replace(key=address_name(address))], False
        listed = list_files(address)
        is_noted = any(each.key == f"{META}/{FOOTERS}" for each in listed)
        return address, [each for each in listed if _is_data_file(each.key)], is_noted
    folder, found = match_files(address)
    return folder, [each for each in found if _is_data_file(each.key)], False


def _is_data_file(name: str) -> bool:
    """Return whether a file below a folder has rows: it is neither hidden nor another tool's."""
    steps = name.split("/")
    return steps[-1].endswith(PARQUET_SUFFIX) and not any(
        step.startswith((".", "_")) for step in steps
    )
