"""The nodes of metadatasets, for programs that build them: each stands for a part of a document.

`NAME(key=value)` stands for the dict `{"key": value}`, without values that are None. A tree of
nodes is therefore a document, which the grammar reads and checks.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Self

from energon.compat.megatron.documents.load_dataset import DatasetLoader, LoadedDatasetList
from energon.metadataset.leaf import TraversedDatasetReference
from energon.sources.files.open import open_file_store
from energon.sources.files.store import FileStore


class DocumentNode(dict[str, Any]):
    """A node of a document, with its keys as attributes."""

    keys_of: ClassVar[str] = ""
    """The keys that are allowed."""
    version: ClassVar[str] = "MetadatasetV2"

    def __init_subclass__(cls) -> None:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind, default=None) for name in cls.keys_of.split()]
        )

    def __init__(self, *values: Any, **named: Any) -> None:
        given = inspect.signature(type(self)).bind(*values, **named).arguments
        super().__init__(
            {key: _plain(key, each) for key, each in given.items() if each is not None}
        )

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).keys_of.split():
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.get(name, _DEFAULTS.get(name))

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = _plain(name, value)

    def post_initialize(self, mds_path: Any = None) -> None:
        """Do nothing: paths are opened when they are needed."""

    def get_datasets(self, *, split_part: str, **settings: Any) -> LoadedDatasetList:
        """Return the opened leaves; paths are relative to the working directory."""
        return self._loader(split_part).get_datasets(split_part=split_part, **settings)

    def traverse(self, mds_path: Any = None, *, split_part: str) -> list[TraversedDatasetReference]:
        """Return the datasets that the node consists of, without opening them."""
        return self._loader(split_part).traverse(mds_path, split_part=split_part)

    def prepare(self, split_part: str | None = None) -> Any:
        """Build the join indexes of the node, where they are missing."""
        return self._loader(split_part or "train").prepare()

    def _loader(self, split_part: str) -> DatasetLoader:
        return DatasetLoader({"__class__": self.version, "splits": {split_part: self}})


_DEFAULTS = {
    "weight": 1.0,
    "repetitions": 1,
    "shuffle_over_epochs_multiplier": 1,
    "nonmatch": "error",
}


def _plain(key: str, value: Any) -> Any:
    """Return a value as it appears in a document."""
    if key == "path":
        return str(value)
    if key == "joiner" and callable(value):
        what = "__class__" if inspect.isclass(value) else "__function__"
        return {"__module__": value.__module__, what: value.__qualname__}
    return value


_OF_ALL = "path split_part subflavors shuffle_over_epochs_multiplier dataset_config split_config"
_OF_JOINS = _OF_ALL.replace("path", "join joiner subset")


class MetadatasetBlender(DocumentNode):
    """A list of references in a metadataset of version 1."""

    keys_of = "datasets"
    version = "Metadataset"


class DatasetReferenceV1(DocumentNode):
    """A dataset in a metadataset of version 1."""

    keys_of = f"{_OF_ALL} subflavor weight"


class DatasetReference(DocumentNode):
    """A dataset or another metadataset."""

    keys_of = f"{_OF_ALL} subset aux"


class JoinDatasetReference(DocumentNode):
    """A dataset of a join."""

    keys_of = f"{DatasetReference.keys_of} nonmatch"


class MetadatasetJoin(DocumentNode):
    """Datasets whose samples are joined."""

    keys_of = _OF_JOINS


class BlendDatasetReference(DocumentNode):
    """A dataset of a blend."""

    keys_of = f"weight {DatasetReference.keys_of}"


class BlendJoinDatasetReference(DocumentNode):
    """A join of a blend."""

    keys_of = f"weight {_OF_JOINS}"


class MetadatasetBlend(DocumentNode):
    """Datasets that are drawn by weight."""

    keys_of = "blend subset"


class BlendEpochizedDatasetReference(DocumentNode):
    """A dataset of an epochized blend."""

    keys_of = f"repetitions {DatasetReference.keys_of}"


class BlendEpochizedJoinDatasetReference(DocumentNode):
    """A join of an epochized blend."""

    keys_of = f"repetitions {_OF_JOINS}"


class MetadatasetBlendEpochized(DocumentNode):
    """Datasets with a number of repetitions each."""

    keys_of = "blend_epochized subset"


class SubsetRange(DocumentNode):
    """A range of samples."""

    keys_of = "range"


class AuxDatasetReference(str):
    """The address of a dataset with auxiliary data."""

    def __new__(cls, path: Any) -> Self:
        return super().__new__(cls, path)

    def post_initialize(self, mds_path: Any = None) -> None:
        """Do nothing: it is opened when it is needed."""

    def get_file_store(self) -> FileStore[Any]:
        """Return its files by name."""
        return open_file_store(str(self))


class AuxFilesystemReference(AuxDatasetReference):
    """The address of a folder with auxiliary data."""

    def __new__(cls, fs_path: Any) -> Self:
        return super().__new__(cls, f"filesystem://{fs_path}")
