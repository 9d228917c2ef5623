"""Seeds and random numbers that are functions of an address.

Nothing in the product consumes a stream of random numbers: whoever asks for the number at an
address gets the same one in any process, at any time, in any order.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

ORDER_VERSION = 1
"""Changes when the same seed and configuration would no longer give the same order."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def derive_seed(*address: int | str) -> int:
    """Return 64 bits for an address, e.g. `derive_seed(seed, "leaf", uid)`.

    BLAKE2b over the parts with their types, so (1, "2") and ("1", 2) differ.
    """
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in address)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(values: U64) -> U64:
    """Return 64 well-mixed bits for each value (the finaliser of SplitMix64)."""
    # In place: to allocate a new array takes longer than to compute one of a few thousand bits.
    mixed = values + _GOLDEN
    shifted = mixed >> _30
    mixed ^= shifted
    mixed *= _MIX_1
    np.right_shift(mixed, _27, out=shifted)
    mixed ^= shifted
    mixed *= _MIX_2
    np.right_shift(mixed, _31, out=shifted)
    mixed ^= shifted
    return mixed


def combine(keys: U64, *numbers: NDArray[np.int64] | int) -> U64:
    """Return a key for each key and numbers: one level of address after the other."""
    for number in numbers:
        keys = mix(keys ^ mix(np.atleast_1d(number).astype(np.uint64)))
    return keys
