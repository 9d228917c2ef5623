"""What may be written in a metadataset.

    document  = splits: {part: node}                   with __class__: MetadatasetV2
    node      = reference | blend | blend_epochized | join
    reference = path, and what narrows or names it; path leads to a dataset or another document
    blend     = blend: [node + weight …]
    epochized = blend_epochized: [node + repetitions …]

    document  = splits: {part: {datasets: [reference + weight …]}}           version 1

Blends may be nested in place, which says the same as a reference to a document of its own.
Of the two versions, `__class__` decides; where it is absent, the word `datasets` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    Tag,
    WithJsonSchema,
    model_validator,
)

from energon.formats.yaml import where
from energon.metadataset.leaf import Subset
from energon.plan.subset import resolve_range

MODULES = ("megatron.energon", "energon")
NODE_KINDS = ("path", "blend", "blend_epochized", "join")


class Node(BaseModel):
    """Base of all mappings in a document. Knows where it was written."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    _raw: Any = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _remember(cls, raw: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        node = handler(raw)
        node._raw = raw
        return node

    def where(self, key: str | None = None) -> str:
        """Return `file:line` of this mapping, or of one of its keys."""
        return where(self._raw, key)


def _multiplier(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("wanted is a number of epochs, -1 (with replacement) or null (in order)")
    return value


def _range(bounds: Any) -> Subset:
    if (
        not isinstance(bounds, list)
        or [type(bound) in (int, str) for bound in bounds] != [True] * 2
    ):
        raise ValueError('wanted is [start, stop], like [0, 1000] or ["10%", "50%"]')
    start, stop = bounds
    numbers = [bound for bound in bounds if type(bound) is int]
    if start == "end" or numbers != sorted(numbers) or min(numbers, default=0) < 0:
        raise ValueError("does not go up from 0 or more")
    resolve_range(max(numbers, default=0), [(start, stop)])
    return start, stop


def _aux_name(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("becomes an argument of cookers, so it must be a Python name")
    return name


Path = Annotated[
    str, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)
]
Multiplier = Annotated[int, AfterValidator(_multiplier)]


class SubsetNode(Node):
    """`subset`: a part of the samples."""

    bounds: Annotated[
        Subset,
        PlainValidator(_range),
        WithJsonSchema(
            {
                "type": "array",
                "items": {"type": ["integer", "string"]},
                "minItems": 2,
                "maxItems": 2,
                "examples": [["10%", "50%"], [0, 1000], [1000, "end"]],
            }
        ),
        Field(alias="range"),
    ]


class Inner(Node):
    """What every node may say of all the leaves below it."""

    subset: SubsetNode | None = None
    subflavors: dict[str, Any] = Field(default_factory=dict)
    shuffle_over_epochs_multiplier: Multiplier | None = 1


class Reference(Inner):
    """A dataset, or another document."""

    path: Path
    split_part: str | None = None
    dataset_config: str | None = None
    split_config: str | None = None
    aux: dict[Annotated[str, AfterValidator(_aux_name)], Path] = Field(default_factory=dict)


class Blend(Inner):
    """Samples drawn by weight, without end."""

    blend: list[WeightedNode]


class EpochizedBlend(Inner):
    """Samples that come a number of times in each epoch."""

    blend_epochized: list[RepeatedNode]


class JoinReference(Reference):
    """A member of a join."""

    nonmatch: Literal["error", "skip", "none"] = "error"


class Joiner(Node):
    """What puts the members of a join together: a sample class or a function."""

    module: str = Field(alias="__module__")
    class_: str | None = Field(default=None, alias="__class__")
    function: str | None = Field(default=None, alias="__function__")


class Join(Inner):
    """Samples of several datasets that have the same key, put together."""

    join: Annotated[
        Annotated[list[JoinReference], Tag("<list>")]
        | Annotated[dict[str, JoinReference], Tag("<mapping>")],
        Discriminator(lambda raw: "<mapping>" if isinstance(raw, Mapping) else "<list>"),
    ]
    joiner: Joiner
    split_part: str | None = None
    dataset_config: str | None = None
    split_config: str | None = None


class Weighted(Node):
    """What entries of a blend say besides."""

    weight: Annotated[float, Field(ge=0)] = 1.0


class Repeated(Node):
    """What entries of an epochized blend say besides."""

    repetitions: Annotated[float, Field(gt=0)] = 1.0


class WeightedReference(Weighted, Reference):
    """A reference in a blend."""


class WeightedBlend(Weighted, Blend):
    """A blend in a blend."""


class WeightedEpochizedBlend(Weighted, EpochizedBlend):
    """Understood, so that it can be refused with both places named."""


class WeightedJoin(Weighted, Join):
    """A join in a blend."""


class RepeatedReference(Repeated, Reference):
    """A reference in an epochized blend."""


class RepeatedBlend(Repeated, Blend):
    """Understood, so that it can be refused with both places named."""


class RepeatedEpochizedBlend(Repeated, EpochizedBlend):
    """An epochized blend in an epochized blend."""


class RepeatedJoin(Repeated, Join):
    """A join in an epochized blend."""


def _tag_of(raw: Any) -> str | None:
    if not isinstance(raw, Mapping):
        return None
    for kind in NODE_KINDS:
        if kind in raw:
            return f"<{kind}>"
    close = [kind for key in raw for kind in get_close_matches(str(key), NODE_KINDS, 1, 0.75)]
    return f"<{close[0] if close else 'path'}>"


AnyNode = Annotated[
    Annotated[Reference, Tag("<path>")]
    | Annotated[Blend, Tag("<blend>")]
    | Annotated[EpochizedBlend, Tag("<blend_epochized>")]
    | Annotated[Join, Tag("<join>")],
    Discriminator(_tag_of),
]
WeightedNode = Annotated[
    Annotated[WeightedReference, Tag("<path>")]
    | Annotated[WeightedBlend, Tag("<blend>")]
    | Annotated[WeightedEpochizedBlend, Tag("<blend_epochized>")]
    | Annotated[WeightedJoin, Tag("<join>")],
    Discriminator(_tag_of),
]
RepeatedNode = Annotated[
    Annotated[RepeatedReference, Tag("<path>")]
    | Annotated[RepeatedBlend, Tag("<blend>")]
    | Annotated[RepeatedEpochizedBlend, Tag("<blend_epochized>")]
    | Annotated[RepeatedJoin, Tag("<join>")],
    Discriminator(_tag_of),
]


class Document(Node):
    """A metadataset."""

    module: Literal["megatron.energon", "energon"] | None = Field(None, alias="__module__")
    class_: Literal["MetadatasetV2"] | None = Field(None, alias="__class__")
    splits: dict[str, AnyNode | None]


class ReferenceV1(Weighted):
    """An entry of a metadataset of version 1."""

    path: Path
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


for _model in (
    *(Blend, WeightedBlend, RepeatedBlend),
    *(EpochizedBlend, WeightedEpochizedBlend, RepeatedEpochizedBlend),
):
    _model.model_rebuild()  # their entries are declared below them
