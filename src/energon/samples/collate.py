"""Collate the values of many samples into one, and apply functions to the tensors in a value.

While a batch is being made, decoders ask here for memory. If what is stacked in the end is exactly
the first rows of one array, in order, that array is the batch, and stacking copies nothing.
Otherwise, because a hook has skipped or replaced some of them, they are stacked as usual. If
something still views a row when the batch is made, because a hook has kept the sample, the batch
is copied: a change to the sample must not appear in it. From then on there are no rows.

The C library returns memory blocks of 32 MiB and more to the system as soon as they are freed, so
that each batch of full-size float images would be written to new pages, which the system has to
clear first, and large arrays are therefore reused. Measured on batches of 32 images of 500 x 375:
a tenth of the CPU time of loading them, decoding included.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from itertools import chain, repeat
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from energon.errors import ConfigError
from energon.samples.crude import PART_FILES
from energon.samples.provenance import SampleSource

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

PARALLEL_NUMBERS = 32_768
"""From this many elements on, torch copies in several threads."""

_shape = attrgetter("shape")


@cache
def has_torch() -> bool:
    """Return whether torch is installed, without importing it, which takes a second or more."""
    return find_spec("torch") is not None


def generic_batch(batch: Sequence[Any]) -> Any:
    """Collate `batch`: stack arrays, go through structures field by field, list the rest.

    Tensors and numpy arrays of different shapes are padded with zeros at their ends. Dataclasses
    with `from_samples` are collated by that.

    Example:
        >>> import numpy as np
        >>> batch = generic_batch([{"x": np.ones(2), "y": "a"}, {"x": np.ones(3), "y": "b"}])
        >>> batch["x"].shape, batch["y"]
        ((2, 3), ['a', 'b'])
    """
    first = batch[0]
    if _all_arrays(batch):
        return batch_pad_stack(batch)
    if isinstance(first, dict) and all(type(value) is type(first) for value in batch):
        if any(value.keys() != first.keys() for value in batch):
            return list(batch)
        return {key: _field(key, [value[key] for value in batch]) for key in first}
    kind: Any = type(first)
    names = field_names(kind)
    if names is not None and all(type(value) is kind for value in batch):
        if hasattr(first, "from_samples"):
            return kind.from_samples(batch)
        columns = {name: [getattr(value, name) for value in batch] for name in names}
        return kind(**{name: _field(name, column) for name, column in columns.items()})
    return list(batch)


def collate_samples(
    samples: Sequence[Any],
    result_type: type | None = None,
    actions: dict[str, Callable[[list[Any]], Any]] | None = None,
    default_action: Callable[[list[Any]], Any] = generic_batch,
) -> Any:
    """Return samples as one: tensors are stacked and padded, other values become lists.

    Types with `from_samples` are collated by that. Dicts may have different names: a value that
    some of them lack becomes a list with None for these.

    Args:
        samples: At least one: dataclasses, named tuples or dicts. If their types have different
            fields, `default_action` gets a list of them.
        result_type: Type of the result; None for that of the samples. Fields that it lacks are
            dropped.
        actions: By field, the function that collates the list of its values, None for samples that
            lack it.
        default_action: The function for all other fields.
    """
    first = samples[0]
    plain = not actions and default_action is generic_batch
    if plain and result_type in (None, type(first)) and hasattr(first, "from_samples"):
        return generic_batch(samples)
    kinds = set(map(type, samples))
    kind: Any = type(first)
    is_dict = isinstance(first, dict)
    names = tuple(dict.fromkeys(chain.from_iterable(samples))) if is_dict else field_names(kind)
    alike = (
        len(kinds) == 1
        or all(issubclass(kind, dict) for kind in kinds)
        or len(set(map(field_names, kinds))) == 1
    )
    if names is None or not alike:
        return default_action(list(samples))
    read = dict.get if is_dict else getattr
    accepted = set((result_type and field_names(result_type)) or names)
    accepted.discard(PART_FILES)  # of use to the decoder only
    values: dict[str, Any] = {}
    for name in names:
        if name in accepted:
            column = list(map(read, samples, repeat(name)))
            if name == "__restore_key__":
                values[name] = tuple(column)
            elif name.startswith("__"):
                values[name] = column
            else:
                values[name] = (actions or {}).get(name, default_action)(column)
    if result_type is dict or (result_type is None and is_dict):
        return values
    return (result_type or type(first))(**values)


@lru_cache(maxsize=256)
def field_names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a dataclass or named tuple; None for anything else."""
    if is_dataclass(kind):
        return tuple(map(attrgetter("name"), fields(kind)))
    names = getattr(kind, "_fields", None)
    return tuple(names) if issubclass(kind, tuple) and names else None


def batch_list(batch: Sequence[Any]) -> list[Any]:
    """Return `batch` as a list.

    Example:
        >>> batch_list(("a", "b"))
        ['a', 'b']
    """
    return list(batch)


def batch_stack(batch: Sequence[Any]) -> Any:
    """Stack arrays of one shape along a new first dimension.

    Raises:
        ConfigError: If their shapes differ.

    Example:
        >>> import numpy as np
        >>> batch_stack([np.zeros(3), np.ones(3)]).shape
        (2, 3)
    """
    shapes = {tuple(value.shape) for value in batch}
    if len(shapes) > 1:
        raise ConfigError(
            f"cannot stack arrays of shapes {sorted(shapes)}; make them equal before they are "
            "batched, or pad them with batch_pad_stack"
        )
    return _stack(batch)


def _stack(batch: Sequence[Any]) -> Any:
    """Stack arrays that are known to have one shape."""
    if isinstance(batch[0], np.ndarray):
        return _stack_arrays(list(batch))
    torch = sys.modules["torch"]
    # Torch would stack large ones in many threads, which then spin for milliseconds while other
    # threads decode the next images.
    is_large = batch[0].numel() * len(batch) >= PARALLEL_NUMBERS
    if is_large and _can_stack_in_numpy(batch):
        return torch.from_numpy(_stack_arrays([value.numpy() for value in batch]))
    return torch.stack(list(batch))


def _stack_arrays(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """Stack arrays of numpy that are known to have one shape."""
    first, rows = arrays[0], stacked_rows(arrays)
    if rows is not None:
        return rows
    if (
        first.nbytes * len(arrays) < LARGE_BATCH_BYTES
        or first.dtype.hasobject
        or {(type(each), each.dtype) for each in arrays} != {(np.ndarray, first.dtype)}
    ):
        return np.stack(arrays)
    return np.stack(arrays, out=large_array((len(arrays), *first.shape), first.dtype))


def _can_stack_in_numpy(tensors: Sequence[Any]) -> bool:
    """Return whether numpy stacks tensors exactly as torch does."""
    torch, first = sys.modules["torch"], tensors[0]
    return first.dtype in (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.float32, torch.float64),
    ) and all(
        tensor.dtype is first.dtype and tensor.is_cpu and is_plain(tensor) for tensor in tensors
    )


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor is nothing but the numbers in its memory, in order."""
    torch = sys.modules["torch"]
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_neg() or tensor.is_conj())
        and not tensor.is_quantized
    )


def batch_pad_stack(batch: Sequence[Any]) -> Any:
    """Stack arrays along a new first dimension, padded with zeros at their ends.

    Example:
        >>> import numpy as np
        >>> batch_pad_stack([np.array([1, 2, 3]), np.array([4])]).tolist()
        [[1, 2, 3], [4, 0, 0]]
    """
    shapes = list(map(_shape, batch))
    if shapes.count(shapes[0]) == len(shapes):
        return _stack(batch)
    _check_dimensions(shapes)
    stacked = _zeros(batch, (len(batch), *map(max, *shapes)))
    for index, value in enumerate(batch):
        stacked[(index, *map(slice, value.shape))] = value
    return stacked


def concat_pad(batch: Sequence[Any]) -> Any:
    """Concatenate arrays along their first dimension, padding the others with zeros.

    Example:
        >>> import numpy as np
        >>> concat_pad([np.ones((1, 3)), np.ones((2, 2))]).shape
        (3, 3)
    """
    shapes = [tuple(value.shape) for value in batch]
    _check_dimensions(shapes)
    total = sum(shape[0] for shape in shapes)
    joined = _zeros(batch, (total, *map(max, *(shape[1:] for shape in [*shapes, shapes[0]]))))
    start = 0
    for value in batch:
        rest = map(slice, value.shape[1:])
        joined[(slice(start, start + value.shape[0]), *rest)] = value
        start += value.shape[0]
    return joined


def generic_concat(batch: Sequence[Any]) -> Any:
    """Concatenate batches: arrays are padded, lists joined, structures handled field by field.

    Example:
        >>> batches = [{"x": np.ones((2, 3)), "y": ["a", "b"]}, {"x": np.ones((1, 5)), "y": ["c"]}]
        >>> batch = generic_concat(batches)
        >>> batch["x"].shape, batch["y"]
        ((3, 5), ['a', 'b', 'c'])
    """
    first = batch[0]
    if _all_arrays(batch):
        return concat_pad(batch)
    if isinstance(first, dict):
        return {key: generic_concat([each[key] for each in batch]) for key in first}
    if isinstance(first, list):
        return [item for each in batch for item in each]
    kind: Any = type(first)
    names = field_names(kind)
    if names is not None:
        return kind(
            **{name: generic_concat([getattr(each, name) for each in batch]) for name in names}
        )
    if isinstance(first, tuple):
        return tuple(item for each in batch for item in each)
    return list(batch)


def homogeneous_concat_mix(samples: Sequence[Any]) -> Any:
    """Concatenate batches that have the same type.

    Raises:
        ConfigError: If their types differ.

    Example:
        >>> homogeneous_concat_mix([["a", "b"], ["c"]])
        ['a', 'b', 'c']
        >>> homogeneous_concat_mix([["a"], {"text": "b"}])
        Traceback (most recent call last):
            ...
        energon.errors.ConfigError: cannot mix batches of different types: dict, list
    """
    kinds = {type(batch) for batch in samples}
    if len(kinds) > 1:
        names = sorted(kind.__name__ for kind in kinds)
        raise ConfigError(f"cannot mix batches of different types: {', '.join(names)}")
    return generic_concat(samples)


def _field(name: Any, column: list[Any]) -> Any:
    # Names like __key__ describe the sample: a batch keeps one for each.
    if name == "__restore_key__":
        return tuple(column)  # a key is a key of dicts, too
    return column if isinstance(name, str) and name.startswith("__") else generic_batch(column)


def _all_arrays(values: Sequence[Any]) -> bool:
    if isinstance(values[0], np.ndarray):
        return all(map(isinstance, values, repeat(np.ndarray)))
    torch = sys.modules.get("torch")
    return torch is not None and all(map(isinstance, values, repeat(torch.Tensor)))


def _check_dimensions(shapes: Sequence[tuple[int, ...]]) -> None:
    if len({len(shape) for shape in shapes}) > 1:
        raise ConfigError(f"cannot pad arrays with different numbers of dimensions: {shapes}")


def _zeros(values: Sequence[Any], shape: tuple[int, ...]) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.zeros(shape, np.result_type(*values))
    return first.new_zeros(shape)


T = TypeVar("T")


def map_tensors(value: T, function: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Return `value` with `function` applied to the tensors in it.

    Descends into dicts, lists, tuples and dataclasses; other objects are passed through. Values
    without a tensor are not copied.
    """
    if "torch" not in sys.modules:
        return value
    from torch import Tensor

    def mapped(item: Any) -> Any:
        if isinstance(item, Tensor):
            return function(item)
        if type(item) in _WITHOUT_TENSORS:
            return item
        if isinstance(item, dict):
            items = {key: mapped(each) for key, each in item.items()}
            if all(items[key] is item[key] for key in items):
                return item
            changed = copy.copy(item)
            changed.update(items)
            return changed
        if isinstance(item, (list, tuple)):
            # The keys and sources of a batch are longer than anything else.
            if _WITHOUT_TENSORS.issuperset(map(type, item)):
                return item
            return _with_elements(item, [mapped(each) for each in item])
        if is_dataclass(item) and not isinstance(item, type):
            values = {each.name: getattr(item, each.name, None) for each in fields(item)}
            values |= getattr(item, "__dict__", {})
            return _with_fields(item, {name: (old, mapped(old)) for name, old in values.items()})
        return item

    return mapped(value)  # type: ignore[no-any-return]


_WITHOUT_TENSORS = frozenset((str, int, float, bool, bytes, type(None), np.ndarray, SampleSource))


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


LARGE_BATCH_BYTES = 32 << 20
"""Smaller blocks are kept by the C library, see `loader/memory.py`."""
KEPT_BLOCKS = 2
"""How many free blocks are kept: while the trainer uses a batch, the next one is made."""

_free: deque[NDArray[np.uint8]] = deque(maxlen=KEPT_BLOCKS)
_leases: dict[int, weakref.ref[Any]] = {}


def large_array(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array of at least `LARGE_BATCH_BYTES` with arbitrary contents.

    Its memory is used again when the array and all views of it are gone.
    """
    size = prod(shape) * dtype.itemsize
    block = _take(size)
    # All views refer to this array and not to the block, of which it knows only the memory.
    lease = np.frombuffer(block.data, np.uint8, size)
    _leases[id(block)] = weakref.ref(lease, partial(_give_back, _free, _leases, block))
    return lease.view(dtype).reshape(shape)


def _take(size: int) -> NDArray[np.uint8]:
    """Return a free block of about this size, or a new one; drop those that do not fit."""
    while _free:
        try:
            block = _free.pop()
        except IndexError:  # another thread has taken it
            break
        if size <= block.nbytes <= 2 * size:
            return block
    return np.empty(size, np.uint8)


def _give_back(
    free: deque[NDArray[np.uint8]], leases: dict[int, Any], block: NDArray[np.uint8], _: object
) -> None:
    """Keep a block without views; called in whichever thread drops the last view.

    That may be when the interpreter exits, which clears the variables of modules.
    """
    del leases[id(block)]
    free.append(block)


_REFERENCES = 2
"""How many there are to memory that only a batch views: its view, and that of the question."""

Kind = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of rows."""


class BatchRows:
    """The rows of one batch after the other, which are taken inside `with rows:`.

    Rows exist for arrays of which the previous batch was full. So there are none as long as the
    shapes in a batch differ.

    Args:
        size: Number of items in a batch; 0 for no rows.
    """

    def __init__(self, size: int) -> None:
        self.size = size if hasattr(sys, "getrefcount") else 0
        self.taken: dict[Kind, int] = {}
        self.taken_before: dict[Kind, int] = {}
        self.arrays: dict[Kind, NDArray[Any]] = {}
        self.owners: list[NDArray[Any]] = []
        self._around: BatchRows | None = None

    def __enter__(self) -> None:
        self._around, _active.rows = _active.rows, self

    def __exit__(self, *error: object) -> None:
        _active.rows, self._around = self._around, None
        if self.taken or self.taken_before:
            self.taken_before, self.taken = self.taken, {}
            self.arrays.clear()
            self.owners.clear()

    def released(self, batch: Any) -> Any:
        """Return the batch, or a copy if anything else views its memory.

        Called when nothing but the batch should be left of its items.
        """
        while self.owners:
            if sys.getrefcount(self.owners.pop()) > _REFERENCES:
                self.size = 0
                return deepcopy(batch)
        return batch


class _ActiveRows(threading.local):
    """The rows of the batch that this thread is making."""

    rows: BatchRows | None = None


_active = _ActiveRows()


def empty_row(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return an array with arbitrary contents: a row of the batch being made, if possible."""
    rows, dtype = _active.rows, np.dtype(dtype)
    if rows is None:
        return np.empty(shape, dtype)
    kind: Kind = shape, dtype
    taken = rows.taken.get(kind, 0)
    rows.taken[kind] = taken + 1
    if taken >= rows.size or rows.taken_before.get(kind) != rows.size:
        return np.empty(shape, dtype)
    if not taken:
        whole = (rows.size, *shape)
        is_large = prod(whole) * dtype.itemsize >= LARGE_BATCH_BYTES
        rows.arrays[kind] = large_array(whole, dtype) if is_large else np.empty(whole, dtype)
    row: NDArray[Any] = rows.arrays[kind][taken]
    return row


def stacked_rows(arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """Return arrays of one shape, stacked without a copy, once; None if they are not such rows."""
    rows, first = _active.rows, arrays[0]
    kind: Kind = first.shape, first.dtype
    whole = None if rows is None else rows.arrays.get(kind)
    if rows is None or whole is None or len(arrays) > rows.size:
        return None
    start = _address(whole)
    expected = range(start, start + len(arrays) * first.nbytes, first.nbytes)
    if list(map(_address, arrays)) != list(expected) or not all(
        type(each) is np.ndarray and each.dtype == first.dtype and each.flags.c_contiguous
        for each in arrays
    ):
        return None
    # If a hook has given an image to two fields, these do not become one array.
    del rows.arrays[kind]
    rows.owners.append(whole if whole.base is None else whole.base)  # the base of all views
    return whole[: len(arrays)]


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
