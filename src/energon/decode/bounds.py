"""Refuse parts that would take too much memory or time, before they do; see `energon.limits`."""

from __future__ import annotations

from typing import Any

from energon.errors import DecodeError
from energon.limits import PART_DEPTH, Limit


def check_limit(found: int, limit: Limit, what: str) -> None:
    """Raise DecodeError if there is more than a limit allows.

    Args:
        found: How much there is, or is claimed to be.
        limit: How much may be.
        what: The beginning of the message: what there is so much of.
    """
    if found > limit.value:
        raise DecodeError(f"{what}; expected at most {limit.value} {limit.meaning}; {limit.hint}")


def check_depth(value: Any) -> None:
    """Raise DecodeError if lists and dicts are nested deeper than `PART_DEPTH`.

    No container may be part of two others.
    """
    limit = PART_DEPTH.value
    level, depth = [value], 0
    while level:
        if depth >= limit:
            raise too_deep()
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, list | tuple | dict)
        ]
        depth += 1


def too_deep() -> DecodeError:
    """Return the error for values that are nested too deep."""
    return DecodeError(
        f"values are nested more than {PART_DEPTH.value} levels deep; {PART_DEPTH.hint}"
    )
