"""Report arguments that a function does not have, and load the functions that options name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

from energon.errors import ConfigError, UnknownArgumentError
from energon.messages import nearest

F = TypeVar("F", bound=Callable[..., Any])

_CONFIG = "worker_config=WorkerConfig(rank=0, world_size=1, num_workers=2)"
ARGUMENT_HOMES = {
    **dict.fromkeys(
        ("rank", "world_size", "num_workers", "lanes", "seed_offset", "data_parallel_group"),
        f"it belongs to the worker configuration: get_train_dataset(..., {_CONFIG})",
    ),
    "seed": "the seed of a run is WorkerConfig(seed_offset=...)",
    "shuffle": "training data are shuffled unless shuffle_over_epochs_multiplier is None",
    "split": "the split is split_part",
    "drop_last": "it is called batch_drop_last",
    **dict.fromkeys(
        ("prefetch_factor", "workers", "pin_memory", "cache_pool", "start_method", "trace"),
        "pass it to get_savable_loader or get_loader",
    ),
    **dict.fromkeys(
        ("batch_size", "task_encoder", "virtual_epoch_length", "split_part", "batch_drop_last"),
        "pass it to get_train_dataset or get_val_dataset",
    ),
}
"""Where arguments belong that other functions or libraries have."""


def check_arguments(function: F) -> F:
    """Make a function refuse arguments that it does not have with an `UnknownArgumentError`."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @wraps(function)
    def checked(*args: Any, **arguments: Any) -> Any:
        for name in arguments:
            if name not in names:
                raise UnknownArgumentError(
                    f"{function.__name__}() has no argument {name!r}{_advice(name, names)}"
                )
        return function(*args, **arguments)

    return checked  # type: ignore[return-value]


def _advice(name: str, names: tuple[str, ...]) -> str:
    if name in ARGUMENT_HOMES:
        return f"; {ARGUMENT_HOMES[name]}"
    close = nearest(name, names, cutoff=0.75)
    return f"; did you mean {close!r}?" if close else f"; it has {', '.join(names)}"


def load_named(option: str, given: str) -> Any:
    """Return the object named by `module:name`; the module may be in the working directory.

    Args:
        option: What names it, for messages.
        given: The name.

    Raises:
        ConfigError: If there is no such class or function.
    """
    module, _, name = given.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = import_module(module)
        for step in name.split("."):
            value = getattr(value, step)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{option} {given}: {error}; expected MODULE:NAME") from error
    if not callable(value):
        raise ConfigError(f"{option} {given}: {name} is not callable")
    return value
