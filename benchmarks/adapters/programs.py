"""What the programs do to samples, whatever loads them, and how many samples a batch has."""

from __future__ import annotations

from typing import Any

from adapters.thumbnail import with_thumbnail

PACK = 8


def pass_on(sample: Any) -> Any:
    """Return a sample as it is."""
    return sample


def encode(sample: Any) -> Any:
    """Return a sample as it is, as an encoder would."""
    return sample


def cook_and_encode(sample: Any) -> Any:
    """Do both, where a library knows one hook only."""
    return encode(pass_on(sample))


SAMPLE_HOOKS = {
    "plain": None,
    "cooker": pass_on,
    "encode": cook_and_encode,
    "thumbnail": with_thumbnail,
}
"""What the programs call with each sample that hand samples on as dicts."""


def count(batch: Any, program: str) -> int:
    """Return how many samples a batch has."""
    if program == "packed":
        return sum(len(pack.text) for pack in batch)
    if program in ("typed", "stream"):
        return len(batch[1] if isinstance(batch, (tuple, list)) else batch.__key__)
    return len(batch)
