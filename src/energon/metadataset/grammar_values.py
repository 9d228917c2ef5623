"""The values and nodes of documents."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
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
    """Base of all mappings in a document. Knows its place."""

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
        """Yield contradictions in this mapping, with their places."""
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
