"""The names of energon under the import path that programs written for Megatron-Energon use."""

from __future__ import annotations

from typing import Any

import energon
from energon import *  # noqa: F403 - the same names, under another path

__all__ = energon.__all__


def __getattr__(name: str) -> Any:
    return getattr(energon, name)
