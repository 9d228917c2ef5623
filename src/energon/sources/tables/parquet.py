"""Read the rows of Parquet files as samples, a row group at a time."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from energon.arrays import Ints
from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.meta.split import BY_NAMES, chosen_split, guess_splits
from energon.formats.parquet import CardConfig
from energon.io.address import redact
from energon.io.epath import any_path
from energon.io.files import is_pattern
from energon.messages import counted
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Leaf
from energon.sources.decoded_blocks import SliceCost
from energon.sources.kinds import description, split_description
from energon.sources.shard_samples import PartFilter
from energon.sources.source import Submit
from energon.sources.tables.parquet_files import PARQUET_SUFFIX, ParquetFiles
from energon.sources.tables.parquet_groups import ParquetGroups
from energon.sources.tables.row_kind import RowKind, RowOptions, row_config
from energon.sources.tables.rows import RowSource


@dataclass(frozen=True)
class ParquetOptions(RowOptions):
    """The options under `read` in a document for Parquet files.

    config: One of the configurations listed on the card of a Hugging Face dataset; None for its
        default, or the only one.
    """

    config: str | None = field(default=None, kw_only=True)


class ParquetSource(RowSource):
    """The rows of a split of Parquet files, numbered from 0.

    Args:
        address: See `ParquetFiles`.
        split_part: The split to read.
        options: Which columns are read, and which splits there are.
        parts: The columns to read, if `options` say none; None for all.
        subsets: Ranges that narrow the split, see `energon.plan.leaves.subset`.
        exclude: Keys of excluded samples, or names of files.

    Raises:
        DatasetNotFoundError: If there are no files.
        FormatError: If one of them is not a Parquet file, or its values do not have a type that
            fits all files.
        ConfigError: If there is no such split or column.
        EmptyDatasetError: If no sample is left.
        MissingExtraError: If pyarrow is not installed.
    """

    groups: ParquetGroups

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        split_part: str = "train",
        options: ParquetOptions | None = None,
        parts: Collection[str] | PartFilter | None = None,
        subsets: Sequence[Any] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        path = any_path(address)
        options = options or ParquetOptions(origin=str(path))
        files = ParquetFiles(os.fspath(address))
        chosen, by_ratio = _split_files(files, options, split_part)
        footers = {footer.name: footer for footer in files.footers()}
        super().__init__(
            path,
            ParquetGroups(files, [footers[name] for name in chosen]),
            split_part=split_part,
            by_ratio=by_ratio,
            options=options,
            parts=parts,
            subsets=subsets,
            exclude=exclude,
        )

    @cached_property
    def slice_cost(self) -> SliceCost:
        """A row group is decoded as a whole, so it is a slice."""
        rows = int(np.median(np.diff(self.groups.ends)))
        number = int(np.argmax(np.diff(self.groups.ends)))
        file, own = self.groups.place(number)
        group = self.groups.metadata(file).row_group(own)
        blocks = self.samples_between(self.groups.ends)
        # A slice that is not aligned with row groups is in two of them.
        size = group.total_byte_size if blocks else 2 * group.total_byte_size
        return SliceCost(max(1, rows), size, blocks)

    def decode_ahead(self, ordinals: Ints, submit: Submit, *, max_bytes: int) -> None:
        """Begin to decode the row groups of samples, see `DecodesAhead`."""
        groups = dict.fromkeys(self._groups_of(self.numbers(ordinals)).tolist())
        most = max_bytes // max(1, self.slice_cost.num_bytes)
        self.groups.decode_ahead(list(groups), self.columns, submit, most=most)


def _split_files(
    files: ParquetFiles, options: ParquetOptions, split_part: str
) -> tuple[list[str], bool]:
    """Return the files of a split, and whether a ratio selects some of their rows."""
    splits = _splits(files, options)
    if options.split is not None:
        return [name for names in splits.values() for name in names], True
    by = "its card" if files.card() else BY_NAMES
    split = chosen_split(split_part, splits, origin=redact(files.address), by=by)
    config = _config(files, options)
    patterns = {} if config is None else config.splits
    for pattern in patterns.get(split) or patterns.get("", ()):
        if not files.matching([pattern]):
            raise DatasetNotFoundError(
                f"{redact(files.address)}: its card assigns {pattern!r} to the split "
                f"{split or split_part!r}, but none of its "
                f"{counted(len(files.found), 'Parquet file')} matches; correct the card, "
                "README.md, or add the files"
            )
    return splits[split], split == ""


def _splits(files: ParquetFiles, options: ParquetOptions) -> dict[str, list[str]]:
    """Return the files of each split; a single unnamed one if nothing assigns them to splits.

    Raises:
        ConfigError: If the dataset has several configurations and none is chosen.
    """
    config = _config(files, options)
    if config is None:
        names = [found.key for found in files.found]
        return {"": names} if files.is_single else _guessed(files, names)
    splits = {split: files.matching(patterns) for split, patterns in config.splits.items()}
    return _guessed(files, splits[""]) if "" in splits else splits


def _config(files: ParquetFiles, options: ParquetOptions) -> CardConfig | None:
    """Return the chosen configuration; None if there is none to choose.

    Raises:
        ConfigError: If the dataset has several configurations and none is chosen.
    """
    configs = {config.name: config for config in files.card()}
    chosen = options.config
    if chosen is None and configs:
        given = [config.name for config in configs.values() if config.is_default]
        if not given and len(configs) > 1:
            raise ConfigError(
                f"{options.origin or redact(files.address)}: has the configurations "
                f"{', '.join(configs)}; choose one, as in `read: {{config: {min(configs)}}}`"
            )
        chosen = given[0] if given else min(configs)
    if chosen is None:
        return None
    if chosen not in configs:
        raise ConfigError(
            f"{options.origin}: read: {redact(files.address)} has no configuration {chosen!r}, "
            f"only {', '.join(configs) or 'one without a name'}"
        )
    return configs[chosen]


def _guessed(files: ParquetFiles, names: Sequence[str]) -> dict[str, list[str]]:
    return guess_splits(names, by_file=True, origin=redact(files.address))


class ParquetKind(RowKind):
    """Parquet files, whose rows are samples."""

    name = "parquet"
    noun = "a set of Parquet files"
    source = ParquetSource
    options_type = ParquetOptions
    options = ParquetOptions.names()

    def prepare(self, address: str) -> int:
        return sum(sum(footer.rows) for footer in ParquetFiles(address).prepare())

    def splits_of(self, address: str) -> Collection[str]:
        return _splits(ParquetFiles(address), ParquetOptions())

    def config(self, leaf: Leaf) -> DatasetConfig:
        return row_config(
            leaf,
            has_folder=not (is_pattern(leaf.path) or leaf.path.endswith(PARQUET_SUFFIX)),
            options=ParquetOptions,
        )

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        files = ParquetFiles(address)
        groups = ParquetGroups(files, files.footers())
        rows = {footer.name: sum(footer.rows) for footer in groups.footers}
        splits = {}
        for prefix, config in self._configs(files):
            for name, chosen in _splits(files, ParquetOptions(config=config)).items():
                samples = sum(rows[file] for file in chosen)
                splits[f"{prefix}{name or 'train'}"] = split_description(samples, len(chosen))
        size = sum(footer.size for footer in groups.footers)
        about = description(groups.num_rows, len(groups.footers), size, splits)
        return {**about, "columns": groups.column_types(), "row_groups": len(groups.file)}

    @staticmethod
    def _configs(files: ParquetFiles) -> list[tuple[str, str | None]]:
        """Return the configurations whose splits are shown, and the prefix of their names."""
        configs = files.card()
        if len(configs) < 2 or any(config.is_default for config in configs):
            return [("", None)]
        return [(f"{config.name}/", config.name) for config in configs]


KIND = ParquetKind()
