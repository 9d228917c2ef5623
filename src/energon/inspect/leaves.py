"""The datasets that a path stands for, split by split, with any problems found on the way."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from energon.errors import ConfigError, EnergonError
from energon.formats.meta.split import find_split
from energon.io.address import is_remote, local_path, redact
from energon.messages import nearest
from energon.metadataset.document import read_metadataset
from energon.metadataset.leaf import Leaf, LeafList
from energon.metadataset.recognition import dataset_kind
from energon.metadataset.resolve import resolve
from energon.sources.kinds import kind_named


@dataclass(frozen=True)
class FoundLeaves:
    """What a path stands for.

    Args:
        kind: The kind of dataset there.
        splits: Datasets by split; members of joins are separate.
        mixes: How datasets are mixed, by split; members of joins are together.
        problems: By split, why it has no datasets, each as one line.
    """

    kind: str
    splits: dict[str, list[Leaf]] = field(default_factory=dict)
    mixes: dict[str, LeafList] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)


def find_leaves(
    path: str | os.PathLike[str],
    *,
    splits: Sequence[str] = (),
    dataset_config: str | None = None,
    split_config: str | None = None,
    training: bool = False,
    allow: Collection[str] = (),
) -> FoundLeaves:
    """Return the datasets of a dataset or metadataset.

    Args:
        path: Where it is.
        splits: Which of its splits; none means all.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        training: Whether weights and repetitions count, which validation ignores.
        allow: What the data may do, see `get_train_dataset`.

    Raises:
        DatasetNotFoundError: If there is no dataset.
        ConfigError: If there is no such split, or the document is invalid.
    """
    address = os.fspath(path)
    if not is_remote(address):
        address = os.path.abspath(local_path(address))
    found = FoundLeaves(dataset_kind(address))
    names = splits_at(address, found.kind, split_config, allow)
    for requested in splits or names:
        name = find_split(requested, names)
        if name is None:
            close = nearest(requested, names)
            did_you_mean = f"; did you mean {close!r}?" if close else ""
            raise ConfigError(
                f"{redact(address)}: there is no split {requested!r}, only "
                f"{', '.join(map(repr, names)) or 'none'}{did_you_mean}"
            )
        try:
            mix = resolve(
                address,
                split_part=name,
                training=training,
                dataset_config=dataset_config,
                split_config=split_config,
                allow=allow,
            )
        except EnergonError as error:
            found.problems.extend((name, line) for line in str(error).splitlines())
        else:
            found.mixes[name] = mix
            found.splits[name] = list(_single(mix.leaves))
    return found


def splits_at(
    address: str, kind: str, split_config: str | None = None, allow: Collection[str] = ()
) -> list[str]:
    """Return the splits of a dataset or metadataset."""
    if kind == "metadataset":
        return list(read_metadataset(address, allow).content.splits)
    return kind_named(kind).split_names(address, split_config, allow)


def _single(leaves: Sequence[Leaf]) -> Iterator[Leaf]:
    seen = []
    for leaf in leaves:
        for each, _ in leaf.datasets:
            if each not in seen:
                seen.append(each)
                yield each
