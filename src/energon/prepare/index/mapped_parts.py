"""Find the samples that lack a part to which a field is mapped: they cannot be loaded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from energon.formats.meta.braces import expand_all
from energon.formats.meta.split import Split
from energon.formats.tables.part_table import PartTable
from energon.prepare.index.name_index import open_table
from energon.samples.field_map import FieldMap

logger = logging.getLogger("energon")

SHOWN_KEYS = 3


def warn_of_missing_parts(
    dataset: Path, shards: Iterable[str], field_map: FieldMap, split: Split | None
) -> None:
    """Log for each field how many samples have no part for it, excluded ones aside.

    Args:
        dataset: The folder.
        shards: Its indexed shards.
        field_map: Maps fields to parts.
        split: Names what is excluded; None if nothing is.
    """
    excluded = set() if split is None else set(expand_all(split.exclude))
    num_samples, lacking = 0, Counter[str]()
    shown: dict[str, list[str]] = {field: [] for field in field_map.accesses}
    for shard in shards:
        if shard in excluded:
            continue
        table = open_table(dataset, shard)
        num_samples += table.num_samples
        for field, keys in shown.items():
            names = {access.part.lower() for access in field_map.accesses[field]}
            found = [
                key
                for key in table.keys(samples_without(table, names))
                if f"{shard}/{key}" not in excluded
            ]
            lacking[field] += len(found)
            keys += found[: SHOWN_KEYS - len(keys)]
    for field, keys in shown.items():
        if keys:
            parts = dict.fromkeys(access.part for access in field_map.accesses[field])
            logger.warning(
                "%s: no part %s for the field %r in %d of %d samples, which will be skipped as "
                "failed: %s%s",
                dataset,
                " or ".join(parts),
                field,
                lacking[field],
                num_samples,
                ", ".join(keys),
                ", …" if lacking[field] > SHOWN_KEYS else "",
            )


def samples_without(table: PartTable, names: set[str]) -> NDArray[np.int64]:
    """Return the indices of samples that have none of some parts, named in lower case."""
    numbers = [number for number, name in enumerate(table.part_names) if name.lower() in names]
    if table.schema is not None:
        has_one = any(number in numbers for number in table.schema)
        return np.arange(0 if has_one else table.num_samples)
    owners = np.repeat(np.arange(table.num_samples), np.diff(table.first_part))
    lacks = np.ones(table.num_samples, np.bool_)
    lacks[owners[np.isin(table.part_name, numbers)]] = False
    return np.flatnonzero(lacks)
