"""What the nodes of a document are made of: those that hold no other nodes than references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from energon.formats.meta.yaml import where
from energon.metadataset.grammar_values import AuxName, Multiplier, Path, Positive, Range, Weight


class Misfit(ValueError):
    """Values of a node do not go together.

    Args:
        problems: Each as `file:line:column: message`.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


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
    read: dict[str, Any] = Field(default_factory=dict)


class JoinReference(Reference):
    """A member of a join."""

    nonmatch: Literal["error", "skip", "none"] = "error"


class Joiner(Node):
    """What puts the members of a join together: a sample class or a function."""

    module: str = Field(alias="__module__")
    class_: str | None = Field(default=None, alias="__class__")
    function: str | None = Field(default=None, alias="__function__")


class Weighted(Node):
    """What entries of a blend say besides."""

    weight: Weight = 1.0
    max_epochs: Positive | None = None
    tokens: Positive | None = None
