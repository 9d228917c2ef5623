"""Build the indexes of the joins in a metadataset before a job starts."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from energon.errors import ConfigError
from energon.metadataset.document import read_mapping, read_metadataset
from energon.metadataset.kind import dataset_kind
from energon.metadataset.resolve import DatasetPath, resolve
from energon.sources.shards import ShardPool
from energon.task_encoder.leaves import open_members
from energon.task_encoder.open_join import (
    build_index,
    cache_folders,
    find_index,
    index_name,
    join_digest,
)


def prepare_metadataset(path: str | os.PathLike[str], *, allow: Collection[str] = ()) -> list[Path]:
    """Build all missing indexes for the joins of a metadataset.

    Otherwise they are built when they are first needed, while all ranks wait. The code of
    joiners is not run. Indexes of earlier versions of the document are deleted.

    Args:
        path: The metadataset YAML.
        allow: What data may do, see `get_train_dataset`.

    Returns:
        Where the indexes are.

    Raises:
        ConfigError: If a document is invalid, or samples have no match where that is an error.
        DatasetNotFoundError: If something is missing.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("joined.yaml").write_text('''
        ... __module__: energon
        ... __class__: MetadatasetV2
        ... splits:
        ...   train:
        ...     join:
        ...       - {path: photos}
        ...       - {path: photos}
        ...     joiner: {__module__: energon, __class__: CaptioningSample}
        ... ''')
        >>> [path.suffix for path in prepare_metadataset("joined.yaml")]
        ['.bin']
    """
    paths = build_join_indexes(path, metadataset_splits(path, allow), allow=allow)
    folder = Path(f"{os.path.abspath(path)}.cache")
    for stale in set(folder.glob(index_name("*"))) - set(paths):
        stale.unlink(missing_ok=True)
    return paths


def build_join_indexes(
    path: DatasetPath,
    split_parts: Sequence[str],
    *,
    dataset_config: str | None = None,
    split_config: str | None = None,
    allow: Collection[str] = (),
) -> list[Path]:
    """Build all missing indexes for the joins in some splits.

    Args:
        path: A metadataset YAML, or the document as a dict.
        split_parts: The splits.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        allow: What data may do, see `get_train_dataset`.

    Returns:
        Where the indexes are.
    """
    leaves = [
        leaf
        for part in split_parts
        for leaf in resolve(
            path,
            split_part=part,
            training=False,
            dataset_config=dataset_config,
            split_config=split_config,
            allow=allow,
        ).leaves
    ]
    paths = []
    pool = ShardPool()
    for leaf in leaves:
        if leaf.join:
            sources = open_members(leaf, pool, allow)
            digest = join_digest(leaf, sources)
            if find_index(leaf, digest) is None:
                build_index(leaf, sources, digest)
            candidates = (folder / index_name(digest) for folder in cache_folders(leaf))
            paths.append(next(path for path in candidates if path.exists()))
    return paths


def metadataset_splits(path: DatasetPath, allow: Collection[str] = ()) -> list[str]:
    """Return the names of the splits of a metadataset, without those that are empty.

    Raises:
        ConfigError: If this is a single dataset.
    """
    if isinstance(path, Mapping):
        document = read_mapping(path, allow)
    elif dataset_kind(path) == "metadataset":
        document = read_metadataset(os.fspath(path), allow)
    else:
        raise ConfigError(f"{path} is not a metadataset; expected a .yaml file")
    return [part for part, node in document.content.splits.items() if node is not None]
