"""Preparing, verifying and repairing datasets that are not folders of shards.

A kind of dataset that does this its own way names an `Upkeep` in its `KindEntry`, so commands
need not know which kinds there are. A `Report` or `Repair` says what came out of it, for folders
of shards, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from energon.errors import ConfigError
from energon.io.address import address_name
from energon.metadataset.kind import KINDS
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
        """Whether no problems were found."""
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


COMPRESSED = (".gz", ".zst", ".bz2", ".xz")


class Upkeep(Protocol):
    """What keeps datasets of one kind in order. Addresses are paths, or of an object store."""

    noun: str
    """What such a dataset is, for messages: "a … file"."""

    def prepare(
        self,
        address: str,
        *,
        split_ratio: Mapping[str, float] | None = None,
        exclude_from: Sequence[str | os.PathLike[str]] = (),
    ) -> int:
        """Index it, and return how many samples it has.

        Args:
            address: Where it is.
            split_ratio: Ratio by name of the split, for consecutive samples; None leaves the
                splits that there are.
            exclude_from: Quarantine files, or folders of them, whose samples are excluded.
        """

    def verify(self, address: str, depth: Depth) -> Report:
        """Check it, and change nothing."""

    def repair(self, address: str, depth: Depth) -> Repair:
        """Check it, and rewrite what is wrong in its index."""


def upkeep_of(address: str | os.PathLike[str], *, compressed: bool = False) -> Upkeep | None:
    """Return what keeps the dataset at an address in order; None for folders of shards.

    Args:
        address: Where it is; its name alone decides.
        compressed: Whether the name may have the suffix of a compressed file, too.
    """
    names = [address_name(os.fspath(address))]
    stem, suffix = os.path.splitext(names[0])
    if compressed and suffix in COMPRESSED:
        names.append(stem)
    for entry in KINDS:
        if entry.upkeep and any(name.endswith(entry.suffixes) for name in names):
            module, _, attribute = entry.upkeep.partition(":")
            upkeep: Upkeep = getattr(import_module(module), attribute)
            return upkeep
    return None
