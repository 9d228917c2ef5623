"""Endless and finite data of numbers, and what lanes make of them."""

from __future__ import annotations

from energon import WorkerConfig
from energon.stages.lane import Lane
from energon.testing import check_resume
from tests.stages.hooks import ids as ids
from tests.stages.numbers import numbers

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


def items(wrapper, *, lane=None):
    """All that the only lane yields; resuming at each item gives the same."""
    check_resume(wrapper)
    return list(wrapper.open(lane or Lane(0, 1)))


__all__ = ["CONFIG", "ids", "items", "numbers"]
