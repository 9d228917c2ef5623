"""Apply a function to the tensors of a sample or a batch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def map_tensors(value: T, function: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Return `value` with `function` applied to the tensors in it.

    Goes into dicts, lists, tuples and dataclasses; other objects are passed through. What
    holds no tensor is not copied.
    """
    if "torch" not in sys.modules:
        return value
    from torch import Tensor

    def mapped(item: Any) -> Any:
        if isinstance(item, Tensor):
            return function(item)
        if isinstance(item, dict):
            return _with_items(item, {key: mapped(each) for key, each in item.items()})
        if isinstance(item, (list, tuple)):
            return _with_elements(item, [mapped(each) for each in item])
        if is_dataclass(item) and not isinstance(item, type):
            values = {each.name: _get(item, each.name) for each in fields(item)}
            values |= getattr(item, "__dict__", {})
            return _with_fields(item, {name: (old, mapped(old)) for name, old in values.items()})
        return item

    return mapped(value)  # type: ignore[no-any-return]


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


def _with_fields(item: Any, values: dict[str, tuple[Any, Any]]) -> Any:
    """Copy a dataclass without running its constructor, which may do work or need arguments."""
    if all(new is old for old, new in values.values()):
        return item
    changed = copy.copy(item)
    for name, (_, new) in values.items():
        object.__setattr__(changed, name, new)
    return changed


def _get(item: Any, name: str) -> Any:
    return getattr(item, name, None)
