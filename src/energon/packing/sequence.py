"""Join sequences into one, with what attention needs to separate them.

Works on numpy arrays and torch tensors, and returns the same type as its arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon.errors import ConfigError, SampleError


@dataclass(frozen=True)
class PackedSequence:
    """Several sequences in one, as variable-length attention expects them.

    Args:
        values: The sequences one after another, then padding.
        cu_seqlens: Start of each sequence and end of the last: int32, (num_sequences + 1,).
            Padding is a sequence of its own, the last one.
        position_ids: Position of each value within its sequence: int64, (num_values,).
        max_seqlen: Length of the longest sequence, padding included.
        num_values: Number of values that are not padding.

    Example:
        >>> packed = pack_sequences([np.array([7, 8, 9]), np.array([5])], pad_to=6)
        >>> packed.max_seqlen, packed.num_values, len(packed.values)
        (3, 4, 6)
    """

    values: Any
    cu_seqlens: Any
    position_ids: Any
    max_seqlen: int
    num_values: int


def pack_sequences(
    sequences: Sequence[Any], *, pad_to: int | None = None, pad_value: Any = 0
) -> PackedSequence:
    """Return `sequences` joined along their first dimension.

    Args:
        sequences: Arrays or tensors, equal in all dimensions but the first; at least one.
        pad_to: Length to pad to; None adds no padding.
        pad_value: Value of the padding.

    Raises:
        SampleError: If the sequences together are longer than `pad_to`.

    Example:
        >>> packed = pack_sequences([np.array([7, 8, 9]), np.array([5])], pad_to=6)
        >>> packed.values, packed.cu_seqlens, packed.position_ids
        (array([7, 8, 9, 5, 0, 0]), array([0, 3, 4, 6], dtype=int32), array([0, 1, 2, 0, 0, 1]))
    """
    if not len(sequences):
        raise ConfigError("there are no sequences to pack; skip empty groups")
    lengths = [len(sequence) for sequence in sequences]
    num_values = sum(lengths)
    if pad_to is not None and num_values > pad_to:
        longest = int(np.argmax(lengths))
        raise SampleError(
            f"{len(lengths)} sequences have {num_values} values, the context is {pad_to}; the "
            f"longest is number {longest} with {lengths[longest]}. Select fewer for a pack"
        )
    padding = 0 if pad_to is None else pad_to - num_values
    if padding:
        lengths.append(padding)
    return PackedSequence(
        values=_join(sequences, padding, pad_value),
        cu_seqlens=_like(sequences[0], cu_seqlens(lengths)),
        position_ids=_like(sequences[0], position_ids(lengths)),
        max_seqlen=max(lengths),
        num_values=num_values,
    )


def cu_seqlens(lengths: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the start of each sequence of these lengths, and the end of the last.

    Example:
        >>> cu_seqlens([3, 1, 2])
        array([0, 3, 4, 6], dtype=int32)
    """
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def position_ids(lengths: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the position of each value within its sequence.

    Example:
        >>> position_ids([3, 1, 2])
        array([0, 1, 2, 0, 0, 1])
    """
    counts = np.asarray(lengths, np.int64)
    begins = np.cumsum(counts) - counts
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(begins, counts)


def merge_cu_seqlens(packs: Sequence[Any]) -> Any:
    """Return the `cu_seqlens` of packs concatenated one after another, as in a batch.

    Example:
        >>> merge_cu_seqlens([cu_seqlens([3, 1]), cu_seqlens([2, 2])])
        array([0, 3, 4, 6, 8], dtype=int32)
    """
    merged, total = [np.zeros(1, np.int32)], 0
    for pack in packs:
        ends = np.asarray(pack)
        merged.append(ends[1:] + np.int32(total))
        total += int(ends[-1])
    return _like(packs[0], np.concatenate(merged))


def _join(sequences: Sequence[Any], padding: int, pad_value: Any) -> Any:
    first = sequences[0]
    if isinstance(first, np.ndarray):
        tail = [np.full((padding, *first.shape[1:]), pad_value, first.dtype)] if padding else []
        return np.concatenate([*sequences, *tail])
    if not hasattr(first, "new_full"):
        tail = [pad_value] * padding
        return np.array([value for sequence in (*sequences, tail) for value in sequence])
    tail = [first.new_full((padding, *first.shape[1:]), pad_value)] if padding else []
    return sys.modules["torch"].cat([*sequences, *tail])


def _like(example: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return `array` as a tensor if `example` is one."""
    if hasattr(example, "new_full"):
        return sys.modules["torch"].from_numpy(array)
    return array
