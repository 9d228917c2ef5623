"""Blend datasets by weight, item by item.

Items are drawn from the dataset that is furthest behind its share, so shares are exact but for
one item at any time. Lanes begin at different points of the pattern, so that not all of them
draw from the same dataset at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from energon.compat.megatron.stages.branch import Branches, open_branches, total_items
from energon.errors import ConfigError, StateError
from energon.plan.seeds import derive_seed
from energon.stages.base import DatasetIterator, Kind, Place, State, unpack
from energon.stages.lane import Lane


@dataclass(frozen=True)
class Blend(Branches):
    """Draw items from `datasets` by `weights`, until all have ended.

    The others share the turns of a dataset that has ended. A weight of 0 draws nothing.
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.datasets or len(self.datasets) != len(self.weights):
            raise ConfigError(
                f"a blend needs a weight for each dataset: {len(self.datasets)} datasets, "
                f"{len(self.weights)} weights"
            )
        if not all(0 <= weight < float("inf") for weight in self.weights) or not any(self.weights):
            raise ConfigError(
                f"weights are numbers of at least 0, and not all 0: {list(self.weights)}"
            )

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _BlendIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        drawn = (each for each, weight in zip(self.datasets, self.weights, strict=True) if weight)
        return total_items(drawn, lane, lanes)


class _BlendIterator(DatasetIterator[Any]):
    saves: ClassVar[Mapping[str, Kind]] = {
        "counts": list,
        "ended": list,
        "drawn": int,
        "inner": list,
    }

    def __init__(self, stage: Blend, lane: Lane) -> None:
        self.branches = open_branches(stage.datasets, lane)
        self.weights = [float(weight) for weight in stage.weights]
        # How far each is ahead of its share at the beginning.
        self.phases = [
            derive_seed(lane.seed, "blend", lane.number, branch) / 2**64
            for branch in range(len(self.branches))
        ]
        # Since the last change of shares.
        self.counts = [0] * len(self.branches)
        self.ended: list[int] = []
        self.drawn = 0
        self.last = 0

    @property
    def row(self) -> int:
        chosen = self._choose()
        return (
            self.branches[chosen].row * len(self.branches) + chosen if chosen >= 0 else self.drawn
        )

    @property
    def address(self) -> tuple[int, ...]:
        return (self.drawn,)

    @property
    def place(self) -> Place:
        return [self.last, self.branches[self.last].place]

    def __next__(self) -> Any:
        while (chosen := self._choose()) >= 0:
            try:
                item = next(self.branches[chosen])
            except StopIteration:
                self.ended.append(chosen)
                self.counts = [0] * len(self.branches)
                continue
            self.counts[chosen] += 1
            self.drawn += 1
            self.last = chosen
            return item
        raise StopIteration

    def _choose(self) -> int:
        """Return which dataset is furthest behind its share; -1 if all have ended."""
        alive = [
            (weight if number not in self.ended else 0.0)
            for number, weight in enumerate(self.weights)
        ]
        total = sum(alive)
        if not total:
            return -1
        turns = sum(self.counts) + 1
        behind = [
            turns * weight / total + phase - count if weight else float("-inf")
            for weight, phase, count in zip(alive, self.phases, self.counts, strict=True)
        ]
        return behind.index(max(behind))

    def state_dict(self) -> State:
        return {
            "counts": list(self.counts),
            "ended": list(self.ended),
            "drawn": self.drawn,
            "inner": [branch.state_dict() for branch in self.branches],
        }

    def load_state_dict(self, state: State) -> None:
        counts, ended, self.drawn, inner = unpack(state, self.saves)
        self.counts, self.ended = list(counts), list(ended)
        if {len(counts), len(inner)} != {len(self.branches)}:
            raise StateError(
                f"saved state is of a blend of {len(counts)} datasets, this one has "
                f"{len(self.branches)}; was it saved by another pipeline?"
            )
        for branch, saved in zip(self.branches, inner, strict=True):
            branch.load_state_dict(saved)
