"""Send arrays and tensors: single ones over their own bytes, columns of small ones joined.

Pickling a small array takes several times as long as making it did.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from pickle import PickleBuffer
from typing import Any

import numpy as np

from energon.loader.transport.sources import all_are

MAX_PACKED_BYTES = 1 << 14
"""Larger arrays travel on their own, straight into shared memory."""

PackedArrays = tuple[bool, str, list[tuple[int, ...]], bytes]
"""Arrays of one type: whether they are tensors, the name of their type, their shapes, and the
bytes of one after another."""

_NUMBERS = frozenset("biufc")
"""Kinds of types whose names say everything about them; the others in numpy have parameters."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_TENSOR_TYPES = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", *_FLOATS))


def is_array_type(kind: type) -> bool:
    """Return whether this is the type of plain arrays or of plain tensors."""
    if kind is np.ndarray:
        return True
    torch: Any = sys.modules.get("torch")
    return torch is not None and kind is torch.Tensor


def pack_arrays(columns: Sequence[Sequence[Any]]) -> list[PackedArrays | None]:
    """Return each column in the form that is sent; None unless its arrays are small, and alike.

    Where an array is in the columns twice, or two tensors are views of one storage, none is packed:
    pickle keeps them together.
    """
    arrays = [*chain(*columns)]
    if len({*map(id, arrays)}) < len(arrays) or _share_storage(arrays):
        return [None] * len(columns)
    return [*map(_packed, columns)]


def _share_storage(arrays: Sequence[Any]) -> bool:
    torch: Any = sys.modules.get("torch")
    tensors = [a for a in arrays if torch is not None and type(a) is torch.Tensor]
    if all(tensor._base is None for tensor in tensors):
        return False
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided and tensor.is_cpu]
    return len({each.untyped_storage().data_ptr() for each in strided}) < len(strided)


def _packed(column: Sequence[Any]) -> PackedArrays | None:
    kind = type(column[0])
    if not all_are(kind, column):
        return None
    shapes = [tuple(array.shape) for array in column]
    if max(map(math.prod, shapes)) * column[0].itemsize > MAX_PACKED_BYTES:
        return None
    if kind is np.ndarray:
        name, data = column[0].dtype.str, _bytes_of_arrays(column)
    else:
        name, data = str(column[0].dtype).removeprefix("torch."), _bytes_of_tensors(column)
    return None if data is None else (kind is not np.ndarray, name, shapes, data)


def _bytes_of_arrays(column: Sequence[Any]) -> bytes | None:
    dtype = column[0].dtype
    if dtype.kind not in _NUMBERS or [array.dtype for array in column].count(dtype) < len(column):
        return None
    try:
        return b"".join(column)
    except TypeError:  # the elements of one of them are not side by side
        return None


def _bytes_of_tensors(column: Sequence[Any]) -> bytes | None:
    torch: Any = sys.modules["torch"]
    dtype, strided = column[0].dtype, torch.strided
    if str(dtype).removeprefix("torch.") not in _TENSOR_TYPES:
        return None
    for tensor in column:
        if tensor.dtype is not dtype or tensor.requires_grad or tensor.__dict__:
            return None
        if not tensor.is_cpu or tensor.layout is not strided:
            return None
    are_flat = all(tensor.dim() == 1 for tensor in column)
    joined = torch.cat(column if are_flat else [tensor.reshape(-1) for tensor in column])
    data: bytes = joined.view(torch.uint8).numpy().tobytes()
    return data


def unpack_arrays(
    are_tensors: bool, name: str, shapes: Sequence[tuple[int, ...]], data: bytes
) -> list[Any]:
    """Return the arrays of a column that `pack_arrays` was given, each with memory of its own."""
    are_flat = {*map(len, shapes)} == {1}
    ends = [0, *accumulate(map(math.prod, shapes))]
    if are_tensors:
        flat = _tensors(name, ends, data)
        return flat if are_flat else [t.view(each) for t, each in zip(flat, shapes, strict=True)]
    whole = np.frombuffer(data, np.dtype(name))
    views = [whole[start:stop] for start, stop in pairwise(ends)]
    if not are_flat:
        views = [view.reshape(each) for view, each in zip(views, shapes, strict=True)]
    return [view.copy() for view in views]


def _tensors(name: str, ends: Sequence[int], data: bytes) -> list[Any]:
    torch: Any = sys.modules["torch"]
    dtype = getattr(torch, name)
    size = dtype.itemsize
    return [
        torch.frombuffer(bytearray(data[size * start : size * stop]), dtype=dtype)
        if start < stop
        else torch.empty(0, dtype=dtype)
        for start, stop in pairwise(ends)
    ]


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
