"""What may be written in a metadataset.

    document  = splits: {part: node}, vars?               with __class__: MetadatasetV2
    node      = reference | blend | blend_epochized | concat | join
    reference = path, and what narrows or names it; path leads to a dataset or another document
    blend     = blend: [node + weight …]
    epochized = blend_epochized: [node + repetitions …]
    concat    = concat: [node …]
    join      = join: [reference …] or {name: reference …}, joiner

    document  = splits: {part: {datasets: [reference + weight …]}}     version 1, grammar_v1.py

Blends may be nested in place, which says the same as a reference to a document of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler

from energon.formats.yaml import where
from energon.metadataset.checks import Misfit, blend_problems, join_problems
from energon.metadataset.grammar_values import (
    AuxName,
    Multiplier,
    Path,
    Positive,
    Range,
    Temperature,
    Weight,
)

MODULES = ("megatron.energon", "energon")
NODE_KINDS = ("path", "blend", "blend_epochized", "concat", "join")


class Node(BaseModel):
    """Base of all mappings in a document. Knows where it was written."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    _raw: Any = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _remember(cls, raw: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        node = handler(raw)
        node._raw = raw
        if problems := [*node.problems()]:
            raise Misfit(problems)
        return node

    def problems(self) -> Iterator[str]:
        """Yield what does not go together in this mapping, with the places of it."""
        return iter(())

    def where(self, key: str | None = None) -> str:
        """Return `file:line:column` of this mapping, or of one of its keys."""
        return where(self._raw, key)


class SubsetNode(Node):
    """`subset`: a part of the samples."""

    bounds: Annotated[Range, Field(alias="range")]


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
    aux: dict[AuxName, Path] = Field(default_factory=dict)


class Blend(Inner):
    """Samples drawn by weight."""

    blend: list[WeightedNode]
    unit: Literal["sample", "batch"] | None = None
    schedule_unit: Literal["samples", "batches", "rows"] = "samples"
    temperature: Temperature = 1.0
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"

    def problems(self) -> Iterator[str]:
        return blend_problems(self)


class EpochizedBlend(Inner):
    """Samples that come a number of times in each epoch."""

    blend_epochized: list[RepeatedNode]


class Concat(Inner):
    """Datasets that are one, end to end."""

    concat: list[AnyNode]


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

    def problems(self) -> Iterator[str]:
        return join_problems(self)


class Weighted(Node):
    """What entries of a blend say besides."""

    weight: Weight = 1.0
    max_epochs: Positive | None = None
    tokens: Positive | None = None


class Repeated(Node):
    """What entries of an epochized blend say besides."""

    repetitions: Positive = 1.0


class WeightedReference(Weighted, Reference):
    """A reference in a blend."""


class WeightedBlend(Weighted, Blend):
    """A blend in a blend."""


class WeightedEpochizedBlend(Weighted, EpochizedBlend):
    """An epochized blend in a blend: one source, whose samples are mixed by repetitions."""


class WeightedConcat(Weighted, Concat):
    """Datasets in a blend that are one source."""


class WeightedJoin(Weighted, Join):
    """A join in a blend."""


class RepeatedReference(Repeated, Reference):
    """A reference in an epochized blend."""


class RepeatedBlend(Repeated, Blend):
    """Understood, so that it can be refused with both places named."""


class RepeatedEpochizedBlend(Repeated, EpochizedBlend):
    """An epochized blend in an epochized blend."""


class RepeatedConcat(Repeated, Concat):
    """Datasets in an epochized blend that are repeated together."""


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
    | Annotated[Concat, Tag("<concat>")]
    | Annotated[Join, Tag("<join>")],
    Discriminator(_tag_of),
]
WeightedNode = Annotated[
    Annotated[WeightedReference, Tag("<path>")]
    | Annotated[WeightedBlend, Tag("<blend>")]
    | Annotated[WeightedEpochizedBlend, Tag("<blend_epochized>")]
    | Annotated[WeightedConcat, Tag("<concat>")]
    | Annotated[WeightedJoin, Tag("<join>")],
    Discriminator(_tag_of),
]
RepeatedNode = Annotated[
    Annotated[RepeatedReference, Tag("<path>")]
    | Annotated[RepeatedBlend, Tag("<blend>")]
    | Annotated[RepeatedEpochizedBlend, Tag("<blend_epochized>")]
    | Annotated[RepeatedConcat, Tag("<concat>")]
    | Annotated[RepeatedJoin, Tag("<join>")],
    Discriminator(_tag_of),
]


class Document(Node):
    """A metadataset."""

    module: Literal["megatron.energon", "energon"] | None = Field(None, alias="__module__")
    class_: Literal["MetadatasetV2"] | None = Field(None, alias="__class__")
    splits: dict[str, AnyNode | None]
    vars: dict[str, Any] = Field(default_factory=dict)


for _model in (
    *(Blend, WeightedBlend, RepeatedBlend),
    *(EpochizedBlend, WeightedEpochizedBlend, RepeatedEpochizedBlend),
    *(Concat, WeightedConcat, RepeatedConcat),
):
    _model.model_rebuild()  # their entries are declared below them
