"""Hashes of the keys of samples, with which joins and look-ups find them.

A hash has 128 bits in two halves. Joins take two keys with equal hashes for the same key: among
10^12 keys the probability of any collision is below 10^-14. Look-ups use the first half, and
compare the key. The hash does not resist an adversary, who could write the same key anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, mix, mix_one
from energon.formats.tables.part_table import PartTable

Hashes = NDArray[np.uint64]

_WORD = 8
_SEEDS = np.array([0x243F6A8885A308D3, 0x13198A2E03707344], np.uint64)


def table_hashes(table: PartTable, indices: Ints) -> Hashes:
    """Return the hashes of the keys of some samples, with shape (samples, 2)."""
    data = np.frombuffer(table.key_bytes, np.uint8)
    if table.key_length is not None:
        return _hash_equal(data, indices * table.key_length, table.key_length)
    edges = table.columns["key_start"]
    starts = edges[indices].astype(np.int64)
    return _hash_all(data, starts, edges[indices + 1].astype(np.int64) - starts)


def key_hashes(keys: Sequence[str]) -> Hashes:
    """Return the hashes of some keys, with shape (keys, 2)."""
    encoded = [key.encode() for key in keys]
    lengths = np.array([len(key) for key in encoded], np.int64)
    data = np.frombuffer(b"".join(encoded), np.uint8)
    return _hash_all(data, np.cumsum(lengths) - lengths, lengths)


def _hash_all(data: NDArray[np.uint8], starts: Ints, lengths: Ints) -> Hashes:
    hashes = np.empty((len(starts), 2), np.uint64)
    for length in np.unique(lengths).tolist():
        chosen = np.flatnonzero(lengths == length)
        hashes[chosen] = _hash_equal(data, starts[chosen], length)
    return hashes


def _hash_equal(data: NDArray[Any], starts: NDArray[np.int64], length: int) -> Hashes:
    """Return the hashes of keys of one length, eight bytes at a time."""
    words = -(-length // _WORD)
    padded = np.zeros((len(starts), words * _WORD), np.uint8)
    if length:
        padded[:, :length] = data[starts[:, None] + np.arange(length)]
    columns = padded.view("<u8").astype(np.uint64)
    hashes = np.tile(mix(_SEEDS ^ np.uint64(length)), (len(starts), 1))
    for word in range(words):
        hashes = mix(hashes ^ mix(columns[:, word : word + 1] + _SEEDS))
    return hashes


def key_hash(key: bytes) -> int:
    """Return the first half of the hash of a key, faster than for many keys at once."""
    seed = int(_SEEDS[0])
    value = mix_one(seed ^ len(key))
    for start in range(0, len(key), _WORD):
        word = int.from_bytes(key[start : start + _WORD], "little")
        value = mix_one(value ^ mix_one(word + seed))
    return value
