"""What may be written in a metadataset of version 1.

Of the two versions, `__class__` decides; where it is absent, the word `datasets` does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from energon.metadataset.grammar import WeightedReference
from energon.metadataset.grammar_nodes import Node
from energon.metadataset.grammar_values import Multiplier, Path


class ReferenceV1(Node):
    """An entry of a metadataset of version 1."""

    path: Path
    weight: Annotated[float, Field(ge=0)] = 1.0
    split_part: str | None = None
    subflavor: str | None = None
    subflavors: dict[str, Any] = Field(default_factory=dict)
    shuffle_over_epochs_multiplier: Multiplier | None = 1
    dataset_config: str | None = None
    split_config: str | None = None

    def as_reference(self) -> WeightedReference:
        """Return the same in the words of version 2."""
        fields = {name: getattr(self, name) for name in self.model_fields_set - {"subflavor"}}
        if self.subflavor is not None:
            fields["subflavors"] = {**self.subflavors, "__subflavor__": self.subflavor}
        reference = WeightedReference.model_construct(**fields)
        reference._raw = self._raw
        return reference


class SplitV1(Node):
    """A split of a metadataset of version 1: a blend."""

    datasets: list[ReferenceV1]


class DocumentV1(Node):
    """A metadataset of version 1."""

    module: Literal["megatron.energon", "energon"] | None = Field(None, alias="__module__")
    class_: Literal["Metadataset"] | None = Field(None, alias="__class__")
    splits: dict[str, SplitV1 | None]
    vars: dict[str, Any] = Field(default_factory=dict)
