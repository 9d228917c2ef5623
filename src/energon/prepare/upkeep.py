"""Preparing, verifying and repairing datasets that are no folders of shards.

A kind of dataset that does this its own way names an `Upkeep` in its `KindEntry`, so commands
need not know which kinds there are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Protocol

from energon.io.address import address_name
from energon.metadataset.kind import KINDS
from energon.prepare.verify.report import Repair, Report
from energon.prepare.verify.shard import Depth

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
    name = address_name(os.fspath(address))
    stem, suffix = os.path.splitext(name)
    if compressed and suffix in COMPRESSED:
        suffix = os.path.splitext(stem)[1]
    for entry in KINDS:
        if entry.upkeep and suffix in entry.suffixes:
            module, _, attribute = entry.upkeep.partition(":")
            upkeep: Upkeep = getattr(import_module(module), attribute)
            return upkeep
    return None
