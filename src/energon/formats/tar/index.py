"""`<shard>.tar.idx`: where each sample of a shard begins.

N + 1 little-endian unsigned 64-bit numbers without a header: the offset of the first tar
header of each sample, and the end of the last member.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from energon.errors import FormatError, TruncatedError


def tar_index_path(shard: str | os.PathLike[str]) -> Path:
    """Return where the index of a shard is: its last suffix becomes `.tar.idx`."""
    return Path(shard).with_suffix(".tar.idx")


def encode_tar_index(sample_offset: NDArray[np.integer]) -> bytes:
    """Return the content of an index file."""
    return sample_offset.astype("<u8").tobytes()


def load_tar_index(path: str | os.PathLike[str]) -> NDArray[np.uint64]:
    """Read an index file.

    Raises:
        FileNotFoundError: If there is none.
        TruncatedError: If it does not hold whole numbers.
        FormatError: If the offsets do not ascend.
    """
    return parse_tar_index(Path(path).read_bytes(), origin=str(path))


def parse_tar_index(data: bytes, *, origin: str) -> NDArray[np.uint64]:
    """Return the offsets in the content of an index file, see `load_tar_index`."""
    if len(data) % 8 or not data:
        raise TruncatedError(
            f"{origin}: has {len(data)} bytes, wanted a multiple of 8; run `energon prepare` again"
        )
    offsets = np.frombuffer(data, "<u8").astype(np.uint64)
    if (offsets[1:] < offsets[:-1]).any():
        raise FormatError(f"{origin}: its offsets do not ascend; run `energon prepare` again")
    return offsets
