"""How a dataset is to be prepared, as far as it is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from energon.prepare.describe import CRUDE
from energon.prepare.splits import SplitRequest


@dataclass(frozen=True)
class Choices:
    """How a dataset is to be prepared. None and nothing stand for what is to be asked.

    Args:
        split: How it is split.
        split_settings: All about it that is not asked: unit, shuffle, exclude_from.
        sample_type: What samples become.
        field_map: How parts become fields.
        sample_loader: Code that makes samples instead.
        describe: Whether to write dataset.yaml at all.
        dataset_yaml_name: What it is called.
        write: Whether to write everything without asking.
    """

    split: SplitRequest | None = None
    split_settings: Mapping[str, Any] = field(default_factory=dict)
    sample_type: str | None = None
    field_map: Mapping[str, str] | None = None
    sample_loader: str | None = None
    describe: bool = True
    dataset_yaml_name: str = "dataset.yaml"
    write: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing to ask."""
        if self.split is None:
            return False
        made = self.field_map is not None or self.sample_loader is not None
        return not self.describe or self.sample_type == CRUDE or bool(self.sample_type and made)
