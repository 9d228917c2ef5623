"""A packer: from a window of samples to packs, for the hook `select_samples_to_pack`.

The algorithms are functions on integers: they divide lengths into bins of limited room and return
a list of indices for each bin; every item is in exactly one. Lengths may have several dimensions,
for example tokens and image tiles, each with a room of its own.

Packed sequences are numpy arrays or torch tensors, like their parts, with the boundaries that
attention needs to separate them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError, FatalSampleError, SampleError, check_at_least

T = TypeVar("T")

Lengths = NDArray[np.int64]
"""(num_items, num_dimensions), none negative and none beyond the room of a bin."""

Bins = list[list[int]]


def first_fit_decreasing(lengths: Lengths, room: Sequence[int]) -> Bins:
    """Put each item, largest first, into the first bin that has room for it.

    The size of an item is its largest share of the room in any dimension.

    Example:
        >>> import numpy as np
        >>> first_fit_decreasing(np.array([[6], [5], [4], [3]]), room=[10])
        [[0, 2], [1, 3]]
    """
    bins: Bins = []
    # Unused bins have room for everything, so there is always one that fits.
    free = np.tile(np.array(room, np.int64), (len(lengths), 1))
    single = free[:, 0] if len(room) == 1 else None
    for item in _largest_first(lengths, room):
        if single is not None:
            fits = single[: len(bins) + 1] >= lengths[item, 0]
        else:
            fits = (free[: len(bins) + 1] >= lengths[item]).all(axis=1)
        chosen = int(fits.argmax())
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
        free[chosen] -= lengths[item]
    return bins


def greedy_knapsack(
    item_sizes: Sequence[int], samples: Sequence[T], max_capacity: int
) -> list[list[T]]:
    """Divide samples into packs: each takes the largest samples that still fit, one by one.

    The function that trainers of vision-language models copy from each other, with the same
    arguments and packs. Its packs are those of `first_fit_decreasing`, where of samples of equal
    size the last one comes first. A `Packer` leaves less padding.

    Args:
        item_sizes: Length of each sample.
        samples: As many samples.
        max_capacity: Room of a pack.

    Raises:
        ConfigError: If there are more or fewer lengths than samples.
        SampleError: If a sample is longer than a pack.

    Example:
        >>> greedy_knapsack([6, 5, 4, 3], ["a", "b", "c", "d"], 10)
        [['a', 'c'], ['b', 'd']]
    """
    if len(item_sizes) != len(samples):
        raise ConfigError(f"{len(samples)} samples have {len(item_sizes)} lengths")
    if max(item_sizes, default=0) > max_capacity:
        number = max(range(len(samples)), key=item_sizes.__getitem__)
        raise SampleError(
            f"sample {_name(samples[number])} has the length {item_sizes[number]}, the room of a "
            f"pack is {max_capacity}; shorten it or raise SkipSample before it is packed"
        )
    lengths = np.array(item_sizes[::-1], np.int64).reshape(-1, 1)
    bins = first_fit_decreasing(lengths, [max_capacity])
    return [[samples[-1 - item] for item in items] for items in bins]


def fill_exactly(
    lengths: Lengths, room: Sequence[int], *, balance: bool = False, oldest_first: bool = False
) -> Bins:
    """Fill one bin after another with the items that leave the least room in it.

    A bin starts with the largest remaining item. In one dimension, the rest is the subset of the
    remaining items whose sum comes closest to the room, found by dynamic programming over sums; in
    several, items are added one by one, preferring those that use the free room in proportion.

    Args:
        lengths: Sizes of the items.
        room: Sizes of a bin.
        balance: Whether bins should also have similar sums of squares of the first dimension,
            to which the cost of attention is proportional.
        oldest_first: Whether the first bin takes the earliest items whatever their size, so that
            none is carried from window to window forever.

    Example:
        >>> import numpy as np
        >>> fill_exactly(np.array([[7], [4], [4], [3]]), room=[11])
        [[0, 1], [2, 3]]
    """
    remaining = _largest_first(lengths, room)
    bins: Bins = []
    squares = _Squares(lengths[:, 0], room[0]) if balance else None
    while remaining:
        seed, *others = sorted(remaining) if oldest_first and not bins else remaining
        if len(room) == 1:
            if squares is not None:
                others = squares.order(seed, others)
            added = _closest_subset(lengths[:, 0], others, int(room[0] - lengths[seed, 0]))
        else:
            added = _in_proportion(lengths, others, np.array(room) - lengths[seed])
        bins.append([seed, *added])
        if squares is not None:
            squares.take(bins[-1])
        chosen = {seed, *added}
        remaining = [item for item in remaining if item not in chosen]
    return bins


class _Squares:
    """Steers bins towards the same sum of squared lengths."""

    def __init__(self, lengths: NDArray[np.int64], room: int) -> None:
        self.lengths = lengths.astype(np.float64)
        self.room = room
        self.total = float((self.lengths**2).sum())
        self.tokens = float(self.lengths.sum())

    def order(self, seed: int, items: list[int]) -> list[int]:
        """Return `items` sorted by how well each would give the bin of `seed` its share of squares.

        Items of length a fill t tokens with squares of a·t, so with t tokens free and q squares
        missing, items of length q/t fit best.
        """
        share = self.total * self.room / max(self.tokens, 1.0)
        length = self.lengths[seed]
        ideal = (share - length**2) / max(self.room - length, 1.0)
        distances = np.abs(self.lengths[items] - ideal)
        return [items[index] for index in np.argsort(distances, kind="stable").tolist()]

    def take(self, items: list[int]) -> None:
        """Record that a bin was made of `items`."""
        self.total -= float((self.lengths[items] ** 2).sum())
        self.tokens -= float(self.lengths[items].sum())


def _closest_subset(lengths: NDArray[np.int64], items: list[int], room: int) -> list[int]:
    """Return the subset of `items` with the largest sum within `room`; earlier ones first.

    Bit s of an integer is set if the sum s can be reached; adding an item is a shift.
    """
    mask = (1 << (room + 1)) - 1
    reached = 1
    before: list[tuple[int, int]] = []
    values = lengths[items].tolist()
    for item, length in zip(items, values, strict=True):
        if length > room:
            continue
        after = (reached | (reached << length)) & mask
        if after != reached:
            before.append((item, reached))
            reached = after
            if reached >> room:
                break
    target = reached.bit_length() - 1
    chosen = []
    for item, without in reversed(before):
        if not (without >> target) & 1:
            chosen.append(item)
            target -= int(lengths[item])
    return chosen[::-1]


def _in_proportion(lengths: Lengths, items: list[int], free: NDArray[np.int64]) -> list[int]:
    """Return items that fit into `free`, choosing each time the one that uses it most evenly."""
    chosen: list[int] = []
    candidates = np.array(items, np.int64)
    while len(candidates):
        candidates = candidates[(lengths[candidates] <= free).all(axis=1)]
        if not len(candidates):
            break
        share = lengths[candidates] / np.maximum(free, 1)
        # The item that brings the fullest dimension furthest, without leaving the others behind.
        score = share.sum(axis=1) - (share.max(axis=1) - share.min(axis=1))
        best = int(np.argmax(score))
        chosen.append(int(candidates[best]))
        free = free - lengths[candidates[best]]
        candidates = np.delete(candidates, best)
    return chosen


def _largest_first(lengths: Lengths, room: Sequence[int]) -> list[int]:
    share: NDArray[Any] = (lengths / np.array(room)).max(axis=1)
    order: list[int] = np.argsort(-share, kind="stable").tolist()
    return order


@dataclass(frozen=True)
class Selection:
    """A result of the hook `select_samples_to_pack`, instead of a list of groups.

    Args:
        groups: The samples of each pack.
        carry: Samples to offer again with the next window: the same objects that the hook
            received.

    Example:
        >>> from energon import DefaultTaskEncoder
        >>> class InPairs(DefaultTaskEncoder):
        ...     def select_samples_to_pack(self, samples):
        ...         pairs = [samples[i : i + 2] for i in range(0, len(samples) - 1, 2)]
        ...         return Selection(pairs, carry=samples[2 * len(pairs) :])
        >>> InPairs().select_samples_to_pack(["a", "b", "c"])
        Selection(groups=[['a', 'b']], carry=['c'])
    """

    groups: Sequence[Sequence[Any]]
    carry: Sequence[Any] = ()


CARRIED_SLACK = 1 / 256
"""If the packer carries, packs with a larger share of free room than this are carried over,
unless most packs are as full as the fullest."""


@dataclass(frozen=True)
class Packer:
    """Divides samples into packs that fit into a context. Call it with the samples of a window.

    Deterministic: the same samples yield the same packs. Packs keep their samples in stream order,
    and are not sorted by size.

    Args:
        context: Room of a pack: a number of tokens, or several numbers, one per dimension.
        length: Returns the length of a sample: one number, or one per dimension of `context`.
        method: "fill" fills one pack after the other as exactly as possible; "first_fit" is
            first-fit decreasing.
        carry: Whether the samples of packs that are not full wait for the next window instead of
            being padded, unless their lengths fill no pack any better. This takes more samples at
            the start and then almost no padding; with False, every window is packed completely.
        balance: Whether packs should also have similar sums of squared lengths (of the first
            dimension), to which the cost of attention is proportional. Requires "fill".
        too_long: What to do with a sample longer than the context: "error" ends the run and names
            its key, "leave_out" skips it (statistics count it).

    Example:
        >>> packer = Packer(10, length=len, carry=False)
        >>> packer(["aaaaaa", "bbb", "cccc", "ddddddd"]).groups
        [['aaaaaa', 'cccc'], ['bbb', 'ddddddd']]
    """

    context: int | Sequence[int]
    length: Callable[[Any], int | Sequence[int]]
    method: Literal["fill", "first_fit"] = "fill"
    carry: bool = True
    balance: bool = False
    too_long: Literal["error", "leave_out"] = "error"

    def __post_init__(self) -> None:
        if not self.room or min(self.room) < 1:
            raise ConfigError(f"context must be at least 1 in every dimension, got {self.context}")
        if self.method not in ("fill", "first_fit"):
            raise ConfigError(f"method must be 'fill' or 'first_fit', got {self.method!r}")
        if self.too_long not in ("error", "leave_out"):
            raise ConfigError(f"too_long must be 'error' or 'leave_out', got {self.too_long!r}")
        if self.balance and self.method != "fill":
            raise ConfigError(
                "balance=True needs method='fill': first-fit does not look at squares"
            )

    @property
    def room(self) -> tuple[int, ...]:
        """Room of a pack in each dimension."""
        context = self.context
        return (context,) if isinstance(context, int) else tuple(map(operator.index, context))

    def __call__(self, samples: Sequence[Any]) -> Selection:
        """Return the samples of each pack, and those to carry over.

        Raises:
            FatalSampleError: If a sample is longer than the context, or has no length.
        """
        lengths = self.lengths(samples)
        fitting = np.flatnonzero((lengths <= self.room).all(axis=1))
        if len(fitting) < len(samples) and self.too_long == "error":
            self._refuse(samples, lengths)
        bins = self.divide(lengths[fitting])
        kept, carried = self._split(bins, lengths[fitting])
        return Selection(
            [[samples[fitting[item]] for item in sorted(items)] for items in kept],
            [samples[fitting[item]] for item in sorted(carried)],
        )

    def lengths(self, samples: Sequence[Any]) -> Lengths:
        """Return the lengths of samples, (num_samples, num_dimensions)."""
        dimensions = len(self.room)
        lengths = [self.length(sample) for sample in samples]
        try:
            # All at once is many times as fast as one by one.
            measured = np.array(lengths)
        except ValueError:  # they differ in their number of dimensions
            measured = np.empty(0)
        if (
            measured.dtype.kind not in "iu"
            or measured.size != len(samples) * dimensions
            or measured.min(initial=0) < 0
        ):
            self._refuse_lengths(samples, lengths)
        return measured.astype(np.int64).reshape(len(samples), dimensions)

    def divide(self, lengths: Lengths) -> Bins:
        """Return packs as lists of indices into `lengths`, none of which exceeds the context."""
        if self.method == "first_fit":
            return first_fit_decreasing(lengths, self.room)
        return fill_exactly(lengths, self.room, balance=self.balance, oldest_first=self.carry)

    def _split(self, bins: Bins, lengths: Lengths) -> tuple[Bins, list[int]]:
        """Return the packs to yield, not sorted by size, and the items to carry over."""
        kept, carried = bins, []
        if self.carry and len(bins) > 1:
            fill = np.array([(lengths[items].sum(axis=0) / self.room).max() for items in bins])
            full = fill >= 1 - CARRIED_SLACK
            best = fill >= fill.max() - CARRIED_SLACK
            if not full.any() and 2 * best.sum() > len(bins):
                # Lengths such as these, all equal for example, fill no pack any better.
                full = best
            # Every window yields something, the oldest items first.
            oldest = next(index for index, items in enumerate(bins) if 0 in items)
            given = {oldest, *np.flatnonzero(full).tolist()}
            kept = [bins[index] for index in sorted(given)]
            carried = [item for p, items in enumerate(bins) if p not in given for item in items]
        # The first item of a bin is its largest, whose place in the stream is random.
        return sorted(kept, key=operator.itemgetter(0)), carried

    def _refuse_lengths(self, samples: Sequence[Any], lengths: Sequence[Any]) -> None:
        """Raise an error that names the first sample without a valid length."""
        dimensions = len(self.room)
        for sample, length in zip(samples, lengths, strict=True):
            array = np.asarray(length)
            if array.dtype.kind not in "iu" or array.size != dimensions or array.min() < 0:
                raise FatalSampleError(
                    f"the length of sample {_name(sample)} is {length!r}; expected "
                    f"{dimensions} whole numbers, as context={self.context} has them"
                )

    def _refuse(self, samples: Sequence[Any], lengths: Lengths) -> None:
        worst = int(np.flatnonzero((lengths > self.room).any(axis=1))[0])
        length = lengths[worst].tolist()
        shown = length[0] if len(length) == 1 else length
        raise FatalSampleError(
            f"sample {_name(samples[worst])} has the length {shown}, the context is "
            f"{self.context}; shorten it or raise SkipSample in preencode_sample, or leave such "
            "samples out with Packer(..., too_long='leave_out')"
        )


def _name(sample: Any) -> str:
    """Return the name of a sample for messages."""
    key = sample.get("__key__") if isinstance(sample, dict) else getattr(sample, "__key__", None)
    return repr(sample)[:80] if key is None else repr(key)


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
