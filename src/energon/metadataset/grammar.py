"""The grammar of metadatasets, versions 1 and 2, and of `.nv-meta/dataset.yaml`.

    document  = splits: {part: node}, vars?               with __class__: MetadatasetV2
    node      = reference | blend | blend_epochized | concat | join
    reference = path, and what narrows or names it; path leads to a dataset or another document
    blend     = blend: [node + weight …]
    epochized = blend_epochized: [node + repetitions …]
    concat    = concat: [node …]
    join      = join: [reference …] or {name: reference …}, joiner

    document  = splits: {part: {datasets: [reference + weight …]}}     version 1

Blends may be nested, which is equivalent to a reference to another document.

`__class__` decides between the versions; without it, the key `datasets` means version 1.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    PrivateAttr,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler

from energon.formats.meta.yaml import where
from energon.messages import nearest
from energon.metadataset.leaf import Subset
from energon.plan.blends.curve import Point
from energon.plan.leaves.subset import resolve_range

MAX_AMOUNT = 1e15
"""The largest weight, number of tokens or of epochs: far above any in use, and far below the limits
of the arithmetic of the plan."""

_RAMP = re.compile(r"ramp\s+to\s+([0-9.][0-9._eE+-]*)")


def _multiplier(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("expected a number of epochs, -1 (with replacement) or null (in order)")
    if value > MAX_AMOUNT:
        raise ValueError(f"expected at most {MAX_AMOUNT:g} epochs")
    return value


def _range(bounds: Any) -> Subset:
    if (
        not isinstance(bounds, list)
        or [type(bound) in (int, str) for bound in bounds] != [True] * 2
    ):
        raise ValueError('expected [start, stop], like [0, 1000] or ["10%", "50%"]')
    start, stop = bounds
    numbers = [bound for bound in bounds if type(bound) is int]
    if start == "end" or numbers != sorted(numbers) or min(numbers, default=0) < 0:
        raise ValueError("expected 0 <= start <= stop")
    resolve_range(max(numbers, default=0), [(start, stop)])
    return start, stop


def _aux_name(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("becomes an argument of cookers, so it must be a Python name")
    return name


def _temperature(value: float) -> float:
    if value > 1:
        raise ValueError(
            "sizes are raised to the power of it, so 1 is in proportion to sizes and 0 is even; "
            f"where another tool takes 1/{value:g} of it, write {1 / value:.3g}"
        )
    return value


def _schedule(raw: Mapping[Any, Any]) -> tuple[Point, ...]:
    points = sorted(_point(position, value) for position, value in raw.items())
    if not points or points[0].position != 0:
        raise ValueError("expected the weight at the beginning, as in {0: 5, 100_000: 2}")
    if points[0].ramp:
        raise ValueError("there is no weight before 0 to ramp from; give 0 a number")
    if not points[-1].value and not any(point.value for point in points):
        raise ValueError("is always 0; remove the entry, or set `weight: 0`")
    return tuple(points)


def _point(position: Any, value: Any) -> Point:
    if not _is_finite(position) or position < 0:
        raise ValueError(f"{position!r} is not a position; expected a number from 0, like 100_000")
    if position != int(position):
        raise ValueError(f"position {position!r} is not a whole number")
    if position > MAX_AMOUNT:
        raise ValueError(f"position {position!r} is not reached by any run; at most {MAX_AMOUNT:g}")
    ramp = _RAMP.fullmatch(value.strip()) if isinstance(value, str) else None
    number: Any = _float(ramp[1]) if ramp else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f'{value!r} at {position}; expected a number or "ramp to NUMBER"')
    if not (_is_finite(number) and 0 <= number <= MAX_AMOUNT):
        raise ValueError(
            f"{value!r} at {position}; expected a finite number from 0 to {MAX_AMOUNT:g}"
        )
    return Point(int(position), float(number), ramp is not None)


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _weight_tag(raw: Any) -> str:
    if isinstance(raw, Mapping):
        return "<schedule>"
    return "<auto>" if raw == "auto" else "<number>"


Path = Annotated[
    str, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)
]
AuxName = Annotated[str, AfterValidator(_aux_name)]
Multiplier = Annotated[int, AfterValidator(_multiplier)]
Amount = Annotated[float, Field(ge=0, le=MAX_AMOUNT)]
Positive = Annotated[float, Field(gt=0, le=MAX_AMOUNT)]
Temperature = Annotated[float, Field(ge=0), AfterValidator(_temperature)]
Range = Annotated[
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
]
Schedule = Annotated[
    tuple[Point, ...],
    PlainValidator(_schedule),
    WithJsonSchema(
        {
            "type": "object",
            "description": "Weights by position; `ramp to N` gets there evenly",
            "patternProperties": {
                "^[0-9][0-9_.eE+]*$": {
                    "anyOf": [
                        {"type": "number", "minimum": 0},
                        {"type": "string", "pattern": "^ramp +to +[0-9.]"},
                    ]
                }
            },
            "required": ["0"],
            "additionalProperties": False,
            "examples": [{"0": 5, "100000": 2, "200000": "ramp to 0"}],
        }
    ),
]
Weight = Annotated[
    Annotated[Amount, Tag("<number>")]
    | Annotated[Schedule, Tag("<schedule>")]
    | Annotated[Literal["auto"], Tag("<auto>")],
    Discriminator(_weight_tag),
]


class Misfit(ValueError):
    """Values of a node contradict each other.

    Args:
        problems: Each as `file:line:column: message`.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Node(BaseModel):
    """Base of all mappings in a document. Knows its location."""

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
        """Yield contradictions in this mapping, with their locations."""
        return iter(())

    def where(self, key: str | None = None) -> str:
        """Return `file:line:column` of this mapping, or of one of its keys."""
        return where(self._raw, key)


class SubsetNode(Node):
    """`subset`: a part of the samples."""

    bounds: Annotated[Range, Field(alias="range")]


class Inner(Node):
    """The keys of every node, which apply to all leaves below it."""

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
    read: dict[str, Any] = Field(default_factory=dict)


class JoinReference(Reference):
    """A member of a join."""

    nonmatch: Literal["error", "skip", "none"] = "error"


class Joiner(Node):
    """What joins the samples of a join: a sample class or a function."""

    module: str = Field(alias="__module__")
    class_: str | None = Field(default=None, alias="__class__")
    function: str | None = Field(default=None, alias="__function__")


class Weighted(Node):
    """Additional keys of the entries of a blend."""

    weight: Weight = 1.0
    max_epochs: Positive | None = None
    tokens: Positive | None = None


_OF_THE_JOIN = ("shuffle_over_epochs_multiplier",)


def blend_problems(node: Node, entries: Sequence[Weighted]) -> Iterator[str]:
    """Yield contradictions in the weights of a blend."""
    derived = [entry for entry in entries if entry.weight == "auto"]
    given = [entry for entry in entries if entry.weight != "auto"]
    if derived and given:
        yield (
            f"{derived[0].where('weight')}: weights from sizes cannot be compared with the number "
            f"in {given[0].where('weight')}; write `weight: auto` in all entries, or in none. "
            "Groups of both kinds can be nested"
        )
    if not derived and "temperature" in node.model_fields_set:
        yield (
            f"{node.where('temperature')}: a temperature is for weights that come from sizes; "
            "write `weight: auto` in the entries, or drop it"
        )
    yield from _token_problems(entries, is_derived=bool(derived))


def _token_problems(entries: Sequence[Weighted], *, is_derived: bool) -> Iterator[str]:
    sized = [entry for entry in entries if entry.tokens is not None]
    unsized = [entry for entry in entries if entry.tokens is None]
    if sized and not is_derived:
        yield (
            f"{sized[0].where('tokens')}: tokens only count for `weight: auto`; write that, or "
            "drop them"
        )
    elif sized and unsized:
        yield (
            f"{unsized[0].where()}: has no tokens, but {sized[0].where('tokens')} has; sizes are "
            "compared in tokens or in samples, so give them for all entries or for none"
        )


def join_problems(node: Node, members: Sequence[JoinReference], joiner: Joiner) -> Iterator[str]:
    """Yield the problems of a join."""
    if not members:
        yield f"{node.where('join')}: joins no datasets; expected one or more"
    if (joiner.class_ is None) == (joiner.function is None):
        yield (
            f"{node.where('joiner')}: expected a __module__, and a __class__ (a sample type) or "
            "a __function__"
        )
    if members and members[0].nonmatch != "error":
        yield (
            f"{members[0].where('nonmatch')}: the first dataset decides which samples there are, "
            "so none is missing from it; drop `nonmatch` here"
        )
    for member in members:
        yield from _member_problems(node, member)


def _member_problems(node: Node, member: JoinReference) -> Iterator[str]:
    for key in _OF_THE_JOIN:
        if key in member.model_fields_set:
            yield (
                f"{member.where(key)}: the samples of a join have one order; set {key} beside "
                f"`join` in {node.where()}"
            )


NODE_KINDS = ("path", "blend", "blend_epochized", "concat", "join")


class Blend(Inner):
    """Samples drawn by weight."""

    blend: list[WeightedNode]
    unit: Literal["sample", "batch"] | None = None
    schedule_unit: Literal["samples", "batches", "rows"] = "samples"
    temperature: Temperature = 1.0
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"

    def problems(self) -> Iterator[str]:
        return blend_problems(self, self.blend)


class EpochizedBlend(Inner):
    """Samples that come a number of times in each epoch."""

    blend_epochized: list[RepeatedNode]


class Concat(Inner):
    """Datasets concatenated to one."""

    concat: list[AnyNode]


class Join(Inner):
    """Samples of several datasets, joined by key."""

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
        members = self.join.values() if isinstance(self.join, dict) else self.join
        return join_problems(self, list(members), self.joiner)


class Repeated(Node):
    """Additional keys of the entries of an epochized blend."""

    repetitions: Positive = 1.0


class WeightedReference(Weighted, Reference):
    """A reference in a blend."""


class WeightedBlend(Weighted, Blend):
    """A blend in a blend."""


class WeightedEpochizedBlend(Weighted, EpochizedBlend):
    """An epochized blend in a blend: one source, whose samples are mixed by repetitions."""


class WeightedConcat(Weighted, Concat):
    """Concatenated datasets in a blend: one source."""


class WeightedJoin(Weighted, Join):
    """A join in a blend."""


class RepeatedReference(Repeated, Reference):
    """A reference in an epochized blend."""


class RepeatedBlend(Repeated, Blend):
    """Accepted by the grammar only to be refused with both locations named."""


class RepeatedEpochizedBlend(Repeated, EpochizedBlend):
    """An epochized blend in an epochized blend."""


class RepeatedConcat(Repeated, Concat):
    """Datasets in an epochized blend that are repeated together."""


class RepeatedJoin(Repeated, Join):
    """A join in an epochized blend."""


MAX_LISTED_KEYS = 20
"""Keys that reveal which kind of node was intended."""


def _tag_of(raw: Any) -> str | None:
    if not isinstance(raw, Mapping):
        return None
    for kind in NODE_KINDS:
        if kind in raw:
            return f"<{kind}>"
    close = filter(None, (nearest(key, NODE_KINDS, 0.75) for key in islice(raw, MAX_LISTED_KEYS)))
    return f"<{next(close, 'path')}>"


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


class ReferenceV1(Node):
    """An entry of a metadataset of version 1."""

    path: Path
    weight: Amount = 1.0
    split_part: str | None = None
    subflavor: str | None = None
    subflavors: dict[str, Any] = Field(default_factory=dict)
    shuffle_over_epochs_multiplier: Multiplier | None = 1
    dataset_config: str | None = None
    split_config: str | None = None

    def as_reference(self) -> WeightedReference:
        """Return the equivalent entry of version 2."""
        fields = {name: getattr(self, name) for name in self.model_fields_set - {"subflavor"}}
        if self.subflavor is not None:
            fields["subflavors"] = {"__subflavor__": self.subflavor, **self.subflavors}
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


Count = Annotated[int, Field(ge=1)]


class ClassName(Node):
    """A Python class."""

    module: str = Field(alias="__module__")
    class_: str = Field(alias="__class__")


class DatasetDocument(Node):
    """How the parts of a dataset become samples, and the defaults for reading them."""

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
