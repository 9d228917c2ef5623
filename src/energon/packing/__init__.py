"""Packing: how long samples are, which go into one sequence, and what attention needs.

Arithmetic on lengths: no files, and no torch unless the arguments are tensors.
"""

from energon.packing.packer import (
    PackedSequence,
    Packer,
    Selection,
    cu_seqlens,
    fill_exactly,
    first_fit_decreasing,
    greedy_knapsack,
    merge_cu_seqlens,
    pack_sequences,
    position_ids,
)
from energon.packing.tokens import ChatTokens, chat_messages, chat_tokens, image_tokens

__all__ = [
    "ChatTokens",
    "PackedSequence",
    "Packer",
    "Selection",
    "chat_messages",
    "chat_tokens",
    "cu_seqlens",
    "fill_exactly",
    "first_fit_decreasing",
    "greedy_knapsack",
    "image_tokens",
    "merge_cu_seqlens",
    "pack_sequences",
    "position_ids",
]
