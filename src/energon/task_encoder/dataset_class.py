"""Datasets that a class of the program opens: what `__class__` in a `dataset.yaml` names.

The classes that come with energon are a table, and a document that names one of them never gets
here. Any other has to derive from `DatasetClass`, and to be defined or imported by the program.
What it opens takes part in blends, orders and states like every other dataset: it says which
samples there are, and how the bytes of one are decoded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from energon.errors import ConfigError
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Leaf
from energon.samples.field_map import FieldMap
from energon.samples.registry import resolve_class
from energon.sources.kinds import Source, kind_named
from energon.sources.shards import ShardPool
from energon.task_encoder.load import Inherited, LeafDecoder, LoadFunction
from energon.task_encoder.user_dataset import CodeFields
from energon.worker import WorkerConfig


@dataclass(frozen=True)
class SampleLoading:
    """How the samples of a dataset are made of the bytes of their parts.

    Args:
        sample_type: What they become; None for crude samples, which are left to cookers.
        field_map: Makes the fields of `sample_type`.
        decoder: Decodes the parts.
        load: Makes typed samples, instead of all that.
    """

    sample_type: type | None = None
    field_map: FieldMap | CodeFields | None = None
    decoder: LeafDecoder = Inherited.DECODER
    load: LoadFunction | None = None


class DatasetClass:
    """What a class derives from that a `dataset.yaml` may name with `__class__`.

    Attributes:
        source: The samples, by number.
    """

    source: Source

    @classmethod
    def open_dataset(cls, opening: DatasetOpening) -> Self:
        """Return the dataset of a document, opened."""
        raise NotImplementedError

    def dataset_config(self) -> DatasetConfig:
        """Return what it says of its order and its subflavors."""
        raise NotImplementedError

    def sample_loading(self) -> SampleLoading:
        """Return how its samples are made."""
        raise NotImplementedError


@dataclass(frozen=True)
class DatasetCall:
    """For what datasets are opened, which the dataset classes of a program may ask.

    Args:
        training: Whether it is for training, or for validation.
        worker_config: Who loads them; None where nobody does, as in commands.
        settings: More that the dataset is opened with, like `max_samples_per_sequence`, where
            neither its document nor its class says anything else.
    """

    training: bool = False
    worker_config: WorkerConfig | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def open(self, opening: DatasetOpening) -> DatasetClass | None:
        """Return the dataset, if a class of the program opens it; None for all others.

        Raises:
            ConfigError: If the document names a class that is none, or that fails.
            SecurityError: If it names what the program has neither defined nor imported.
        """
        named = opening.config.dataset_class
        if named is None:
            return None
        found: Any = resolve_class(*named, allow=opening.allow, kinds=(DatasetClass,))
        if not (isinstance(found, type) and issubclass(found, DatasetClass)):
            raise ConfigError(
                f"{opening.config.origin}: {'.'.join(named)} is not a dataset class; derive it "
                "from one of megatron.energon, like DefaultDecoderWebdatasetFactory"
            )
        return found.open_dataset(opening)


@dataclass(frozen=True)
class DatasetOpening:
    """One dataset that is about to be opened.

    Args:
        leaf: What a document says of it.
        exclude: Keys of samples that are left out beside what its splits say.
        pool: Where files are opened that all datasets of a run share; None makes one.
        allow: What the data may do, see `get_train_dataset`.
        call: For what it is opened.
    """

    leaf: Leaf
    exclude: Sequence[str] = ()
    pool: ShardPool | None = None
    allow: Collection[str] = ()
    call: DatasetCall = field(default_factory=DatasetCall)

    @cached_property
    def config(self) -> DatasetConfig:
        """What its own description says."""
        return kind_named(self.leaf.kind).config(self.leaf)
