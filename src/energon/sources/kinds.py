"""Kinds of datasets: what can be done with the datasets of one.

`metadataset/kind.py` recognizes the kind of a path by file names; its table, `KINDS`, names the
implementation of each. Another package adds one with an entry point of the group
`energon.dataset_kinds` that is a `KindEntry`. Code outside this package never asks which kind a
dataset is, only what the kind can do.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from energon.errors import ConfigError
from energon.io.address import redact
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.kind import dataset_kind, kind_entry, load_attribute
from energon.metadataset.leaf import Leaf
from energon.samples.field_map import FieldMap
from energon.sources.shard_samples import PartFilter
from energon.sources.shards import ShardPool
from energon.sources.source import OpenRequest, Source

if TYPE_CHECKING:
    from energon.sources.files.store import FileStore
    from energon.sources.tree import BrowsedFolder, Contents


class DatasetKind:
    """The operations on datasets of one kind. A kind supports only what it overrides.

    Attributes:
        name: Its name in documents and reports.
        noun: What a dataset of the kind is, for messages: "a folder of files".
        has_files: Whether it has files of its own, whose media `prepare` can record.
        options: What a document may set under `read` for a dataset: names, which are then in
            `Leaf.read`, with values that `open` checks.
        prepares: Whether `prepare` is all that preparing takes; False for folders that commands
            index.
        hint: What users who examine or prepare such a dataset should know; "" for nothing.
    """

    name: str
    noun: str
    has_files = False
    options: tuple[str, ...] = ()
    prepares = True
    hint = ""

    def prepare(self, address: str) -> int:
        """Check the dataset, write what makes opening it fast, and return its number of samples.

        Here, there is nothing to write, and opening it is the check.
        """
        return int(self.describe(address, parts=False)["samples"])

    def check_options(self, leaf: Leaf) -> None:
        """Raise ConfigError if a document sets anything under `read` that is not an option."""
        for name in leaf.read:
            if name not in self.options:
                from difflib import get_close_matches

                close = get_close_matches(str(name), self.options, 1)
                options = (
                    f"its options are {', '.join(self.options)}" if self.options else "has none"
                )
                hint = f"did you mean {close[0]!r}?" if close else options
                raise ConfigError(
                    f"{leaf.origin}: read: {name!r} is not an option of {self.noun}; {hint}"
                )

    def split_names(
        self, address: str, split_config: str | None = None, allow: Collection[str] = ()
    ) -> list[str]:
        """Return the names of its splits.

        Args:
            address: Path or address of the dataset.
            split_config: File below `.nv-meta` that lists them; None for split.yaml.
            allow: What the data may do, see `get_train_dataset`.
        """
        return []

    def config(self, leaf: Leaf) -> DatasetConfig:
        """Return the configuration of its samples: by default, they are left to cookers."""
        return DatasetConfig(origin=leaf.path)

    def open(
        self, request: OpenRequest, parts: Collection[str] | PartFilter | None = None
    ) -> Source:
        """Return the samples of a leaf.

        Args:
            request: The leaf.
            parts: The parts of the samples to read; None reads all.
        """
        raise self.refusal(request.leaf.path, "read sample by sample")

    def unmatched(self, leaf: Leaf) -> list[str]:
        """Describe which entries of a dataset's exclude lists match nothing."""
        return []

    def lists_nothing(self, leaf: Leaf) -> bool:
        """Return whether the split of a leaf is intentionally empty, not by a loss of samples."""
        return False

    def check_field_map(self, source: Any, field_map: FieldMap) -> None:
        """Raise ConfigError if a field map names parts that no sample of `source` has.

        Kinds that cannot tell without reading all samples leave it to the hooks.
        """

    def file_store(
        self, address: str, *, pool: ShardPool | None = None, allow: Collection[str] = ()
    ) -> FileStore[bytes]:
        """Return its files by name, for cookers and as auxiliary data: here, parts of samples.

        Args:
            address: Path or address of the dataset.
            pool: Opens the files of all datasets of a run; None makes a pool.
            allow: What the data may do, see `get_train_dataset`.
        """
        from energon.sources.files.samples import SampleFileStore

        return SampleFileStore(self, address, pool=pool, allow=allow)

    def browse(
        self, address: str, *, pool: ShardPool | None = None, sample_folders: bool = False
    ) -> BrowsedFolder:
        """Return the dataset as a tree of files, for `energon mount`."""
        raise self.refusal(address, "shown as files")

    def contents(self, source: Any) -> Contents:
        """Return the parts of the samples of an open source, for `energon view`.

        The operations of every source are sufficient; a kind that knows where parts are can open
        them without reading samples.
        """
        from energon.sources.tree import Contents

        return Contents(source)

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        """Return its contents as plain data, for `energon info`.

        `samples` is their number; `splits` has a dict for each, which may have `samples`, `shards`
        and `excluded`. Sizes in `bytes`, and further facts, are optional. A kind without a
        `.nv-meta` folder ignores the names of documents there, as `**documents`.

        Args:
            address: Path or address of the dataset.
            split_config: File below `.nv-meta` that lists the splits.
            dataset_config: File below `.nv-meta` that describes samples.
            parts: Whether to describe the parts of samples, too, which takes longer.
        """
        raise self.refusal(address, "described")

    def refusal(self, address: str, what: str) -> ConfigError:
        """Return the error for an operation that this kind does not support."""
        return ConfigError(f"{redact(address)} is {self.noun}, which cannot be {what}")


def split_description(samples: int, shards: int, *, excluded: int = 0) -> dict[str, int]:
    """Return the description of a split by `DatasetKind.describe`."""
    return {"samples": samples, "shards": shards, "excluded": excluded}


def description(
    samples: int,
    shards: int,
    num_bytes: int,
    splits: Mapping[str, Mapping[str, int]],
    *,
    sample_type: str = "CrudeSample",
) -> dict[str, Any]:
    """Return the description of a dataset that has no index of its shards."""
    return {
        "sample_type": sample_type,
        "samples": samples,
        "shards": shards,
        "bytes": num_bytes,
        "missing_shards": [],
        "energon_version": None,
        "splits": splits,
    }


def kind_of(address: str | os.PathLike[str]) -> DatasetKind:
    """Return the kind of the dataset at an address.

    Raises:
        DatasetNotFoundError: If there is nothing that can be loaded.
        ConfigError: If it is a metadataset, which is not a dataset itself.
        StorageError: If it is remote and cannot be reached.
    """
    return kind_named(dataset_kind(address), os.fspath(address))


def kind_named(name: str, address: str = "") -> DatasetKind:
    """Return the kind of this name.

    Args:
        name: The result of `dataset_kind`.
        address: The dataset, for messages.
    """
    home = kind_entry(name).home
    if not home:
        raise ConfigError(f"{redact(address)} is a {name}, not a dataset")
    kind: DatasetKind = load_attribute(home)
    return kind
