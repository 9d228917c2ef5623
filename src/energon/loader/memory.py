"""The memory of batches: page-locked or on a device, and kept for reuse when freed.

The C library is told not to return freed memory to the system at once. Batches of megabytes are
allocated and freed over and over; if each one takes new memory from the system, page faults cost
more time than copying. Measured with two workers: 2.8 times as many 8-MB samples a second, 4 times
as many images of 70 kB.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from energon.errors import ConfigError, needs_extra
from energon.samples.collate import map_tensors


def pin_batches(pin: bool | None) -> Callable[[Any], Any] | None:
    """Return a function that pins a batch, or None if nothing is to be pinned.

    Args:
        pin: None pins if torch is imported and sees a CUDA device.
    """
    torch = sys.modules.get("torch")
    if pin is False or (pin is None and torch is None):
        return None
    if (torch or _import_torch()).cuda.is_available():
        return pin_memory
    if pin:
        raise ConfigError("pin_memory=True, but torch sees no CUDA device; leave pin_memory out")
    return None


def pin_memory(batch: Any) -> Any:
    """Return `batch` with every CPU tensor copied into page-locked memory."""
    return map_tensors(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())


def to_device(batch: Any, device: Any, *, non_blocking: bool = True) -> Any:
    """Return `batch` with every tensor on `device`; pinned ones are copied in the background."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def _import_torch() -> Any:
    with needs_extra("torch", "pin_memory=True needs torch"):
        import torch
    return torch


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_heap(kept_bytes: int) -> bool:
    """Keep up to `kept_bytes` of freed memory; return whether the C library can do so.

    Settings that the user has made in the environment are left alone; `kept_bytes` of 0 changes
    nothing. Only glibc has these settings.
    """
    if not kept_bytes or any(name in os.environ for name in _USER_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        and mallopt(_M_TRIM_THRESHOLD, kept_bytes)
    )
