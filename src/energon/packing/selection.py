"""What comes of dividing a window of samples into packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Selection:
    """What the hook `select_samples_to_pack` may return instead of a list of groups.

    Args:
        groups: Which samples are packed together.
        carry: Samples that are offered again with the next window, the very objects that the
            hook was given.
    """

    groups: Sequence[Sequence[Any]]
    carry: Sequence[Any] = ()
