"""Random numbers and permutations that are functions of a key: no table, no state.

Nothing in the product consumes a stream of random numbers: the number of a
key is the same in any process, at any time, in any order.

A Feistel network permutes the numbers of b bits; walking along its cycles until a number
below n comes up makes that a permutation of n (Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002). Networks of two or three bits favor some permutations, so tiny sizes
are ranked instead. Sizes and keys may differ from element to element.

How good a shuffle is, is measured against a uniform permutation.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from energon.arrays import U64, Ints, mix

ORDER_VERSION = 1
"""Changes when the same seed and configuration would no longer give the same order."""

ROUNDS = 6
MAX_RANKED = 32
_ONE = np.uint64(1)

Scalar = TypeVar("Scalar", bound=np.generic)


def derive_seed(*key: int | str) -> int:
    """Return 64 bits for a key, e.g. `derive_seed(seed, "leaf", uid)`.

    BLAKE2b over the parts with their types, so (1, "2") and ("1", 2) differ.
    """
    text = "\x1f".join([f"{type(part).__name__[0]}{part}" for part in key])
    return int.from_bytes(
        blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little"
    )


def combine(keys: U64, *numbers: NDArray[np.int64] | int) -> U64:
    """Return a key for each key and numbers: one level after the other."""
    for number in numbers:
        keys = mix(keys ^ mix(np.atleast_1d(number).astype(np.uint64)))
    return keys


def shared(values: NDArray[Scalar]) -> NDArray[Scalar]:
    """Return one value, to be broadcast, if all are the same; otherwise all of them.

    Example:
        >>> shared(np.array([7, 7, 7])), shared(np.array([7, 8]))
        (array([7]), array([7, 8]))
    """
    return values[:1] if len(values) > 1 and (values == values[0]).all() else values


def picked(values: NDArray[Scalar], chosen: NDArray[np.int64] | slice) -> NDArray[Scalar]:
    """Return some of the values; a single value stands for all and is returned as is."""
    return values if len(values) == 1 else values[chosen]


def divided(numbers: Ints, divisor: Ints | int) -> tuple[Ints, Ints]:
    """Return quotients and remainders of numbers that are not negative.

    Where there is a single divisor, this takes half the time of `np.divmod`.
    """
    quotients = numbers // divisor
    return quotients, numbers - quotients * divisor


def permute(indices: NDArray[np.int64], sizes: NDArray[np.int64], keys: U64) -> NDArray[np.int64]:
    """Return the image of each index under the permutation of its size and key.

    Args:
        indices: Numbers with 0 ≤ index < size.
        sizes: How many numbers are permuted, at least 1.
        keys: Elements with equal size and key belong to the same permutation.
    """
    indices, sizes, keys = np.broadcast_arrays(indices, sizes, keys)
    sizes, keys = shared(sizes), shared(keys)
    tiny = np.flatnonzero(sizes <= MAX_RANKED)
    if len(tiny) == len(sizes):
        return _rank(indices, sizes, keys)
    limits = sizes.astype(np.uint64)
    result = _feistel(indices.astype(np.uint64), limits, keys)
    outside = np.flatnonzero(result >= limits)
    while len(outside):
        reach = picked(limits, outside)
        walked = _feistel(result[outside], reach, picked(keys, outside))
        result[outside] = walked
        outside = outside[walked >= reach]
    images = result.astype(np.int64)
    if len(tiny):
        keys = np.broadcast_to(keys, sizes.shape)
        images[tiny] = _rank(indices[tiny], sizes[tiny], keys[tiny])
    return images


def unpermute(images: NDArray[np.int64], sizes: NDArray[np.int64], keys: U64) -> NDArray[np.int64]:
    """Return the index of each image: the inverse of `permute`."""
    images, sizes, keys = np.broadcast_arrays(images, sizes, keys)
    limits = sizes.astype(np.uint64)
    result = _feistel(images.astype(np.uint64), limits, keys, back=True)
    outside = np.flatnonzero(result >= limits)
    while len(outside):
        walked = _feistel(result[outside], limits[outside], keys[outside], back=True)
        result[outside] = walked
        outside = outside[walked >= limits[outside]]
    indices = result.astype(np.int64)
    tiny = np.flatnonzero(sizes <= MAX_RANKED)
    if len(tiny):
        numbers = np.arange(MAX_RANKED, dtype=np.uint64)
        hashes = mix(mix(keys[tiny])[:, None] ^ numbers)
        hashes[numbers >= limits[tiny][:, None]] = np.iinfo(np.uint64).max
        by_rank = np.argsort(hashes, axis=1, kind="stable")
        indices[tiny] = by_rank[np.arange(len(tiny)), images[tiny]]
    return indices


def unpermuted(image: int, size: int, key: U64) -> int:
    """Return which of `size` numbers has this `image` under the permutation of `key`."""
    return int(unpermute(np.array([image]), np.array([size]), key)[0])


def _rank(indices: NDArray[np.int64], sizes: NDArray[np.int64], keys: U64) -> NDArray[np.int64]:
    """Return the rank of each index among all of its size, by their hashes."""
    mixed = mix(keys)
    own = mix(mixed ^ indices.astype(np.uint64))
    ranks = np.zeros(len(indices), np.int64)
    others = np.arange(sizes.max(initial=0), dtype=np.uint64)
    # A single key stands for all: then its hashes are computed together.
    hashes = mix(mixed ^ others) if len(keys) == 1 else (mix(mixed ^ each) for each in others)
    for other, hash_ in enumerate(hashes):
        # No two hashes under one key are equal: mixing is a bijection.
        ranks += (hash_ < own) & (other < sizes)
    return ranks


def _feistel(values: U64, sizes: U64, keys: U64, *, back: bool = False) -> U64:
    """Permute the numbers with as many bits as the largest index of each size has, or back."""
    # frexp is exact for integers below 2^53, and no dataset has more samples.
    bits = np.frexp((sizes - _ONE).astype(np.float64))[1].astype(np.uint64)
    low_bits = bits >> _ONE
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << (bits - low_bits)) - _ONE
    low = values & low_mask
    high = values >> low_bits
    rounds = range(ROUNDS)
    for number in reversed(rounds) if back else rounds:
        key = keys + np.uint64((number * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF)
        if number % 2:
            mixed = mix(high ^ key)
            mixed &= low_mask
            low ^= mixed
        else:
            mixed = mix(low ^ key)
            mixed &= high_mask
            high ^= mixed
    permuted: U64 = (high << low_bits) | low
    return permuted


class ShuffleQuality(NamedTuple):
    """Two views of an order; a uniform permutation has about 0 and 1."""

    serial_correlation: float
    """Correlation of each ordinal with the one before it: 1 for reading in order."""
    neighbor_distance: float
    """Mean distance of consecutive ordinals, as a multiple of the n/3 of a uniform order."""


def shuffle_quality(ordinals: NDArray[np.int64], num_samples: int) -> ShuffleQuality:
    """Return the quality of an order.

    Args:
        ordinals: Samples in the order in which training sees them, at least 3.
        num_samples: How many samples they are drawn from.
    """
    first, second = ordinals[:-1].astype(np.float64), ordinals[1:].astype(np.float64)
    spread = float(first.std() * second.std())
    covariance = float(((first - first.mean()) * (second - second.mean())).mean())
    distance = float(np.abs(second - first).mean())
    return ShuffleQuality(
        covariance / spread if spread else 1.0, distance / (num_samples / 3) if num_samples else 0.0
    )
