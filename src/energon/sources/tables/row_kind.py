"""What kinds of datasets with rows have in common, and how documents configure reading them.

Splits are ranges of consecutive numbers, see `NumberedSource`. `ItemSource` is for samples that are
read one by one from files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import numpy as np

from energon.arrays import Ints
from energon.decode.sample_decoder import is_decoded
from energon.errors import ConfigError, EmptyDatasetError, SampleError
from energon.formats.media import guess_extension
from energon.formats.meta.info import META, numbers_in, parse_shares, ratio_names
from energon.io.address import join_address
from energon.io.epath import AnyPath
from energon.io.files import is_file
from energon.messages import counted
from energon.metadataset.dataset_config import DatasetConfig, load_dataset_config
from energon.metadataset.leaf import Leaf
from energon.plan.leaves.leaf import block_sizes
from energon.plan.leaves.subset import exclude_indices, resolve_range
from energon.samples.crude import PART_FILES, CrudeSample, UnreadableSample, find_part
from energon.samples.field_map import FieldMap
from energon.sources.kinds import DatasetKind
from energon.sources.shard_samples import PartFilter
from energon.sources.source import (
    Extents,
    FileSamples,
    Location,
    OpenRequest,
    SampleSelection,
    Source,
    SplitSource,
    content_fingerprint,
    restore_keys_of,
)
from energon.sources.webdataset import included, split_indices_of
from energon.stages.lane import Block, BuiltBlock

RestoreKeys = Sequence[tuple[int, ...]]


class NumberedSource(SplitSource, ABC):
    """The samples of a split, numbered from 0. Items are numbered over the whole dataset.

    Args:
        path: Path or address of the dataset.
        selection: Which samples to read. It may exclude samples by `FILE/KEY`, too.
        bounds: The number of the first item of the split, and the one after its last.

    Raises:
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        path: AnyPath,
        selection: SampleSelection,
        *,
        bounds: tuple[int, int],
    ) -> None:
        self.path = path
        self.split_part = selection.split_part
        self.first, self.last = bounds
        excluded = {
            split_index
            for entry in selection.exclude
            for split_index in self._split_indices_listed(entry)
        }
        self.excluded = np.array(sorted(excluded), np.int64)
        self.split_range = resolve_range(self.last - self.first, selection.subsets)
        self.start, self.stop = exclude_indices(np.array(self.split_range), self.excluded).tolist()
        if self.start >= self.stop:
            raise EmptyDatasetError(f"{path}: {self._why_empty()}")

    @abstractmethod
    def numbers_of(self, key: str) -> Sequence[int]:
        """Return the items with a key, or in the file of that name."""

    def numbers(self, ordinals: Ints) -> Ints:
        """Return the numbers in the whole dataset of samples of the split.

        Raises:
            IndexError: If there is no such sample.
        """
        return np.asarray(split_indices_of(self, ordinals) + self.first)

    def read(
        self,
        ordinals: Ints,
        *,
        restore_keys: Sequence[tuple[int, ...]] | None = None,
        subflavors: Mapping[str, Any] | None = None,
    ) -> Block:
        """Return samples, in the order of `ordinals`; see `Source.read`."""
        keys = restore_keys_of(ordinals, restore_keys)
        return self.read_numbers(self.numbers(ordinals), keys, subflavors)

    @abstractmethod
    def read_numbers(
        self, numbers: Ints, keys: RestoreKeys, subflavors: Mapping[str, Any] | None
    ) -> Block:
        """Return samples by their numbers in the whole dataset.

        Args:
            numbers: The numbers.
            keys: The `__restore_key__` of each.
            subflavors: The `__subflavors__` of all.
        """

    def file_samples(self) -> list[FileSamples]:
        """Return the split, as one file: items are numbered over all files."""
        low, high = (np.array(self.edges()) - self.first).tolist()
        return [FileSamples(self.split_part, self.last - self.first, low, high)]

    def in_files(self, ordinals: Ints) -> tuple[Ints, Ints]:
        """Return the number of the file of each sample, and that of the sample in its file."""
        return np.zeros(len(ordinals), np.int64), self.numbers(ordinals) - self.first

    def index_stamp(self) -> str | None:
        """Return None: the stamps of files tell whether they have changed."""
        return None

    def file_stamp(self, number: int) -> str:
        """Return a digest of the items of the split."""
        source = copy(self)
        source.excluded = np.empty(0, np.int64)
        source.start, source.stop = source.split_range = 0, self.last - self.first
        return str(cast("Source", source).fingerprint()["index"])

    def find(self, key: str) -> list[int]:
        """Return the numbers of the samples with a key, which has to match as a whole."""
        numbers = [
            n for split_index in self._split_indices_of(key) for n in included(self, split_index)
        ]
        keys = self.keys(np.array(numbers, np.int64)) if numbers else []
        return [number for number, own in zip(numbers, keys, strict=True) if own == key]

    def edges(self) -> tuple[int, int]:
        """Return the numbers of the first item that is a sample, and of the one after the last."""
        low, high = self.numbers(np.array([0, len(self) - 1])).tolist()
        return low, high + 1

    def samples_between(self, edges: Ints) -> tuple[int, ...] | None:
        """Return how many samples are between edges, given as numbers in the whole dataset.

        Stretches without any are left out; None if there are too many for slices to follow them.
        """
        split_indices = np.maximum(edges - self.first, 0)
        before = split_indices - np.searchsorted(self.excluded, split_indices) - self.start
        return block_sizes(np.clip(before, 0, len(self)))

    def _split_indices_of(self, key: str) -> list[int]:
        """Return which items of the split have a key, counted from its first."""
        return self._in_split(self.numbers_of(key))

    def _split_indices_listed(self, entry: str) -> list[int]:
        """Return which items of the split an entry excludes; lists of failures have `FILE/KEY`."""
        numbers = self.numbers_of(entry)
        for at, character in enumerate(entry):
            if character == "/" and not numbers:
                in_file = self.numbers_of(entry[:at])
                numbers = [n for n in self.numbers_of(entry[at + 1 :]) if n in in_file]
        return self._in_split(numbers)

    def _in_split(self, numbers: Sequence[int]) -> list[int]:
        return [n - self.first for n in numbers if self.first <= n < self.last]

    def _why_empty(self) -> str:
        count = counted(self.last - self.first, "sample")
        return f"split {self.split_part!r} has {count}{self._left_none()}"

    def _left_none(self) -> str:
        """Return in words that a split has samples, but not for this reader."""
        return ", but subset and exclude leave none" if self.last > self.first else ""


@dataclass(frozen=True)
class RowOptions:
    """The options under `read` in a document for files with rows.

    Args:
        columns: The columns to read; None for those in the field map, or else all.
        sample_type: The sample type of rows, such as "CaptioningSample"; None leaves them to
            cookers.
        field_map: For each field of the sample type, the column that it is taken from.
        split: The shares of train, val and test in the rows, such as "99,1,0"; None if file names
            tell the split, or else all rows are "train".
        origin: Where the options were written.
        allow: What the user, not the document, allows the data to do.

    Raises:
        ConfigError: If they are invalid.
    """

    columns: Sequence[str] | None = None
    sample_type: str | None = None
    field_map: Mapping[str, str] | None = None
    split: str | None = None
    origin: str = ""
    allow: Collection[str] = ()

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise ConfigError(f"{self.origin}: read: {problem}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the options."""
        return tuple(f.name for f in fields(cls) if f.name not in ("origin", "allow"))

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
            yield f"sample_type is {self.sample_type!r}; expected a name such as CaptioningSample"
        if self.field_map is not None and not isinstance(self.field_map, Mapping):
            yield f"field_map is {self.field_map!r}; expected a column for each field"
        if self.columns is not None and self.field_map is not None:
            yield "field_map already lists the columns to read; drop columns"
        if self.split is not None:
            parse_shares(self.split, origin=self.origin)


def row_config(
    leaf: Leaf, *, has_folder: bool = True, options: type[RowOptions] = RowOptions
) -> DatasetConfig:
    """Return the config of the rows that a leaf refers to.

    Args:
        leaf: The entry in the document.
        has_folder: Whether the dataset is a folder, which may describe itself.
        options: The options in the document.
    """
    chosen = options(**leaf.read, origin=leaf.origin)
    if chosen.sample_type is not None:
        return DatasetConfig(
            crude=False,
            sample_type=("energon", chosen.sample_type),
            field_map=chosen.field_map,
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
        options_type: The options under `read` in a document.
    """

    source: Callable[..., Source]
    options_type: type[RowOptions] = RowOptions
    options = RowOptions.names()

    def splits_of(self, address: str) -> Collection[str]:
        """Return the splits according to its files; "" if they do not tell."""
        raise NotImplementedError

    def split_names(
        self, address: str, split_config: str | None = None, allow: Collection[str] = ()
    ) -> list[str]:
        splits = list(self.splits_of(address))
        return ratio_names(None, origin=address) if splits == [""] else splits

    def config(self, leaf: Leaf) -> DatasetConfig:
        return row_config(leaf, options=self.options_type)

    def open(
        self, request: OpenRequest, parts: Collection[str] | PartFilter | None = None
    ) -> Source:
        leaf = request.leaf
        options = self.options_type(**leaf.read, origin=leaf.origin, allow=request.allow)
        return self.source(leaf.path, SampleSelection.of(request, parts), options)

    def check_field_map(self, source: Any, field_map: FieldMap) -> None:
        field_map.check_parts(source.all_parts, origin=str(source.path))


Item = tuple[dict[str, Any], dict[str, Any]]
"""The parts of an item, and their file names where part names do not tell."""


class PartSource(NumberedSource):
    """A source of which some parts can be read.

    Attributes:
        part_noun: What a part is called in messages.
        chosen_parts: The parts to read; None for all.
    """

    part_noun: ClassVar[str] = "part"
    chosen_parts: set[str] | None

    @property
    @abstractmethod
    def all_parts(self) -> list[str]:
        """The names of the parts that samples may have."""

    @property
    def part_names(self) -> list[str]:
        """The names of the parts that are read."""
        return [name for name in self.all_parts if self.takes(name)]

    def takes(self, name: str) -> bool:
        """Return whether a part is read."""
        return self.chosen_parts is None or name in self.chosen_parts

    def parts_to_read(
        self, parts: Collection[str] | PartFilter | None, columns: Sequence[str] | None
    ) -> set[str] | None:
        """Return the parts that a document names, or else the requested ones; None for all.

        Args:
            parts: The requested parts; None for all.
            columns: What the document names; None for nothing.

        Raises:
            ConfigError: If the document names a part that there is not.
        """
        names = parts if columns is None else columns
        if names is None:
            return None
        if isinstance(names, PartFilter):
            return {name for name in self.all_parts if name in names}
        matches = {name: find_part(self.all_parts, name) for name in names}
        missing = next((name for name in columns or () if matches[name] is None), None)
        if missing is not None:
            raise ConfigError(
                f"{self.path}: there is no {self.part_noun} {missing!r}, only "
                f"{', '.join(self.all_parts)}"
            )
        return {own for own in matches.values() if own is not None}


class ItemSource(PartSource):
    """The items of a split of files, each read separately.

    Args:
        path: Path or address of the dataset.
        selection: Which samples to read, and which parts of them.
        bounds: The number of the first item of the split, and the one after its last.
        columns: Which parts to read, according to the document; None leaves it to `selection`.

    Raises:
        ConfigError: If there is no such part.
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        path: AnyPath,
        selection: SampleSelection,
        *,
        bounds: tuple[int, int],
        columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(path, selection, bounds=bounds)
        self.chosen_parts = self.parts_to_read(selection.parts, columns)

    @property
    @abstractmethod
    def mean_sample_bytes(self) -> float:
        """Average size of a sample in bytes."""

    @property
    def number_space(self) -> tuple[str, ...]:
        """What sources have in common if equal numbers mean equal items."""
        return ("items", str(self.path))

    def key_of(self, number: int) -> str:
        """Return the key of an item."""
        return str(number)

    def numbers_of(self, key: str) -> Sequence[int]:
        number = next(iter(numbers_in(key.lstrip("0") or "0")), -1)
        return [number] if number >= 0 and self.key_of(number) == key else []

    @abstractmethod
    def shard_of(self, number: int) -> str:
        """Return the name of the file that an item is in."""

    @abstractmethod
    def content(self) -> Any:
        """Return the settings that a saved state must match, besides the range of the split."""

    @abstractmethod
    def items(self, numbers: Ints) -> Sequence[Item | SampleError]:
        """Return items; the error for one that cannot be read."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of the samples and their order, which a saved state must match."""
        content = {
            "content": self.content(),
            "excluded": self.excluded.tolist(),
            "range": [self.first, self.last, self.start, self.stop],
        }
        return content_fingerprint(len(self), content)

    def read_numbers(
        self, numbers: Ints, keys: RestoreKeys, subflavors: Mapping[str, Any] | None
    ) -> Block:
        samples: list[CrudeSample] = []
        rows = zip(numbers.tolist(), keys, self.items(numbers), strict=True)
        for number, restore_key, item in rows:
            entries = {
                "__key__": self.key_of(number),
                "__shard__": self.shard_of(number),
                "__restore_key__": restore_key,
                "__subflavors__": subflavors,
            }
            if isinstance(item, SampleError):
                samples.append(UnreadableSample(entries, item))
                continue
            parts, files = item
            sample = CrudeSample({**entries, **parts})
            if files:
                sample[PART_FILES] = files
            samples.append(sample)
        return BuiltBlock(samples)

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the samples are; here, nothing is read ahead."""
        return iter(())

    def locate(self, ordinal: int) -> Location:
        """Return where a sample is."""
        number = int(self.numbers(np.array([ordinal]))[0])
        shard, sample, offset = self.position(number)
        return Location(self.key_of(number), shard, sample, offset, tuple(self.part_names))

    def keys(self, ordinals: Ints) -> list[str]:
        return [self.key_of(number) for number in self.numbers(ordinals).tolist()]

    def position(self, number: int) -> tuple[str, int, int]:
        """Return the file of an item, its number there, and its offset."""
        return self.shard_of(number), number, 0

    def ranges(self) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
        return self.number_space, {"": self.edges()}


def file_of_part(name: str, value: Any) -> str | None:
    """Return the file name of a part whose name does not tell it; None if it does or is unknown."""
    if not isinstance(value, bytes) or is_decoded(name):
        return None
    extension = guess_extension(value)
    return None if extension is None else f"{name}.{extension}"
