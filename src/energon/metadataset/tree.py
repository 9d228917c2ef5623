"""How the leaves of a split are mixed: as a tree, and as sources with their shares.

A *source* is what a blend draws from: a leaf, or leaves that form one line (`concat`,
`blend_epochized`). A split that is not a blend is one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from energon.errors import ConfigError
from energon.metadataset.leaf import BlendMode, Leaf, LeafList
from energon.plan.blends.curve import Clock, Curve, CurveUnit
from energon.plan.blends.mix import Mix, MixEntry

if TYPE_CHECKING:
    from energon.metadataset.grammar import Blend
    from energon.metadataset.grammar_values import Weighted


def weight_curve(entry: Weighted, unit: CurveUnit) -> Curve | None:
    """Return the weight of an entry over a run; None if it depends on sizes."""
    if entry.weight == "auto":
        return None
    if isinstance(entry.weight, tuple):
        return Curve(entry.weight, unit)
    return Curve.constant(float(entry.weight))


def check_never_zero(node: Blend, place: str) -> None:
    """Raise ConfigError if all weights of a blend are 0 at some time."""
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
    """Raise ConfigError if a line contains a blend by weights, which has no end."""
    for blend in _blends(trees):
        raise ConfigError(
            f"{blend.place}: blend below the {word} of {place}; a weighted blend has no length, "
            "so it cannot be repeated or concatenated. Nest them the other way round, or use "
            "blend_epochized"
        )


def check_units(unit: str | None, entries: Sequence[WeightedTree], place: str) -> None:
    """Raise ConfigError if a nested blend draws by another unit than the one around it."""
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


@dataclass(frozen=True)
class LeafTree:
    """A leaf."""

    leaf: Leaf


@dataclass(frozen=True)
class LineTree:
    """Concatenated leaves, each repeated as often as its repetitions say.

    Args:
        children: Leaves and lines.
        word: Its key in the document.
        place: Where it was written.
    """

    children: tuple[Tree, ...]
    word: str
    place: str


@dataclass(frozen=True)
class WeightedTree:
    """An entry of a blend; see `energon.plan.blends.mix.Entry`."""

    tree: Tree
    weight: Curve | None
    max_epochs: float | None = None
    size: float | None = None


@dataclass(frozen=True)
class BlendTree:
    """A blend.

    Args:
        entries: At least one.
        place: Where it was written.
        unit: Whether samples or whole batches are drawn; None leaves it to the call.
        stop_at_first: Whether it ends with the first entry that is used up.
        exponent: Exponent of the sizes that weights are derived from.
    """

    entries: tuple[WeightedTree, ...]
    place: str
    unit: Literal["sample", "batch"] | None = None
    stop_at_first: bool = False
    exponent: float = 1.0


Tree = LeafTree | LineTree | BlendTree


def leaves_of(tree: Tree) -> Iterator[Leaf]:
    """Yield the leaves of a tree, in order."""
    match tree:
        case LeafTree(leaf):
            yield leaf
        case LineTree(children):
            for child in children:
                yield from leaves_of(child)
        case BlendTree(entries):
            for entry in entries:
                yield from leaves_of(entry.tree)


def map_leaves(tree: Tree, change: Callable[[Leaf], Leaf]) -> Tree:
    """Return the tree with changed leaves."""
    match tree:
        case LeafTree(leaf):
            return LeafTree(change(leaf))
        case LineTree(children):
            return replace(tree, children=tuple(map_leaves(each, change) for each in children))
        case BlendTree(entries):
            changed = (replace(each, tree=map_leaves(each.tree, change)) for each in entries)
            return replace(tree, entries=tuple(changed))


def source_leaves(tree: Tree) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the leaves of each source."""
    sizes = [sum(1 for _ in leaves_of(source)) for source in _sources(tree)]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(
        tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)
    )


def mix_of(tree: Tree) -> Mix:
    """Return the shares of the sources; a tree that is not a blend is the only source."""
    if isinstance(tree, BlendTree):
        return _mix(tree, iter(range(sum(1 for _ in _sources(tree)))))
    return Mix.flat([1.0])


def _mix(tree: BlendTree, numbers: Iterator[int]) -> Mix:
    entries = tuple(
        MixEntry(
            _mix(entry.tree, numbers) if isinstance(entry.tree, BlendTree) else next(numbers),
            entry.weight,
            entry.max_epochs,
            entry.size,
        )
        for entry in tree.entries
    )
    return Mix(entries, tree.stop_at_first, tree.exponent)


def _sources(tree: Tree) -> Iterator[Tree]:
    if isinstance(tree, BlendTree):
        for entry in tree.entries:
            yield from _sources(entry.tree)
    else:
        yield tree


def leaf_list(tree: Tree, *, training: bool) -> LeafList:
    """Return the leaves of a tree with how they are mixed, for training or for validation."""
    leaves = tuple(leaves_of(tree))
    if not training:
        return LeafList(leaves, BlendMode.NONE, (tuple(range(len(leaves))),), Mix.flat([1.0]))
    mode = BlendMode.NONE
    if isinstance(tree, BlendTree):
        mode = BlendMode.DATASET_WEIGHT
        leaves = tuple(_with_share(tree, leaves))
    elif isinstance(tree, LineTree):
        mode = BlendMode.SAMPLE_REPETITIONS
    unit = tree.unit if isinstance(tree, BlendTree) else None
    return LeafList(leaves, mode, source_leaves(tree), mix_of(tree), unit)


def _with_share(tree: BlendTree, leaves: Sequence[Leaf]) -> Iterator[Leaf]:
    """Yield the leaves with their initial shares, if sizes do not affect them."""
    mix = mix_of(tree)
    shares = None if mix.is_derived else mix.shares(0, 1, Clock(1, 1), ())
    if shares is None and not mix.is_derived:
        raise ConfigError(f"{tree.place}: all weights of the blend are 0 at the beginning")
    for number, source in enumerate(source_leaves(tree)):
        for leaf in source:
            share = None if shares is None else shares[number]
            yield replace(leaves[leaf], weight=share)
