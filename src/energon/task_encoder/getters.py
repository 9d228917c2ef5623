"""The getters: from a path to a pipeline for a loader."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from energon.arguments import check_arguments
from energon.metadataset.leaf import LeafList
from energon.metadataset.resolve import DatasetPath, resolve
from energon.plan.balance import Balance
from energon.plan.packs import PlannedPacks
from energon.task_encoder.dataset import SavableDataset
from energon.task_encoder.encoder import AnyTaskEncoder, DefaultTaskEncoder, T_batch, TaskEncoder
from energon.task_encoder.leaves import DatasetCall, OpenedLeaf, open_leaves
from energon.task_encoder.recipe import train_recipe, validation_recipe
from energon.task_encoder.train_plan import TrainSettings, ValidationSettings
from energon.worker import WorkerConfig


@check_arguments
def get_train_dataset(
    path: DatasetPath,
    *,
    split_part: str = "train",
    worker_config: WorkerConfig,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    shuffle_buffer_size: int | None = None,
    max_samples_per_sequence: int | None = None,
    virtual_epoch_length: int = 0,
    shuffle_over_epochs_multiplier: int | None = 1,
    parallel_shard_iters: int | None = None,
    blend_unit: Literal["sample", "batch"] | None = None,
    balance: Balance | None = None,
    pack: PlannedPacks | None = None,
    batch_cost: int | None = None,
    task_encoder: TaskEncoder[Any, Any, Any, T_batch] | None = None,
    repeat: bool = True,
    dataset_config: str | None = None,
    split_config: str | None = None,
    subflavors: Mapping[str, Any] | None = None,
    exclude_from: str | os.PathLike[str] | None = None,
    allow: Collection[str] = (),
) -> SavableDataset[T_batch]:
    """Return the training pipeline over a dataset or metadataset, ready for a loader.

    Args:
        path: Folder of a prepared dataset, a metadataset YAML, or the document as a dict.
        split_part: The split to read.
        worker_config: Rank, workers, lanes and seed.
        batch_size: Samples per batch; None yields samples.
        batch_drop_last: Whether to drop the last batch if it is smaller (only if the data ends).
        packing_buffer_size: Number of samples of a lane that the hooks `select_samples_to_pack`
            and `pack_selected_samples` divide into packs at a time; None does not pack.
        shuffle_buffer_size: Rows of a lane that are permuted together after blending. There is no
            actual buffer: the order is computed. None or 0 for none.
        max_samples_per_sequence: How many consecutive samples are read together (a slice);
            1 shuffles globally; None chooses by the size of samples.
        virtual_epoch_length: Batches of each rank after which a `for` loop ends; 0 for never.
        shuffle_over_epochs_multiplier: 1 shuffles each epoch on its own, m over m epochs, -1
            draws with replacement, None keeps the order of the data.
        parallel_shard_iters: Slices of a dataset open at a time in a lane; None for 16.
        blend_unit: Whether a blend draws single samples, so that batches are mixed, or whole
            batches of one dataset; None for the setting of the metadataset, or samples.
        balance: How the samples of each step are dealt to micro-batches so that their costs are
            equal, see `Balance`; None deals them by chance.
        pack: How samples are packed from their lengths alone, see `PlannedPacks`; batches then have
            `batch_size` packs. None does not plan packs.
        batch_cost: Instead of a batch_size, which is then None: batches have as many samples as
            this cost admits, by `balance`. None does not limit it.
        task_encoder: The user's hooks; None for those of `DefaultTaskEncoder`.
        repeat: Whether to start again at the end of the data. False ends the loop there; each loop
            has all samples, in another order. A weighted blend never ends, unless all of its
            entries have `max_epochs`; then it always ends.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        subflavors: Labels of the samples, which override those of the datasets.
        exclude_from: Folder of quarantine files, see `Quarantine`, or the file of a single dataset,
            whose samples are excluded. None excludes nothing.
        allow: What to allow the data that is refused by default: "code", "pickle", "env",
            "outside", see docs/security.md. ENERGON_ALLOW in the environment does the same.

    Raises:
        ConfigError: If an argument or a document is invalid.
        DatasetNotFoundError: If there is no such dataset.
        EmptyDatasetError: If a leaf has no samples in this split.
        SecurityError: If a dataset needs something that is not allowed.

    Example:
        >>> from energon import WorkerConfig, get_loader, get_train_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_train_dataset("photos", worker_config=config, batch_size=4)
        >>> batch = next(iter(get_loader(dataset)))
        >>> type(batch).__name__, len(batch.caption)
        ('CaptioningSample', 4)
    """
    settings = TrainSettings(
        batch_size=batch_size,
        batch_drop_last=batch_drop_last,
        packing_buffer_size=packing_buffer_size,
        shuffle_buffer_size=shuffle_buffer_size,
        max_samples_per_sequence=max_samples_per_sequence,
        virtual_epoch_length=virtual_epoch_length,
        shuffle_over_epochs_multiplier=shuffle_over_epochs_multiplier,
        parallel_shard_iters=parallel_shard_iters,
        blend_unit=blend_unit,
        balance=balance,
        pack=pack,
        batch_cost=batch_cost,
        repeat=repeat,
        exclude_from=exclude_from,
    )
    encoder: AnyTaskEncoder = task_encoder or DefaultTaskEncoder()
    resolved, opened = open_run_data(
        path,
        encoder,
        worker_config,
        training=True,
        split_part=split_part,
        dataset_config=dataset_config,
        split_config=split_config,
        subflavors=subflavors,
        exclude_from=exclude_from,
        allow=allow,
    )
    recipe = train_recipe(resolved, opened, encoder, settings, worker_config)
    return encoder.assemble(recipe)  # type: ignore[no-any-return]


@check_arguments
def get_val_dataset(
    path: DatasetPath,
    *,
    split_part: str = "val",
    worker_config: WorkerConfig,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    limit: int | None = None,
    task_encoder: TaskEncoder[Any, Any, Any, T_batch] | None = None,
    dataset_config: str | None = None,
    split_config: str | None = None,
    subflavors: Mapping[str, Any] | None = None,
    exclude_from: str | os.PathLike[str] | None = None,
    allow: Collection[str] = (),
) -> SavableDataset[T_batch]:
    """Return the validation pipeline: each sample once, in the order of the datasets.

    Weights and repetitions are ignored. Every pass starts from the beginning.

    Args:
        path: Folder of a prepared dataset, a metadataset YAML, or the document as a dict.
        split_part: The split to use. "val" is also found as "validation", "valid" or "dev", if only
            one of them exists.
        worker_config: Rank and workers.
        batch_size: Samples per batch; None yields samples.
        batch_drop_last: Whether to drop the last batch if it is smaller.
        packing_buffer_size: Samples of a lane that are divided into packs together, by the
            hooks `select_samples_to_pack` and `pack_selected_samples`; None does not pack.
        limit: Maximum number of batches of each rank in a pass; None or 0 for all.
        task_encoder: The user's hooks; None for those of `DefaultTaskEncoder`.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        subflavors: Labels of the samples, which override those of the datasets.
        exclude_from: Folder of quarantine files, see `Quarantine`, or the file of a single dataset,
            whose samples are excluded. None excludes nothing.
        allow: What to allow the data that is refused by default: "code", "pickle", "env",
            "outside", see docs/security.md. ENERGON_ALLOW in the environment does the same.

    Raises:
        ConfigError: If an argument or a document is invalid.
        DatasetNotFoundError: If there is no such dataset.
        EmptyDatasetError: If a leaf has no samples in this split.
        SecurityError: If a dataset needs something that is not allowed.

    Example:
        >>> from energon import WorkerConfig, get_loader, get_val_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_val_dataset("photos", worker_config=config, batch_size=4)
        >>> [batch.caption for batch in get_loader(dataset)]
        [['grey number 8', 'grey number 9']]
    """
    settings = ValidationSettings(
        batch_size=batch_size,
        batch_drop_last=batch_drop_last,
        packing_buffer_size=packing_buffer_size,
        limit=limit,
    )
    encoder: AnyTaskEncoder = task_encoder or DefaultTaskEncoder()
    _, opened = open_run_data(
        path,
        encoder,
        worker_config,
        training=False,
        split_part=split_part,
        dataset_config=dataset_config,
        split_config=split_config,
        subflavors=subflavors,
        exclude_from=exclude_from,
        allow=allow,
    )
    recipe = validation_recipe(opened, encoder, settings, worker_config)
    return encoder.assemble(recipe)  # type: ignore[no-any-return]


@check_arguments
def get_val_datasets(
    path: DatasetPath,
    *,
    split_part: str = "val",
    worker_config: WorkerConfig,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    limit: int | None = None,
    task_encoder: TaskEncoder[Any, Any, Any, T_batch] | None = None,
    dataset_config: str | None = None,
    split_config: str | None = None,
    subflavors: Mapping[str, Any] | None = None,
    exclude_from: str | os.PathLike[str] | None = None,
    allow: Collection[str] = (),
) -> list[tuple[SavableDataset[T_batch], OpenedLeaf]]:
    """Return a validation pipeline for each dataset, to measure losses separately.

    Each comes with its leaf, whose `name`, `paths` and `subflavors` identify the dataset.
    Arguments and errors are those of `get_val_dataset`.

    Example:
        >>> from energon import WorkerConfig, get_val_datasets
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> len(get_val_datasets("photos", worker_config=config, batch_size=4))
        1
    """
    settings = ValidationSettings(
        batch_size=batch_size,
        batch_drop_last=batch_drop_last,
        packing_buffer_size=packing_buffer_size,
        limit=limit,
    )
    encoder: AnyTaskEncoder = task_encoder or DefaultTaskEncoder()
    _, opened = open_run_data(
        path,
        encoder,
        worker_config,
        training=False,
        split_part=split_part,
        dataset_config=dataset_config,
        split_config=split_config,
        subflavors=subflavors,
        exclude_from=exclude_from,
        allow=allow,
    )
    return [
        (encoder.assemble(validation_recipe([leaf], encoder, settings, worker_config)), leaf)
        for leaf in opened
    ]


def open_run_data(
    path: DatasetPath,
    encoder: AnyTaskEncoder,
    worker_config: WorkerConfig,
    *,
    training: bool,
    subflavors: Mapping[str, Any] | None,
    exclude_from: str | os.PathLike[str] | None,
    allow: Collection[str],
    call: Callable[[bool, WorkerConfig, Mapping[str, Any]], DatasetCall] = DatasetCall,
    **document: Any,
) -> tuple[LeafList, list[OpenedLeaf]]:
    """Return the resolved document of a run, and its opened datasets.

    Args:
        path: See `get_train_dataset`.
        encoder: The user's hooks.
        worker_config: Rank and workers.
        training: Whether it is for training or for validation.
        subflavors: See `get_train_dataset`.
        exclude_from: See `get_train_dataset`.
        allow: See `get_train_dataset`.
        call: Makes the description of the call that dataset classes of the program may inspect.
        document: Further arguments of `resolve`.
    """
    if not isinstance(worker_config, WorkerConfig):
        raise TypeError(
            f"worker_config={worker_config!r}: expected a WorkerConfig, as "
            "WorkerConfig.default_worker_config(num_workers=2) returns it"
        )
    resolved = resolve(path, training=training, allow=allow, **document)
    described = call(training, worker_config, {"decoder": getattr(encoder, "decoder", None)})
    return resolved, open_leaves(resolved.leaves, subflavors, exclude_from, allow, described)
