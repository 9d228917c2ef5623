"""Factories of joins and of JSONL files, and classes named after their sample type.

Before `sample_type`, every sample type had a dataset class.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from energon.compat.megatron.datasets.leaf import (
    DecodingEncoder,
    LeafDataset,
    opened_leaf,
    recipe_of,
)
from energon.compat.megatron.datasets.webdataset import StandardWebdatasetFactory, WebdatasetFactory
from energon.compat.megatron.worker import note_ignored
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError
from energon.metadataset.leaf import JoinMember, Leaf
from energon.prepare.jsonl import prepare_jsonl
from energon.samples.sample_types import flavors
from energon.task_encoder.leaves import open_leaves
from energon.task_encoder.load import JoinLoading, LeafLoading
from energon.task_encoder.open_join import open_join
from energon.worker import WorkerConfig


class JoinedWebdatasetFactory(LeafDataset):
    """The samples of several prepared datasets, joined by their keys.

    Args:
        inner_datasets: The datasets, as a list or by argument name of the joiner. The first one
            determines the keys of the join.
        joiner: Takes a sample of each dataset, or None where it is missing, and returns the joined
            sample; or a sample type, whose `from_joined` does so.
        training: Whether each pass is shuffled, or samples come in order.
        worker_config: Rank and workers.
        nonmatch: What to do if a dataset has no sample with a key: fail, skip the key, or pass
            None to the joiner.
        decoder: Decodes the parts; None leaves them as bytes.
        subset: A range of joined samples, as (start, stop) or in percent.
        join_index: Has no effect, as is logged once: the index is built on demand, and kept in the
            user's cache folder.
        order: `shuffle_over_epochs`, which is `shuffle_over_epochs_multiplier` of
            `get_train_dataset`, `parallel_shard_iters` and `max_samples_per_sequence`.

    Raises:
        ConfigError: If the arguments are invalid, or a sample without a match is an error.
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        inner_datasets: Sequence[WebdatasetFactory] | Mapping[str, WebdatasetFactory],
        *,
        joiner: Callable[..., Any],
        training: bool = True,
        worker_config: WorkerConfig,
        nonmatch: Literal["error", "skip", "none"] = "error",
        decoder: SampleDecoder | None = SampleDecoder(),  # noqa: B008 - immutable
        subset: Any = None,
        join_index: str | os.PathLike[str] | None = None,
        **order: Any,
    ) -> None:
        note_ignored("the index is built on demand", join_index=join_index is not None)
        names, datasets = _members(inner_datasets)
        members = [dataset.opened for dataset in datasets]
        first = members[0]
        leaf = Leaf(
            path=first.loading.dataset_path,
            split_part="join",
            subsets=() if subset is None else (subset,),
            origin="JoinedWebdatasetFactory",
            join=tuple(
                JoinMember(Leaf(member.loading.dataset_path, "join"), nonmatch if at else "error")
                for at, member in enumerate(members)
            ),
        )
        opened = opened_leaf(
            open_join(leaf, [dataset.source for dataset in datasets]),
            LeafLoading(
                name="&".join(member.loading.name for member in members),
                dataset_path=first.loading.dataset_path,
                subflavors=first.loading.subflavors,
                primary=first.loading.primary,
                join=JoinLoading(
                    tuple(member.loading for member in members), names, _joining(joiner)
                ),
            ),
            "join",
        )
        super().__init__(
            recipe_of(
                [opened],
                worker_config,
                training=training,
                encoder=DecodingEncoder(decoder),
                **order,
            )
        )
        self.inner_datasets = inner_datasets


def _members(
    given: Sequence[WebdatasetFactory] | Mapping[str, WebdatasetFactory],
) -> tuple[tuple[str | None, ...], list[WebdatasetFactory]]:
    """Return the arguments of the joiner, and the datasets."""
    names: tuple[str | None, ...]
    if isinstance(given, Mapping):
        names, datasets = tuple(given), list(given.values())
    else:
        names, datasets = (None,) * len(given), list(given)
    if len(datasets) < 2:
        raise ConfigError(f"a join needs two datasets or more, got {len(datasets)}")
    for dataset in datasets:
        if not isinstance(dataset, WebdatasetFactory):
            raise ConfigError(
                f"cannot join {type(dataset).__name__}; expected prepared datasets of shards, "
                "like CrudeWebdataset(path, ...)"
            )
    return names, datasets


def _joining(joiner: Any) -> Callable[..., Any]:
    """Return the function that joins samples."""
    if isinstance(joiner, type):
        joiner = getattr(joiner, "from_joined", None)
    if not callable(joiner):
        raise ConfigError("joiner: expected a function, or a sample type with from_joined")
    return joiner  # type: ignore[no-any-return]


class JsonlFactory(LeafDataset):
    """The lines of a JSONL file, as crude samples with the part `json`.

    Args:
        path: The file, indexed by `energon prepare`.
        split_part: The split to read.
        training: Whether each pass is shuffled, or samples come in order.
        worker_config: Rank and workers.
        subflavors: The `__subflavors__` of the samples.
        decoder: Decodes the lines; None leaves them as bytes.
        subset: A range of samples, as (start, stop) or in percent.
        order: See `JoinedWebdatasetFactory`.

    Raises:
        ConfigError: If the arguments are invalid.
        DatasetNotFoundError: If the file is missing, or not indexed.
        EmptyDatasetError: If there are no samples.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split_part: str = "train",
        training: bool = True,
        worker_config: WorkerConfig,
        subflavors: Mapping[str, Any] | None = None,
        decoder: SampleDecoder | None = SampleDecoder(),  # noqa: B008 - immutable
        subset: Any = None,
        **order: Any,
    ) -> None:
        subsets = () if subset is None else (subset,)
        leaf = Leaf(os.fspath(path), split_part, subsets=subsets, kind="jsonl")
        super().__init__(
            recipe_of(
                open_leaves([leaf], subflavors),
                worker_config,
                training=training,
                encoder=DecodingEncoder(decoder),
                **order,
            )
        )

    @classmethod
    def prepare_dataset(cls, path: str | os.PathLike[str]) -> int:
        """Index a JSONL file; return its number of samples."""
        return prepare_jsonl(path)


class FlavorWebdataset(StandardWebdatasetFactory):
    """A dataset of one sample type. Deprecated: name the type with `sample_type`."""

    __sample_type__: type

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        kind = type(self)
        sample_type = kind.__sample_type__
        warnings.warn(
            f"{kind.__name__} is deprecated; use StandardWebdatasetFactory(path, "
            f"sample_type={sample_type.__name__})",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__(path, sample_type=sample_type, **settings)


def __getattr__(name: str) -> Any:
    """Return the dataset class of a sample type, by its former name."""
    sample_type = flavors().get(name)
    if sample_type is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names = {"__sample_type__": sample_type, "__module__": __name__}
    kind = globals()[name] = type(name, (FlavorWebdataset,), names)
    return kind
