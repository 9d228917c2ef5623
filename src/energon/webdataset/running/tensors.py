"""Make tensors of the arrays in a batch, as torch's DataLoader does of what its workers send."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

_PLAIN = frozenset({bytes, str, int, float, bool, type(None)})


@cache
def has_torch() -> bool:
    """Return whether torch is installed, without importing it, which takes a second or more."""
    return find_spec("torch") is not None


def torch_or_none() -> Any:
    """Return torch, or None where it is not installed."""
    if not has_torch():
        return None
    import torch
    import torch.utils.data

    return torch


def convert(value: Any) -> Any:
    """Return a value with tensors in place of numpy arrays and numbers; tuples become lists.

    torch is imported for the first array.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {name: convert(each) for name, each in value.items()}
    if kind is list or kind is tuple:
        if _PLAIN.issuperset(map(type, value)):
            return list(value)
        return [convert(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return value if value.dtype.kind in "USO" else torch_or_none().as_tensor(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(convert(each) for each in value))
    return value
