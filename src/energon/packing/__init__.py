"""Packing: which samples go into one sequence, and what attention needs to separate them.

Arithmetic on lengths: no files, and no torch unless the arguments are tensors.
"""

from energon.packing.packer import Packer, Selection, fill_exactly, first_fit_decreasing
from energon.packing.sequence import (
    PackedSequence,
    cu_seqlens,
    merge_cu_seqlens,
    pack_sequences,
    position_ids,
)

__all__ = [
    "PackedSequence",
    "Packer",
    "Selection",
    "cu_seqlens",
    "fill_exactly",
    "first_fit_decreasing",
    "merge_cu_seqlens",
    "pack_sequences",
    "position_ids",
]
