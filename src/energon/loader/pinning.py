"""Put the tensors of a batch into page-locked memory, or onto a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from energon.errors import ConfigError
from energon.extra import needs_extra
from energon.samples.tensors import map_tensors


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


def _cuda_is_available() -> bool:
    with needs_extra("torch", "pin_memory=True needs torch"):
        import torch
    return bool(torch.cuda.is_available())
