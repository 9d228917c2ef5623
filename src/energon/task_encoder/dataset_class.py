"""Datasets opened by a class of the program, named by `__class__` in a `dataset.yaml`.

Documents that name a class of energon never get here. Any other class has to derive from
`DatasetClass`, and to be defined or imported by the program. Its datasets take part in blends,
orders and states like all others: the class determines the samples and how they are decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from energon.errors import ConfigError
from energon.metadataset.dataset_config import DatasetConfig
from energon.samples.sample_types import resolve_class
from energon.sources.source import OpenRequest, Source
from energon.task_encoder.load import SampleLoading
from energon.worker import WorkerConfig


class DatasetClass:
    """Base of the classes that a `dataset.yaml` may name with `__class__`.

    Attributes:
        source: The samples, by number.
    """

    source: Source

    @classmethod
    def open_dataset(cls, opening: DatasetOpening) -> Self:
        """Open the dataset of a document."""
        raise NotImplementedError

    def dataset_config(self) -> DatasetConfig:
        """Return its configuration: order and subflavors."""
        raise NotImplementedError

    def sample_loading(self) -> SampleLoading:
        """Return how its samples are made."""
        raise NotImplementedError


@dataclass(frozen=True)
class DatasetCall:
    """The call that opens datasets, which dataset classes of a program may inspect.

    Args:
        training: Whether it is for training or for validation.
        worker_config: Rank and workers; None if nothing is loaded, as in commands.
        settings: Defaults for settings such as `max_samples_per_sequence`, used unless the
            document or the class sets them.
    """

    training: bool = False
    worker_config: WorkerConfig | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def open(self, opening: DatasetOpening) -> DatasetClass | None:
        """Open the dataset if a class of the program does that; return None for all others.

        Raises:
            ConfigError: If the document names something else than a dataset class, or it fails.
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
class DatasetOpening(OpenRequest):
    """A request to open a dataset, which a class of the program may answer.

    Args:
        call: The call that opens it.
    """

    call: DatasetCall = field(default_factory=DatasetCall)
