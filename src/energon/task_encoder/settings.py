"""What a call of a dataset getter says about order and batches."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from energon.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How samples become batches: arguments of the getters, by their names."""

    batch_size: int | None
    batch_drop_last: bool = False
    packing_buffer_size: int | None = None

    def __post_init__(self) -> None:
        # How small they may be is for the stages to say.
        _check_whole("batch_size", self.batch_size)
        _check_whole("packing_buffer_size", self.packing_buffer_size)


@dataclass(frozen=True, kw_only=True)
class TrainSettings(BatchSettings):
    """Arguments of `get_train_dataset`, by their names.

    Raises:
        ConfigError: If one of them makes no sense by itself.
    """

    shuffle_buffer_size: int | None = None
    max_samples_per_sequence: int | None = None
    virtual_epoch_length: int = 0
    shuffle_over_epochs_multiplier: int | None = 1
    parallel_shard_iters: int | None = None
    blend_unit: Literal["sample", "batch"] | None = None
    repeat: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_whole("virtual_epoch_length", self.virtual_epoch_length)
        _check_least(1, "max_samples_per_sequence", self.max_samples_per_sequence)
        _check_least(1, "parallel_shard_iters", self.parallel_shard_iters)
        _check_least(0, "shuffle_buffer_size", self.shuffle_buffer_size)


@dataclass(frozen=True, kw_only=True)
class ValidationSettings(BatchSettings):
    """Arguments of `get_val_dataset`, by their names.

    Raises:
        ConfigError: If one of them makes no sense by itself.
    """

    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_least(0, "limit", self.limit)


def _check_least(least: int, name: str, value: Any) -> None:
    _check_whole(name, value)
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, or None, got {value}")


def _check_whole(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, Integral):
        raise ConfigError(f"{name} must be a whole number or None, got {value!r}")
