"""Kinds of datasets with rows, and what documents say of how these are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from energon.errors import ConfigError
from energon.formats.meta.info import META
from energon.formats.meta.split import parse_shares, ratio_names
from energon.io.address import join_address
from energon.io.files import is_file
from energon.metadataset.dataset_config import DatasetConfig, load_dataset_config
from energon.metadataset.leaf import Leaf
from energon.samples.field_map import FieldMap
from energon.sources.extents import PartFilter
from energon.sources.kinds import DatasetKind, Source
from energon.sources.shards import ShardPool


@dataclass(frozen=True)
class RowOptions:
    """What a document says under `read` of files with rows.

    Args:
        columns: The columns to read; None for those that the field map names, or else all.
        sample_type: The sample type that rows become, like "CaptioningSample"; None leaves them
            to cookers.
        field_map: For each field of it, the column that it is taken from.
        split: The shares of train, val and test in the rows, like "99,1,0"; None if the names of
            the files say which split they are in, or else all are "train".
        origin: Where they were written.

    Raises:
        ConfigError: If they are invalid.
    """

    columns: Sequence[str] | None = None
    sample_type: str | None = None
    field_map: Mapping[str, str] | None = None
    split: str | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise ConfigError(f"{self.origin}: read: {problem}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return what may be said."""
        return tuple(field.name for field in fields(cls) if field.name != "origin")

    def _problems(self) -> Iterator[str]:
        columns = self.columns
        if columns is not None and (
            not isinstance(columns, list | tuple)
            or not columns
            or not all(isinstance(name, str) for name in columns)
        ):
            yield f"columns is {columns!r}; expected a list of names"
        if (self.sample_type is None) != (self.field_map is None):
            yield "sample_type and field_map belong together, one is missing"
        if self.sample_type is not None and not isinstance(self.sample_type, str):
            yield f"sample_type is {self.sample_type!r}; expected a name like CaptioningSample"
        if self.field_map is not None and not isinstance(self.field_map, Mapping):
            yield f"field_map is {self.field_map!r}; expected a column for each field"
        if self.columns is not None and self.field_map is not None:
            yield "field_map says which columns to read; drop columns"
        if self.split is not None:
            parse_shares(self.split, origin=self.origin)


def row_config(
    leaf: Leaf, *, has_folder: bool = True, options: type[RowOptions] = RowOptions
) -> DatasetConfig:
    """Return what happens to the rows that a leaf refers to.

    Args:
        leaf: What a document says.
        has_folder: Whether the dataset is a folder, which may describe itself.
        options: What a document may say.
    """
    said = options(**leaf.read, origin=leaf.origin)
    if said.sample_type is not None:
        return DatasetConfig(
            crude=False,
            sample_type=("energon", said.sample_type),
            field_map=said.field_map,
            origin=leaf.path,
        )
    described = join_address(leaf.path, f"{META}/{leaf.dataset_config}")
    if has_folder and is_file(described):
        return load_dataset_config(leaf.path, leaf.dataset_config)
    return DatasetConfig(origin=leaf.path)


class RowKind(DatasetKind):
    """A kind whose samples are rows, or items like rows.

    Attributes:
        source: Reads its samples, as `RowSource` does.
        options_type: What a document may say under `read`.
    """

    source: Callable[..., Source]
    options_type: type[RowOptions] = RowOptions
    options = RowOptions.names()

    def splits_of(self, address: str) -> Collection[str]:
        """Return the splits that its files say they are, or "" where they say nothing."""
        raise NotImplementedError

    def split_names(
        self, address: str, split_config: str | None = None, allow: Collection[str] = ()
    ) -> list[str]:
        splits = list(self.splits_of(address))
        return ratio_names(None, origin=address) if splits == [""] else splits

    def config(self, leaf: Leaf) -> DatasetConfig:
        return row_config(leaf, options=self.options_type)

    def open(
        self,
        leaf: Leaf,
        config: DatasetConfig,
        *,
        exclude: Sequence[str] = (),
        parts: Collection[str] | PartFilter | None = None,
        pool: ShardPool | None = None,
        allow: Collection[str] = (),
    ) -> Source:
        return self.source(
            leaf.path,
            split_part=leaf.split_part,
            options=self.options_type(**leaf.read, origin=leaf.origin),
            parts=parts,
            subsets=leaf.subsets,
            exclude=exclude,
        )

    def check_field_map(self, source: Any, field_map: FieldMap) -> None:
        field_map.check_parts(source.all_parts, origin=str(source.path))
