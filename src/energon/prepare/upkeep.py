"""Preparing, verifying and repairing datasets that are not folders of shards.

A kind of dataset that implements this names an `Upkeep` in its `KindEntry`, so commands need not
know which kinds there are. `Report` and `Repair` describe the results, for folders of shards as
well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from energon.errors import ConfigError
from energon.io.address import address_name
from energon.metadataset.kind import COMPRESSIONS, KINDS, load_attribute
from energon.prepare.verify.shard import DEPTHS, Depth, Problem

LOST = ("shard-missing", "shard-truncated", "shard-damaged")
"""Problems that make a shard useless."""


@dataclass
class Report:
    """The result of checking a dataset."""

    dataset: str
    depth: Depth
    num_shards: int = 0
    num_samples: int = 0
    num_checksums: int = 0
    """How many contents were compared with checksums."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Facts worth knowing that are not problems."""

    @property
    def ok(self) -> bool:
        """Whether no problems were found."""
        return not self.problems

    def rename(self, dataset: str, said: Callable[[str], str]) -> None:
        """Refer to the dataset by another name.

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
    """The result of a repair."""

    before: Report
    after: Report
    indexed: list[str]
    """Shards that were indexed again."""
    dropped: list[str]
    """Shards that are no longer part of the dataset."""


def check_verify_depth(depth: str) -> None:
    """Raise ConfigError if there is no such depth."""
    if depth not in DEPTHS:
        raise ConfigError(f"depth {depth!r}: expected one of {', '.join(DEPTHS)}")


class Upkeep(Protocol):
    """Maintains datasets of one kind. Addresses are local paths or those of an object store."""

    noun: str
    """What such a dataset is, for messages: "a … file"."""

    def prepare(
        self,
        address: str,
        *,
        split_ratio: Mapping[str, float] | None = None,
        exclude_from: Sequence[str | os.PathLike[str]] = (),
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> int:
        """Index it, and return the number of samples.

        Args:
            address: Where it is.
            split_ratio: Ratio by name of the split, for consecutive samples; None keeps the
                existing splits.
            exclude_from: Quarantine files, or folders of them, whose samples are excluded.
            progress: Called with the number of bytes that were read, and the total.
        """

    def verify(self, address: str, depth: Depth) -> Report:
        """Check it, and change nothing."""

    def repair(self, address: str, depth: Depth) -> Repair:
        """Check it, and rewrite what is wrong in its index."""


def upkeep_of(address: str | os.PathLike[str], *, compressed: bool = False) -> Upkeep | None:
    """Return the upkeep of the dataset at an address; None for folders of shards.

    Args:
        address: The address; only its name matters.
        compressed: Whether the name may also have the suffix of a compressed file.
    """
    names = [address_name(os.fspath(address))]
    stem, suffix = os.path.splitext(names[0])
    if compressed and suffix in COMPRESSIONS:
        names.append(stem)
    for entry in KINDS:
        if entry.upkeep and any(name.endswith(entry.suffixes) for name in names):
            upkeep: Upkeep = load_attribute(entry.upkeep)
            return upkeep
    return None
