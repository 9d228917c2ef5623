"""What came out of checking and repairing a dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from energon.errors import ConfigError
from energon.prepare.verify.shard import DEPTHS, Depth, Problem

LOST = ("shard-missing", "shard-truncated", "shard-damaged")
"""Problems after which a shard is of no use."""


@dataclass
class Report:
    """What came out of checking a dataset."""

    dataset: str
    depth: Depth
    num_shards: int = 0
    num_samples: int = 0
    num_checksums: int = 0
    """How many contents were compared with checksums."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is worth knowing, and not wrong."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def rename(self, dataset: str, said: Callable[[str], str]) -> None:
        """Speak of the dataset by another name.

        Args:
            dataset: The name.
            said: Returns a message with this name.
        """
        self.dataset = dataset
        self.problems = [each._replace(message=said(each.message)) for each in self.problems]
        self.notes = [said(note) for note in self.notes]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "dataset": self.dataset,
            "ok": self.ok,
            "depth": self.depth,
            "shards": self.num_shards,
            "samples": self.num_samples,
            "checksums": self.num_checksums,
            "problems": [problem._asdict() for problem in self.problems],
            "notes": self.notes,
        }


class Repair(NamedTuple):
    """What was done."""

    before: Report
    after: Report
    indexed: list[str]
    """Shards that were indexed again."""
    dropped: list[str]
    """Shards that are no longer part of the dataset."""


def check_depth(depth: str) -> None:
    """Raise ConfigError if there is no such depth."""
    if depth not in DEPTHS:
        raise ConfigError(f"depth {depth!r}: expected one of {', '.join(DEPTHS)}")
