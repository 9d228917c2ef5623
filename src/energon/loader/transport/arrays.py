"""Send arrays and tensors over their own bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import numpy as np

_NUMBERS = frozenset("biufc")
"""Kinds of types whose names say everything about them; the others in numpy have parameters."""


def reduce_array(array: Any) -> Any:
    """Reduce a single array, with less to look up than numpy does."""
    dtype, flags = array.dtype, array.flags
    is_by_column = flags.f_contiguous and not flags.c_contiguous
    if dtype.kind not in _NUMBERS or not array.size or is_by_column:
        return NotImplemented
    content: Any = np.ascontiguousarray(array)
    return array_over_bytes, (PickleBuffer(content), dtype.str, array.shape)


def array_over_bytes(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return an array that is a view of `data`."""
    return np.frombuffer(data, dtype).reshape(shape)


WHOLE_STORAGE_RATIO = 2
"""A tensor that covers less than this share of its storage takes only its own elements along."""

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class TensorReducer:
    """Reduces the tensors of one pickle, and remembers which storages it already contains."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._parameter = torch.nn.Parameter
        self._first_of: dict[int, Any] = {}

    def clear(self) -> None:
        """Forget the storages before the next pickle."""
        self._first_of.clear()

    def reduce(self, tensor: Any) -> Any:
        """Return the result of `reducer_override` for `tensor`.

        Subclasses, sparse and quantized tensors, and tensors with attributes set by programs are
        left to torch.
        """
        torch = self._torch
        kind = type(tensor)
        if kind is self._parameter:
            return self._parameter, (tensor.data, tensor.requires_grad)
        if kind is not torch.Tensor or tensor.layout is not torch.strided or tensor.__dict__:
            return NotImplemented
        if tensor.is_quantized or tensor.is_meta:
            return NotImplemented
        if not tensor.is_cpu:
            return on_device, (tensor.detach().cpu(), str(tensor.device), tensor.requires_grad)
        if tensor.requires_grad:
            return with_gradient, (tensor.detach(),)
        return self._reduce_plain(tensor.resolve_conj().resolve_neg())

    def _reduce_plain(self, tensor: Any) -> Reduced:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        first = self._first_of.get(address)
        if first is not None and first is not tensor:
            return self._view_of(first, tensor)
        if size == tensor.nbytes and tensor.is_contiguous():
            self._first_of[address] = tensor
            return self._over_bytes(tensor)
        if size > WHOLE_STORAGE_RATIO * tensor.nbytes:
            return self._over_bytes(tensor.clone(memory_format=self._torch.contiguous_format))
        whole = self._torch.empty(0, dtype=self._torch.uint8).set_(storage)
        self._first_of[address] = whole
        return self._view_of(whole, tensor)

    def _over_bytes(self, tensor: Any) -> Reduced:
        """Reduce a contiguous tensor that covers all of its storage."""
        shape = tuple(tensor.shape)
        if not tensor.nbytes:
            return empty, (shape, tensor.dtype)
        flat = tensor.reshape(-1)
        if flat.stride(0) != 1:  # a single element may have any, as in `values[::2]`
            flat = flat.as_strided((1,), (1,))
        content = PickleBuffer(flat.view(self._torch.uint8).numpy())
        return over_bytes, (content, tensor.dtype, shape)

    def _view_of(self, first: Any, tensor: Any) -> Reduced:
        """Reduce a tensor that shares the storage of `first`."""
        layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return view_of, (first, tensor.dtype, *layout)


def over_bytes(content: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor that is a view of `content`."""
    tensor = sys.modules["torch"].frombuffer(content, dtype=dtype)
    return tensor if len(shape) == 1 else tensor.view(shape)


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a tensor without elements."""
    return sys.modules["torch"].empty(shape, dtype=dtype)


def view_of(
    first: Any, dtype: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Any:
    """Return another tensor on the storage of `first`."""
    torch = sys.modules["torch"]
    return torch.empty(0, dtype=dtype).set_(first.untyped_storage(), offset, shape, stride)


def with_gradient(tensor: Any) -> Any:
    """Return `tensor` as a leaf that requires gradients."""
    return tensor.requires_grad_()


def on_device(tensor: Any, device: str, requires_grad: bool) -> Any:
    """Return `tensor` on the device that it came from."""
    return tensor.to(device).requires_grad_(requires_grad)
