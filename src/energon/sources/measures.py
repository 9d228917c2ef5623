"""The measures of samples, and the costs that follow from them.

A measure is a number for each sample, by its number in the dataset. Sizes in the index are
measures without further work: `bytes` is the size of a sample, `jpg:bytes` that of its part `jpg`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import ConfigError
from energon.plan.balance import Measures
from energon.plan.rows import Rows
from energon.sources.source import Source

CHECKED_SAMPLES = 64
"""Samples of each dataset whose costs are checked before a run begins."""


@runtime_checkable
class HasMeasures(Protocol):
    """A source that has measures of its samples."""

    def measure(self, name: str, ordinals: Ints) -> NDArray[np.float64] | None:
        """Return a measure of samples, in the order of `ordinals`; None if there is none."""

    def measure_names(self) -> list[str]:
        """Return the names of its measures."""


@dataclass(frozen=True)
class SampleCosts:
    """The costs of samples, by their rows in a plan.

    Args:
        cost: The name of a measure, or a function of measures.
        sources: The sources, one for each leaf.
    """

    cost: str | Callable[[Measures], NDArray[Any]]
    sources: Sequence[Source]

    def __call__(self, rows: Rows) -> NDArray[np.float64]:
        """Return the cost of each sample; 0 for gaps.

        Raises:
            ConfigError: If a dataset has no such measure, or the function returns no costs.
        """
        costs = np.zeros(len(rows.leaf))
        for leaf in np.unique(rows.leaf).tolist():
            if leaf >= 0:
                chosen = np.flatnonzero(rows.leaf == leaf)
                costs[chosen] = self._of(self.sources[leaf], rows.ordinal[chosen])
        return costs

    def check(self) -> None:
        """Raise ConfigError if the costs of a few samples of some dataset are missing, or all 0."""
        for source in self.sources:
            ordinals = np.unique(np.linspace(0, len(source) - 1, CHECKED_SAMPLES).astype(np.int64))
            if not self._of(source, ordinals).any():
                names = ", ".join(SourceMeasures(source, ordinals))
                raise ConfigError(
                    f"the costs of all {len(ordinals)} samples tried of {source.path} are 0, by "
                    f"{self.cost!r}; its measures are: {names}"
                )

    def _of(self, source: Source, ordinals: Ints) -> NDArray[np.float64]:
        measures = SourceMeasures(source, ordinals)
        if isinstance(self.cost, str):
            return measures[self.cost]
        try:
            costs = np.asarray(self.cost(measures), np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the cost function {self.cost!r} failed: {error}") from error
        if costs.shape != ordinals.shape or not np.isfinite(costs).all():
            raise ConfigError(
                f"the cost function {self.cost!r} returned an array of shape {costs.shape} with "
                f"{int((~np.isfinite(costs)).sum())} infinite or missing values for "
                f"{len(ordinals)} samples of {source.path}; expected a finite number for each"
            )
        return costs


class SourceMeasures(Mapping[str, NDArray[np.float64]]):
    """The measures of some samples of a source, read when they are asked for.

    Args:
        source: The source.
        ordinals: The numbers of the samples.
    """

    def __init__(self, source: Source, ordinals: Ints) -> None:
        self._source, self._ordinals = source, ordinals

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        source = self._source
        values = source.measure(name, self._ordinals) if isinstance(source, HasMeasures) else None
        if values is None:
            names = ", ".join(self) or "none"
            raise ConfigError(f"{source.path} has no measure {name!r}; its measures are: {names}")
        return values

    def __iter__(self) -> Iterator[str]:
        source = self._source
        return iter(source.measure_names() if isinstance(source, HasMeasures) else [])

    def __len__(self) -> int:
        return sum(1 for _ in self)
