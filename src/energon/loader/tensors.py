"""How torch tensors cross a process boundary: as the bytes of their storage.

The bytes become a numpy array, which pickle protocol 5 hands over without a copy; on the other
side a tensor is laid over them. Tensors that share a storage share it there, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_WHOLE_STORAGE_RATIO = 2
"""A tensor that shows less than 1/2 of its storage takes only its own elements along."""


class TensorReducer:
    """Reduces the tensors of one pickle; remembers which storages are in it already."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._storages: dict[int, Bytes] = {}

    def clear(self) -> None:
        """Forget the storages, before the next pickle."""
        self._storages.clear()

    def reduce(self, tensor: Any) -> Any:
        """Return what `reducer_override` has to return for `tensor`."""
        if type(tensor) is self._torch.nn.Parameter:
            return self._torch.nn.Parameter, (tensor.data, tensor.requires_grad)
        if not self._is_plain(tensor):
            return NotImplemented
        device = None if tensor.device.type == "cpu" else str(tensor.device)
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        storage, plain = self._bytes_of(plain)
        layout = (
            str(plain.dtype).removeprefix("torch."),
            plain.storage_offset(),
            tuple(plain.shape),
            plain.stride(),
        )
        return rebuild_tensor, (storage, *layout, bool(tensor.requires_grad), device)

    def _is_plain(self, tensor: Any) -> bool:
        """Return whether storage and layout are all that there is to it."""
        return (
            type(tensor) is self._torch.Tensor
            and tensor.layout is self._torch.strided
            and not tensor.is_quantized
            and tensor.device.type != "meta"
            and not tensor.__dict__
        )

    def _bytes_of(self, tensor: Any) -> tuple[Bytes, Any]:
        """Return the bytes of the storage of `tensor`, and a tensor over exactly that storage."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        known = self._storages.get(address)
        if known is not None and known.nbytes == size:
            return known, tensor
        if size > _WHOLE_STORAGE_RATIO * tensor.nbytes:
            tensor = tensor.clone(memory_format=self._torch.contiguous_format)
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        found = self._torch.empty(0, dtype=self._torch.uint8).set_(storage).numpy()
        if size:
            # Keeping the array keeps the address taken until the pickle is done.
            self._storages[address] = found
        return found, tensor


def rebuild_tensor(
    storage: Bytes,
    dtype: str,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    device: str | None,
) -> Any:
    """Return a tensor over the bytes `storage`, without copying them to stay on the CPU."""
    import torch

    if storage.size:
        shared = torch.from_numpy(storage).untyped_storage()
        tensor = torch.empty(0, dtype=getattr(torch, dtype)).set_(shared, offset, shape, stride)
    else:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    if device is not None:
        tensor = tensor.to(device)
    return tensor.requires_grad_() if requires_grad else tensor
