"""Join sequences into one, with what attention needs to separate them.

Works on numpy arrays and torch tensors, and returns the same type as its arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from energon.errors import ConfigError, SampleError, check_at_least


@dataclass(frozen=True)
class PackedSequence:
    """Several sequences in one, as variable-length attention expects them.

    Args:
        values: The sequences one after another, then padding.
        cu_seqlens: Start of each sequence and end of the last: int32, (num_sequences + 1,).
            Padding up to `pad_to` is a sequence of its own, the last one.
        cu_seqlens_padded: The same with the padding of each sequence to a multiple: where they are
            in `values`. Without such padding, equal to `cu_seqlens`.
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
    cu_seqlens_padded: Any
    position_ids: Any
    max_seqlen: int
    num_values: int


def pack_sequences(
    sequences: Sequence[Any],
    *,
    pad_to: int | None = None,
    pad_value: Any = 0,
    multiple_of: int = 1,
) -> PackedSequence:
    """Return `sequences` joined along their first dimension.

    Args:
        sequences: Arrays or tensors, equal in all dimensions but the first; at least one.
        pad_to: Length to pad to; None adds no padding.
        pad_value: Value of the padding.
        multiple_of: Pad each sequence to a multiple of this length, as context parallelism (twice
            the number of its ranks) and FP8 need it.

    Raises:
        SampleError: If the sequences together are longer than `pad_to`.

    Example:
        >>> packed = pack_sequences([np.array([7, 8, 9]), np.array([5])], pad_to=6)
        >>> packed.values, packed.cu_seqlens, packed.position_ids
        (array([7, 8, 9, 5, 0, 0]), array([0, 3, 4, 6], dtype=int32), array([0, 1, 2, 0, 0, 1]))
    """
    if not len(sequences):
        raise ConfigError("there are no sequences to pack; skip empty groups")
    check_at_least(1, "multiple_of", multiple_of)
    lengths = [len(sequence) for sequence in sequences]
    padded = [-(-length // multiple_of) * multiple_of for length in lengths]
    total = sum(padded)
    if pad_to is not None and total > pad_to:
        longest = int(np.argmax(lengths))
        raise SampleError(
            f"{len(lengths)} sequences have {total} values, the context is {pad_to}; the "
            f"longest is number {longest} with {lengths[longest]}. Select fewer for a pack"
        )
    num_values = sum(lengths)
    paddings = [after - before for before, after in zip(lengths, padded, strict=True)]
    if pad_to is not None and pad_to > total:
        lengths.append(pad_to - total)
        padded.append(pad_to - total)
        paddings[-1] += pad_to - total
    return PackedSequence(
        values=_join(sequences, paddings, pad_value),
        cu_seqlens=_like(sequences[0], cu_seqlens(lengths)),
        cu_seqlens_padded=_like(sequences[0], cu_seqlens(padded)),
        position_ids=_like(sequences[0], position_ids(padded)),
        max_seqlen=max(padded),
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


def _join(sequences: Sequence[Any], paddings: Sequence[int], pad_value: Any) -> Any:
    """Return sequences one after another, each with its padding."""
    first = sequences[0]
    if hasattr(first, "new_full"):
        join, pad = sys.modules["torch"].cat, first.new_full
    else:
        if not isinstance(first, np.ndarray):
            kind = np.array([value for sequence in sequences for value in sequence]).dtype
            sequences = [np.array(sequence, kind) for sequence in sequences]
        join, pad = np.concatenate, partial(np.full, dtype=sequences[0].dtype)
    pieces = []
    for sequence, padding in zip(sequences, paddings, strict=True):
        pieces.append(sequence)
        if padding:
            pieces.append(pad((padding, *sequence.shape[1:]), pad_value))
    return join(pieces)


def _like(example: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return `array` as a tensor if `example` is one."""
    if hasattr(example, "new_full"):
        return sys.modules["torch"].from_numpy(array)
    return array
