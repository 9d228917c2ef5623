"""Open a join: find its index, or build it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from energon.errors import ConfigError, FormatError
from energon.formats.meta.info import META
from energon.formats.tables.join_index import JoinIndex
from energon.io.address import join_address, redact
from energon.io.file_lock import locked
from energon.io.files import read_text
from energon.io.settings import StorageSettings
from energon.metadataset.leaf import JoinMember, Leaf
from energon.prepare.index.join_index import KeyColumn, build_join_index
from energon.sources.join import JoinedSource, hashed_keys, unexcluded
from energon.sources.source import Source

logger = logging.getLogger("energon")

INDEX_VERSION = 1


def open_join(leaf: Leaf, sources: Sequence[Source]) -> JoinedSource:
    """Return the samples of a join; build its index first if necessary.

    Args:
        leaf: The join.
        sources: Its datasets, opened. Samples that one of them excludes are left out.

    Raises:
        ConfigError: If samples have no match where that is an error.
        DuplicateSampleKeyError: If a dataset has a key twice.
        EmptyDatasetError: If no sample is left.
    """
    digest = join_digest(leaf, sources)
    index = find_index(leaf, digest)
    return JoinedSource(
        sources,
        build_index(leaf, sources, digest) if index is None else index,
        digest=digest,
        subsets=leaf.subsets,
    )


def join_digest(leaf: Leaf, sources: Sequence[Source]) -> str:
    """Return the name of the index: a hash of everything that determines its content."""
    content = [
        [unexcluded(source)[0].fingerprint(), _identity(source), member.nonmatch]
        for member, source in zip(leaf.join, sources, strict=True)
    ]
    text = json.dumps([INDEX_VERSION, content], sort_keys=True)
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:32]


def find_index(leaf: Leaf, digest: str) -> JoinIndex | None:
    """Return the index of a join; None if it is missing, or damaged."""
    for folder in cache_folders(leaf):
        index = _load(folder / index_name(digest))
        if index is not None:
            _clear_lock(_lock_path(folder, digest))
            return index
    return None


def _lock_path(folder: Path, digest: str) -> Path:
    return folder / f".{digest}.lock"


def _clear_lock(path: Path) -> None:
    """Delete the lock of a process that was killed after it had completed the index."""
    if path.exists():
        with suppress(OSError), locked(path, deletes=True):
            pass


def build_index(leaf: Leaf, sources: Sequence[Source], digest: str) -> JoinIndex:
    """Build the index of a join in the first folder that can be written, and return it."""
    columns = [_column(member, source) for member, source in zip(leaf.join, sources, strict=True)]
    problems = []
    for folder in cache_folders(leaf):
        path = folder / index_name(digest)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Processes of one machine build it once; others wait and read it.
            with locked(_lock_path(folder, digest), deletes=True):
                if _load(path) is None:
                    logger.info("building the join index %s", path)
                    build_join_index(path, columns)
            return JoinIndex.open(path)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
    raise ConfigError(
        f"{leaf.origin}: the index of the join cannot be written anywhere ({'; '.join(problems)}); "
        "set ENERGON_STORAGE_CACHE_DIR to a writable folder"
    )


def check_join(leaf: Leaf, sources: Sequence[Source], folder: Path) -> None:
    """Check that a join has matches, as building its index does, unless that is done.

    Args:
        leaf: The join.
        sources: Its datasets, opened.
        folder: For what has to be written on the way.

    Raises:
        EnergonError: As `open_join`.
    """
    if find_index(leaf, join_digest(leaf, sources)) is None:
        columns = [_column(*each) for each in zip(leaf.join, sources, strict=True)]
        build_join_index(folder / "index.bin", columns)


def _load(path: Path) -> JoinIndex | None:
    try:
        return JoinIndex.open(path)
    except FileNotFoundError:
        return None
    except (FormatError, OSError) as error:
        logger.warning("building a join index again: %s", error)
        return None


def index_name(digest: str) -> str:
    """Return the name of the file of an index."""
    return f"join_index_{digest}.bin"


def cache_folders(leaf: Leaf) -> Iterator[Path]:
    """Yield the folders that may hold indexes: next to the document, then the user's cache."""
    document = leaf.joiner.document if leaf.joiner else None
    if document is not None:
        yield Path(f"{document}.cache")
    folder = StorageSettings.from_environment().cache_dir
    if folder is None:
        folder = os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "energon"
        )
    yield Path(folder) / "joins"


def _identity(source: Source) -> str:
    """Return data that change whenever the dataset is prepared again."""
    try:
        return read_text(join_address(source.path, f"{META}/index.uuid")).strip()
    except (FileNotFoundError, NotADirectoryError):
        # Written by each preparation of shards, but copies of them and other kinds may lack it.
        return redact(source.path)


def _column(member: JoinMember, opened: Source) -> KeyColumn:
    source, _ = unexcluded(opened)
    return KeyColumn(
        name=f"{redact(source.path)} (split {member.leaf.split_part})",
        num_samples=len(source),
        blocks=hashed_keys(source),
        key_of=lambda ordinal: source.locate(ordinal).key,
        nonmatch=member.nonmatch,
    )
