"""What a blend says about shares, checked and in the terms of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from energon.errors import ConfigError
from energon.metadataset.tree import BlendTree, LineTree, Tree, Weighted
from energon.plan.curve import Clock, Curve, Unit

if TYPE_CHECKING:
    from energon.metadataset.grammar import Blend
    from energon.metadataset.grammar_nodes import Weighted as WeightedNode


def weight_curve(entry: WeightedNode, unit: Unit) -> Curve | None:
    """Return the weight of an entry over a run; None if it depends on sizes."""
    if entry.weight == "auto":
        return None
    if isinstance(entry.weight, tuple):
        return Curve(entry.weight, unit)
    return Curve.constant(float(entry.weight))


def check_never_zero(node: Blend, place: str) -> None:
    """Raise ConfigError if at some time nothing in a blend has a weight."""
    if any(entry.weight == "auto" for entry in node.blend):
        return
    curves = [curve for entry in node.blend if (curve := weight_curve(entry, node.schedule_unit))]
    clock = Clock(1, 1)
    for row in sorted({0, *(row for curve in curves for row in curve.knots(clock))}):
        if not any(curve.mean(row, row + 1, clock) for curve in curves):
            scheduled = any(not curve.is_constant for curve in curves)
            since = f" from position {row} on" if scheduled else ""
            raise ConfigError(f"{place}: all weights of the blend are 0{since}")


def check_line(trees: Sequence[Tree], word: str, place: str) -> None:
    """Raise ConfigError if a blend by weights, which has no end, lies in a line."""
    for blend in _blends(trees):
        raise ConfigError(
            f"{blend.place}: blend below the {word} of {place}; a blend by weights has no length, "
            "so it cannot be repeated or laid end to end. Nest them the other way round, or use "
            "blend_epochized"
        )


def check_units(unit: str | None, entries: Sequence[Weighted], place: str) -> None:
    """Raise ConfigError if a nested blend draws other units than the one around it."""
    for blend in _blends([entry.tree for entry in entries]):
        if blend.unit is not None and blend.unit != unit:
            outer = "draws what the call says" if unit is None else f"draws by {unit}"
            raise ConfigError(
                f"{blend.place}: draws by {blend.unit}, but the blend of {place} around it "
                f"{outer}; the unit holds for a whole run, set it in the outermost blend"
            )


def _blends(trees: Sequence[Tree]) -> Iterator[BlendTree]:
    for tree in trees:
        if isinstance(tree, BlendTree):
            yield tree
            yield from _blends([entry.tree for entry in tree.entries])
        elif isinstance(tree, LineTree):
            yield from _blends(tree.children)
