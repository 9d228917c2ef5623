"""What a blend says about shares, checked and in the terms of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
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
    changes = {0: 0}
    scheduled = False
    for curve in (weight_curve(entry, node.schedule_unit) for entry in node.blend):
        if curve is not None:
            scheduled |= not curve.is_constant
            for row, change in _changes(curve):
                changes[row] = changes.get(row, 0) + change
    positive = 0
    for row in sorted(changes):
        positive += changes[row]
        if not positive:
            since = f" from position {row} on" if scheduled else ""
            raise ConfigError(f"{place}: all weights of the blend are 0{since}")


def _changes(curve: Curve) -> Iterator[tuple[int, int]]:
    """Yield the rows at which a curve rises from 0 (1) or falls to it (-1)."""
    was_positive = False
    for point, after in zip_longest(curve.points, curve.points[1:]):
        ramps = after is not None and after.ramp and after.value > 0
        is_positive = point.value > 0 or ramps
        if is_positive != was_positive:
            yield Clock(1, 1).row(point.position, curve.unit), 1 if is_positive else -1
        was_positive = is_positive


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
