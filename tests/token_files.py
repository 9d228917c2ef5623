"""Token files that tests build for themselves, by the layout of the format and nothing of ours."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}


def write_tokens(prefix, documents, *, dtype="uint16", modes=None):
    """Write `<prefix>.bin` and `.idx`; a document is a list of numbers, or of such lists."""
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    nested = [each if each and isinstance(each[0], list) else [each] for each in documents]
    sequences = [sequence for document in nested for sequence in document]
    arrays = [np.array(sequence, dtype) for sequence in sequences]
    lengths = [len(array) for array in arrays]
    size = np.dtype(dtype).itemsize
    pointers = [size * sum(lengths[:n]) for n in range(len(lengths))]
    first = [0]
    for document in nested:
        first.append(first[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<QQ", len(lengths), len(first))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(pointers)}q", *pointers)
    index += struct.pack(f"<{len(first)}q", *first)
    if modes is not None:
        index += struct.pack(f"<{len(modes)}b", *modes)
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(a.tobytes() for a in arrays))
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    return prefix.with_name(prefix.name + ".idx")


def numbered(lengths, *, start=0):
    """Documents of these lengths whose tokens are numbered through from `start`."""
    documents = []
    for length in lengths:
        documents.append(list(range(start, start + length)))
        start += length
    return documents
