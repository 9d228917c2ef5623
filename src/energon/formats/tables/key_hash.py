"""Hashes of sample keys, 128 bits each, for many keys at once.

Two keys with equal hashes are taken for the same key: among 10^12 keys the chance that any two
share one is below 10^-14. The hash is not made to withstand an adversary, who could write the
same key anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.formats.tables.part_table import PartTable

Hashes = NDArray[np.uint64]

_WORD = 8
_SEEDS = np.array([0x243F6A8885A308D3, 0x13198A2E03707344], np.uint64)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def hash_keys(table: PartTable, indices: NDArray[np.int64]) -> Hashes:
    """Return the hashes of the keys of some samples, with shape (samples, 2)."""
    data = np.frombuffer(table.key_bytes, np.uint8)
    if table.key_length is not None:
        return _hash_equal(data, indices * table.key_length, table.key_length)
    edges = table.columns["key_start"]
    starts = edges[indices].astype(np.int64)
    lengths = edges[indices + 1].astype(np.int64) - starts
    hashes = np.empty((len(indices), 2), np.uint64)
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
    hashes = np.tile(_mix(_SEEDS ^ np.uint64(length)), (len(starts), 1))
    for word in range(words):
        hashes = _mix(hashes ^ _mix(columns[:, word : word + 1] + _SEEDS))
    return hashes


def _mix(values: Hashes) -> Hashes:
    """Return 64 well-mixed bits for each value (the finaliser of SplitMix64)."""
    values = values + _GOLDEN
    values = (values ^ (values >> _30)) * _MIX_1
    values = (values ^ (values >> _27)) * _MIX_2
    return values ^ (values >> _31)
