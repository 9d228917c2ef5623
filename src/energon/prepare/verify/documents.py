"""Check what `.nv-meta` says of splits and samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from energon.counting import counted
from energon.errors import ConfigError, EnergonError
from energon.formats.meta.info import META, DatasetInfo
from energon.formats.meta.split import Split, load_split
from energon.metadataset.dataset_config import load_dataset_config
from energon.prepare.verify.shard import Problem


def check_documents(dataset: Path, info: DatasetInfo, notes: list[str]) -> Iterator[Problem]:
    """Yield what is wrong with the splits and the description of a dataset.

    Args:
        dataset: Its folder.
        info: Its shards.
        notes: Gets what is worth knowing, and not wrong.
    """
    try:
        split = load_split(dataset)
    except EnergonError as error:
        yield Problem("split-damaged", f"{META}/split.yaml", str(error), False)
    else:
        yield from _check_split(split, info, notes)
    if not (dataset / META / "dataset.yaml").exists():
        notes.append("there is no dataset.yaml; loading needs one, or a dataset_config")
        return
    try:
        load_dataset_config(dataset)
    except EnergonError as error:
        yield Problem("description-damaged", f"{META}/dataset.yaml", str(error), False)


def _check_split(split: Split, info: DatasetInfo, notes: list[str]) -> Iterator[Problem]:
    where = f"{META}/split.yaml"
    listed: set[str] = set()
    for name in split.split_parts:
        shards = split.shards(name)
        listed.update(shards)
        for shard in shards:
            if shard not in info.shard_counts:
                message = f"{where}: split {name!r} lists {shard}, which is not in the index"
                yield Problem("split-unknown-shard", where, message, False, shard)
                continue
            try:
                split.sample_range(name, shard, info.shard_counts[shard])
            except ConfigError as error:
                yield Problem("split-range", where, str(error), False, shard)
    for line in split.unmatched(info.shard_counts):
        message = f"{where}: {line}; correct the entry, or delete it"
        yield Problem("exclude-unmatched", where, message, False)
    left_out = [shard for shard in info.shard_counts if shard not in listed]
    if left_out:
        several = counted(len(left_out), "shard is", "shards are")
        notes.append(f"{several} in no split, e.g. {left_out[0]}")
