"""Prepare a folder of shards: index it, split it, say how its samples are decoded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from energon.errors import ConfigError
from energon.formats import yaml
from energon.formats.info import META, DatasetInfo
from energon.formats.part_table import PartTable, part_table_path
from energon.formats.split import Split
from energon.formats.sqlite_index import Shard, write_sqlite_index
from energon.io.atomic import atomic_path, write_atomic
from energon.prepare.index import find_shards, index_shards
from energon.prepare.splits import split_by_pattern, split_by_ratio
from energon.samples.field_map import FieldMap
from energon.samples.registry import resolve_class
from energon.version import __version__

CRUDE = "CrudeWebdataset"


def prepare_dataset(
    path: str | Path,
    *,
    split_ratio: Mapping[str, float] | None = None,
    split_parts: Sequence[str] = (),
    exclude: Sequence[str] = (),
    sample_type: str | None = None,
    field_map: Mapping[str, str] | None = None,
    dataset_yaml_name: str = "dataset.yaml",
    num_workers: int = 16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DatasetInfo:
    """Make a folder of tar shards a dataset, by files beside the shards and in `.nv-meta`.

    The shards are not touched. Every file is there as a whole or not at all, and those that
    tell what the dataset consists of come last: until then, an older dataset stays what it was.

    Args:
        path: The folder.
        split_ratio: Ratio by name of the split.
        split_parts: Instead of ratios, `NAME:REGEX` for each split.
        exclude: Regular expressions; shards in whose path one is found are left out.
        sample_type: "CrudeWebdataset", or the name of a sample type; None writes no dataset.yaml.
        field_map: How parts become the fields of the sample type.
        dataset_yaml_name: Name of the description below `.nv-meta`.
        num_workers: Processes that read shards.
        progress: Called with the number of shards that are done, and of all.

    Returns:
        What was found.

    Raises:
        DatasetNotFoundError: If there are no shards.
        FormatError: If a shard is damaged or a key is there twice.
        ConfigError: If the arguments make no sense.
    """
    dataset = Path(path)
    description = _describe(sample_type, field_map)
    shards = _without(find_shards(dataset), exclude)
    if split_parts:
        parts = split_by_pattern(shards, split_parts)
    elif split_ratio:
        parts = split_by_ratio(shards, split_ratio)
    else:
        raise ConfigError("neither split_ratio nor split_parts say which shards make up a split")

    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, len(shards))

    index_shards(dataset, shards, num_workers=num_workers, progress=advance)
    counts: dict[str, int] = {}
    meta = dataset / META
    meta.mkdir(exist_ok=True)
    with atomic_path(meta / "index.sqlite") as temporary:
        write_sqlite_index(temporary, _opened(dataset, shards, counts))
    info = DatasetInfo(counts, __version__)
    write_atomic(meta / "index.uuid", str(uuid4()))
    write_atomic(meta / "split.yaml", Split(parts).to_yaml())
    if description is not None:
        write_atomic(meta / dataset_yaml_name, yaml.dump(description))
    if (meta / ".info.yaml").exists():
        write_atomic(meta / ".info.yaml", yaml.dump({"shard_counts": counts}))
    write_atomic(meta / ".info.json", info.to_json())
    return info


def _opened(dataset: Path, shards: Sequence[str], counts: dict[str, int]) -> Iterator[Shard]:
    """Yield the indexed shards one at a time, and note how many samples each has."""
    for name in shards:
        table = PartTable.open(part_table_path(dataset / name))
        counts[name] = table.num_samples
        yield Shard(name, table)


def _without(shards: Sequence[str], exclude: Sequence[str]) -> list[str]:
    try:
        expressions = [re.compile(text) for text in exclude]
    except re.error as error:
        raise ConfigError(f"exclude: {error}") from error
    left = [shard for shard in shards if not any(e.search(shard) for e in expressions)]
    if not left:
        raise ConfigError(f"exclude {list(exclude)} leaves none of {len(shards)} shards")
    return left


def _describe(
    sample_type: str | None, field_map: Mapping[str, str] | None
) -> dict[str, Any] | None:
    """Return the content of dataset.yaml."""
    if sample_type is None:
        if field_map:
            raise ConfigError("a field_map needs a sample_type whose fields it maps to")
        return None
    if sample_type == CRUDE:
        if field_map:
            raise ConfigError(f"{CRUDE} takes no field_map: cookers make its samples")
        return {"__module__": "megatron.energon", "__class__": CRUDE}
    resolved = resolve_class("megatron.energon", sample_type)
    FieldMap.parse(field_map or {}).check(resolved)
    kind = {"__module__": "megatron.energon", "__class__": resolved.__name__}
    return {"sample_type": kind, "field_map": dict(field_map or {})}
