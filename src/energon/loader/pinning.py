"""Put the tensors of a batch into page-locked memory, or onto a device."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from energon.errors import ConfigError
from energon.extra import needs_extra


def pin_batches(wanted: bool | None) -> Callable[[Any], Any] | None:
    """Return what pins a batch, or None if nothing is to be pinned.

    Args:
        wanted: None pins if torch is imported and sees a CUDA device.
    """
    if wanted is False or (wanted is None and "torch" not in sys.modules):
        return None
    if _cuda_is_available():
        return pin_memory
    if wanted:
        raise ConfigError("pin_memory=True, but torch sees no CUDA device; leave pin_memory out")
    return None


def pin_memory(batch: Any) -> Any:
    """Return `batch` with every CPU tensor copied into page-locked memory."""
    return map_tensors(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())


def to_device(batch: Any, device: Any, *, non_blocking: bool = True) -> Any:
    """Return `batch` with every tensor on `device`; pinned ones are copied in the background."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to the tensors in it.

    Goes into dicts, lists, tuples and dataclasses; other objects are passed through. What
    holds no tensor is not copied.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return value

    def mapped(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return function(item)
        if isinstance(item, dict):
            return _with_items(item, {key: mapped(each) for key, each in item.items()})
        if isinstance(item, (list, tuple)):
            return _with_elements(item, [mapped(each) for each in item])
        if is_dataclass(item) and not isinstance(item, type):
            return _with_fields(item, {f.name: mapped(_get(item, f.name)) for f in fields(item)})
        return item

    return mapped(value)


def _with_items(item: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    if all(items[key] is item[key] for key in items):
        return item
    changed = copy.copy(item)
    changed.update(items)
    return changed


def _with_elements(item: Any, elements: list[Any]) -> Any:
    if all(new is old for new, old in zip(elements, item, strict=True)):
        return item
    if isinstance(item, list):
        return elements
    return type(item)(*elements) if hasattr(item, "_fields") else type(item)(elements)


def _with_fields(item: Any, values: dict[str, Any]) -> Any:
    """Copy a dataclass without running its constructor, which may do work or want arguments."""
    if all(values[name] is _get(item, name) for name in values):
        return item
    changed = copy.copy(item)
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    return changed


def _get(item: Any, name: str) -> Any:
    return getattr(item, name, None)


def _cuda_is_available() -> bool:
    with needs_extra("torch", "pin_memory=True needs torch"):
        import torch
    return bool(torch.cuda.is_available())
