"""What may be written in `.nv-meta/dataset.yaml`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from energon.metadataset.grammar_values import Multiplier, Node, SubsetNode

Count = Annotated[int, Field(ge=1)]


class ClassName(Node):
    """A Python class."""

    module: str = Field(alias="__module__")
    class_: str = Field(alias="__class__")


class DatasetDocument(Node):
    """How the parts of a dataset become samples, and how they are read by default."""

    module: str | None = Field(None, alias="__module__")
    class_: str | None = Field(None, alias="__class__")
    sample_type: ClassName | None = None
    field_map: dict[str, str] | None = None
    sample_loader: str | None = None
    part_filter: (
        Annotated[
            Annotated[list[str], Tag("<list>")] | Annotated[str, Tag("<text>")],
            Discriminator(lambda raw: "<list>" if isinstance(raw, list) else "<text>"),
        ]
        | None
    ) = None
    subflavors: dict[str, Any] = Field(default_factory=dict)
    split_config: str | None = None
    split_part: str | None = None
    shuffle_over_epochs: Multiplier | None = 1
    parallel_shard_iters: Count | None = None
    max_samples_per_sequence: Count | None = None
    subset: SubsetNode | None = None
    decoder: dict[str, Any] | None = None
