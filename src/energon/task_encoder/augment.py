"""A task encoder around another one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from copy import copy
from typing import Any

from energon.task_encoder.build import BUILDERS
from energon.task_encoder.cooker import Cooker, is_generator_function
from energon.task_encoder.encoder import TaskEncoder
from energon.task_encoder.encoder import overrides as overrides_itself

_SETTINGS = (
    "cookers",
    "decoder",
    "__default_failure_tolerance__",
    "__default_failure_rate__",
)

HOOKS = (
    "cook_crude_sample",
    "encode_sample",
    "preencode_sample",
    "postencode_sample",
    "select_samples_to_pack",
    "pack_selected_samples",
    "batch_group_criterion",
    "batch",
    "encode_batch",
)


class AugmentTaskEncoder(TaskEncoder[Any, Any, Any, Any]):
    """Adds to what another task encoder does. Subclass it, override hooks, call `super()`.

    All hooks, settings and other attributes that the subclass does not have are those of
    `task_encoder`, with their marks; an override without marks has those of what it overrides.

    Args:
        task_encoder: The encoder that does the rest.

    Example:
        >>> class Loud(AugmentTaskEncoder):
        ...     def encode_sample(self, sample):
        ...         return super().encode_sample(sample).upper()
    """

    def __init__(self, task_encoder: TaskEncoder[Any, Any, Any, Any]) -> None:
        self.task_encoder = task_encoder
        for name in _SETTINGS:
            if getattr(type(self), name) is getattr(TaskEncoder, name):
                setattr(self, name, getattr(task_encoder, name))

    def __getattr__(self, name: str) -> Any:
        if name == "task_encoder":  # while a copy is being unpickled
            raise AttributeError(name)
        return getattr(self.task_encoder, name)

    def cook_crude_sample(self, sample: Any, cooker: Cooker, aux: dict[str, Any]) -> Any:
        return self.task_encoder.cook_crude_sample(sample, cooker, aux)

    def encode_sample(self, sample: Any) -> Any:
        return self.task_encoder.encode_sample(sample)

    def preencode_sample(self, sample: Any) -> Any:
        return self.task_encoder.preencode_sample(sample)

    def postencode_sample(self, sample: Any) -> Any:
        return self.task_encoder.postencode_sample(sample)

    def select_samples_to_pack(self, samples: list[Any]) -> Any:
        return self.task_encoder.select_samples_to_pack(samples)

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return self.task_encoder.pack_selected_samples(samples)

    def batch_group_criterion(self, sample: Any) -> tuple[Hashable, int | None]:
        return self.task_encoder.batch_group_criterion(sample)

    def batch(self, samples: list[Any]) -> Any:
        return self.task_encoder.batch(samples)

    def encode_batch(self, batch: Any) -> Any:
        return self.task_encoder.encode_batch(batch)

    def build_train_datasets(self, **arguments: Any) -> Any:
        # With the hooks of this encoder, also where the inner one says how they are joined.
        return self._build("build_train_datasets", **arguments)

    def build_val_datasets(self, **arguments: Any) -> Any:
        return self._build("build_val_datasets", **arguments)

    def build_encode_sample(self, dataset: Any, **arguments: Any) -> Any:
        return self._build("build_encode_sample", dataset, **arguments)

    def build_cook_crude_sample(self, dataset: Any, **arguments: Any) -> Any:
        return self._build("build_cook_crude_sample", dataset, **arguments)

    def build_batch(self, dataset: Any, **arguments: Any) -> Any:
        return self._build("build_batch", dataset, **arguments)

    def _load_dataset(self, dataset: Any, *args: Any, **arguments: Any) -> Any:
        return self._build("_load_dataset", dataset, *args, **arguments)

    def _build(self, builder: str, *args: Any, **arguments: Any) -> Any:
        """Let the inner encoder build something of the hooks and builders of this one."""
        inner = copy(self.task_encoder)
        for name in HOOKS:
            setattr(inner, name, self._hook(name))
        for name in BUILDERS:
            if getattr(type(self), name) is not getattr(AugmentTaskEncoder, name):
                setattr(inner, name, getattr(self, name))
        vars(inner).update(_hook=self._hook, _overrides=self._overrides)
        return getattr(type(inner), builder)(inner, *args, **arguments)

    def _hook(self, name: str) -> Any:
        return find_hook(self, name)[0]

    def _overrides(self, name: str) -> bool:
        return overrides(self, name)


def overrides(encoder: TaskEncoder[Any, Any, Any, Any], name: str) -> bool:
    """Return whether a hook of `encoder`, or of what it delegates to, does anything."""
    *_, innermost = _delegation(encoder, name)
    return overrides_itself(innermost, name)


def find_hook(encoder: TaskEncoder[Any, Any, Any, Any], name: str) -> tuple[Any, Any]:
    """Return the method behind a hook, and the method whose marks say how it is run."""
    *_, innermost = _delegation(encoder, name)
    hook = marked = getattr(innermost, name)
    while isinstance(innermost, AugmentTaskEncoder) and not hasattr(marked, "__stateless__"):
        innermost = innermost.task_encoder
        marked = getattr(innermost, name)
    return hook, marked


def may_yield(encoder: TaskEncoder[Any, Any, Any, Any], name: str) -> bool:
    """Return whether a hook of `encoder`, or one that it may call for it, is a generator."""
    encoders = [encoder]
    while isinstance(encoder, AugmentTaskEncoder):
        encoder = encoder.task_encoder
        encoders.append(encoder)
    return any(
        is_generator_function(space[name])
        for encoder in encoders
        for space in (vars(encoder), *map(vars, type(encoder).__mro__))
        if name in space
    )


def _delegation(
    encoder: TaskEncoder[Any, Any, Any, Any], name: str
) -> Iterator[TaskEncoder[Any, Any, Any, Any]]:
    """Yield `encoder`, and what it only hands the hook on to."""
    yield encoder
    while (
        isinstance(encoder, AugmentTaskEncoder)
        and name not in vars(encoder)
        and getattr(type(encoder), name) is getattr(AugmentTaskEncoder, name)
    ):
        encoder = encoder.task_encoder
        yield encoder
