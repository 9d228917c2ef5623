"""What factories of datasets get and give beside samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypedDict

from energon.metadataset.leaf import Subset
from energon.plan.subset import resolve_range


@dataclass(frozen=True, kw_only=True)
class DatasetSubset:
    """A range of samples: first in numbers of samples, then as shares of what is left.

    Args:
        range: Shares from 0 to 1 at which it begins and ends; None for all.
        absolute_range: Number of its first sample and of the one behind its last, None for the
            end; None for all.
        subsets: Instead of these, the ranges of several levels, the innermost first.
    """

    range: tuple[float, float] | None = None
    absolute_range: tuple[int, int | None] | None = None
    subsets: tuple[Subset, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.subsets:
            return
        found: list[Subset] = []
        if self.absolute_range is not None:
            first, last = self.absolute_range
            found.append((first, "end" if last is None else last))
        if self.range is not None:
            found.append((_percent(self.range[0]), _percent(self.range[1])))
        object.__setattr__(self, "subsets", tuple(found))

    def compute_subset(self, total_samples: int) -> tuple[int, int]:
        """Return the number of the first of so many samples, and of the one behind the last."""
        return resolve_range(total_samples, self.subsets)

    def config(self) -> dict[str, Any]:
        """Return the range as plain data."""
        return {"range": self.range, "absolute_range": self.absolute_range}


class FilteredSample(TypedDict):
    """What `load_sample` of a factory gets, beside the parts by name."""

    __key__: str
    __shard__: str
    __restore_key__: tuple[Any, ...]
    __sources__: Sequence[Any]


def _percent(share: float) -> str:
    return f"{Decimal(repr(share)) * 100:f}%"
