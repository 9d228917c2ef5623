"""Follow one split of a metadataset to its leaves.

Every node becomes a branch: its leaves, and how they are mixed. It combines its settings with those
of the leaves below it, innermost first:

    repetitions      product of the levels
    subflavors       outer ones over inner ones
    multiplier       null over all, then -1, else the product
    subset           a list, the innermost first; the arithmetic is in `energon.plan.leaves.subset`

A blend by weights mixes *sources* by their shares: a leaf, or leaves that form one line (`concat`,
`blend_epochized`). A split that is not a blend is one line.

Only the requested split is followed; the data of other splits need not exist.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Literal

from energon.errors import ConfigError, DatasetNotFoundError, EmptyDatasetError
from energon.formats.meta.info import find_split
from energon.formats.meta.yaml import plain, where
from energon.io.address import is_remote, shown_address
from energon.io.threads import CallsAhead
from energon.limits import METADATASET_NODES, SCHEDULE_POINTS, Limit, check_allow
from energon.local_file import working_folder
from energon.messages import nearest
from energon.metadataset.document import (
    BrokenMetadataset,
    Metadataset,
    Problems,
    parse_metadataset,
)
from energon.metadataset.kind import check_shard_list, dataset_kind, kind_entry
from energon.metadataset.leaf import (
    BlendMode,
    JoinMember,
    Leaf,
    LeafList,
    SampleJoiner,
    TraversedDatasetReference,
    absolute,
    absolute_aux,
    check_cycle,
    identity,
    narrow,
)
from energon.plan.blends.curve import Clock, Curve, CurveUnit
from energon.plan.blends.mix import Mix, MixEntry

if TYPE_CHECKING:
    from energon.metadataset.grammar import Blend, Inner, Join, Node, Reference, Weighted


def weight_curve(entry: Weighted, unit: CurveUnit) -> Curve | None:
    """Return the weight of an entry over a run; None if it depends on sizes."""
    if entry.weight == "auto":
        return None
    if isinstance(entry.weight, tuple):
        return Curve(entry.weight, unit)
    return Curve.constant(float(entry.weight))


def check_never_zero(node: Blend, location: str) -> None:
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
            raise ConfigError(f"{location}: all weights of the blend are 0{since}")


def _changes(curve: Curve) -> Iterator[tuple[int, int]]:
    """Yield the rows at which a curve rises from 0 (1) or falls to it (-1)."""
    was_positive = False
    for point, after in zip_longest(curve.points, curve.points[1:]):
        ramps = after is not None and after.ramp and after.value > 0
        is_positive = point.value > 0 or ramps
        if is_positive != was_positive:
            yield Clock(1, 1).row(point.position, curve.unit), 1 if is_positive else -1
        was_positive = is_positive


@dataclass(frozen=True)
class Branch:
    """What a node resolves to: leaves, and how they are mixed.

    Args:
        leaves: In the order of the document.
        mode: The kind of mix.
        mix: The shares of a blend by weights, whose sources are not numbered yet; None for a line
            of leaves, each repeated as often as its repetitions say.
        sizes: Number of leaves of each source of the mix.
        unit: Whether the blend draws samples or whole batches; None leaves it to the call.
        location: Where the blend was written.
        is_leaf: Whether the node names a dataset or a join itself, not through another document.
    """

    leaves: tuple[Leaf, ...]
    mode: BlendMode = BlendMode.NONE
    mix: Mix | None = None
    sizes: tuple[int, ...] = ()
    unit: Literal["sample", "batch"] | None = None
    location: str = ""
    is_leaf: bool = False

    def with_leaves(self, change: Callable[[Leaf], Leaf]) -> Branch:
        """Return the branch with changed leaves."""
        return replace(self, leaves=tuple(map(change, self.leaves)))


def check_line(branches: Sequence[Branch], word: str, location: str) -> None:
    """Raise ConfigError if a line contains a blend by weights, which has no end."""
    for branch in branches:
        if branch.mix is not None:
            raise ConfigError(
                f"{branch.location}: blend below the {word} of {location}; a weighted blend has no "
                "length, so it cannot be repeated or concatenated. Nest them the other way round, "
                "or use blend_epochized"
            )


def check_units(unit: str | None, branches: Sequence[Branch], location: str) -> None:
    """Raise ConfigError if a nested blend draws by another unit than the one around it."""
    for branch in branches:
        if branch.unit is not None and branch.unit != unit:
            outer = "draws what the call says" if unit is None else f"draws by {unit}"
            raise ConfigError(
                f"{branch.location}: draws by {branch.unit}, but the blend of {location} around it "
                f"{outer}; the unit holds for a whole run, set it in the outermost blend"
            )


def leaf_list(branch: Branch, *, training: bool) -> LeafList:
    """Return the leaves of a branch with how they are mixed, for training or for validation."""
    leaves, mix = branch.leaves, branch.mix
    if not training or mix is None:
        mode = branch.mode if training else BlendMode.NONE
        return LeafList(leaves, mode, (tuple(range(len(leaves))),), Mix.flat([1.0]))
    mix = _numbered(mix, count())
    shares = None if mix.is_derived else mix.shares(0, 1, Clock(1, 1), ())
    if shares is None and not mix.is_derived:
        raise ConfigError(f"{branch.location}: all weights of the blend are 0 at the beginning")
    edges = pairwise(accumulate(branch.sizes, initial=0))
    sources = tuple(tuple(range(start, stop)) for start, stop in edges)
    weighted = tuple(
        replace(leaves[leaf], weight=None if shares is None else shares[number])
        for number, source in enumerate(sources)
        for leaf in source
    )
    return LeafList(weighted, branch.mode, sources, mix, branch.unit)


def _numbered(mix: Mix, numbers: Iterator[int]) -> Mix:
    """Return a mix whose sources are numbered in the order of the document."""
    entries = (
        replace(
            entry,
            node=_numbered(entry.node, numbers) if isinstance(entry.node, Mix) else next(numbers),
        )
        for entry in mix.entries
    )
    return replace(mix, entries=tuple(entries))


DatasetPath = str | os.PathLike[str] | Mapping[str, Any]


def resolve(
    path: DatasetPath,
    *,
    split_part: str,
    training: bool = True,
    dataset_config: str | None = None,
    split_config: str | None = None,
    allow: Collection[str] = (),
    must_exist: bool = True,
) -> LeafList:
    """Return the leaves of split `split_part` of a dataset or metadataset.

    Args:
        path: A dataset of any kind, a metadataset, or the document of one; paths
            in a document without a file start from the working directory.
        split_part: The split. References may name another one for the nodes below them.
        training: False ignores weights and repetitions and concatenates the leaves.
        dataset_config: File below `.nv-meta` that describes samples, unless the metadataset
            names one; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits, unless the metadataset names
            one; None for split.yaml.
        allow: "env" permits references to environment variables.
        must_exist: False treats missing paths as datasets of shards.

    Raises:
        ConfigError: If documents are invalid; names all such locations and everything missing.
        SecurityError: If a document needs a permission that is not given.
        EmptyDatasetError: If the split exists but names no dataset.
        DatasetNotFoundError: If the only problem is missing paths; names all of them.
    """
    if not (isinstance(path, Mapping) or (isinstance(path, str | os.PathLike) and os.fspath(path))):
        raise ConfigError(
            f"path={path!r}: expected the folder of a dataset, the file of a metadataset, or its "
            "document as a dict"
        )
    check_allow(allow)
    walk = _Resolver(training, allow, must_exist)
    context = NodeContext(
        split_part, dataset_config or "dataset.yaml", split_config or "split.yaml", working_folder()
    )
    try:
        with walk.calls:
            branch = walk.whole(path, context)
        walk.problems.raise_all()
        leaves = leaf_list(branch, training=training)
        if isinstance(path, Mapping):
            return leaves
        read_from = {
            "path": shown_address(path),
            "split": split_part,
            "dataset_config": dataset_config,
            "split_config": split_config,
        }
        given = {name: value for name, value in read_from.items() if value is not None}
        return replace(leaves, read_from=given)
    except RecursionError as exc:
        raise ConfigError("documents are nested too deeply to be followed") from exc


def traverse_metadataset(
    path: DatasetPath,
    *,
    split_part: str,
    allow: Collection[str] = (),
    must_exist: bool = True,
) -> list[TraversedDatasetReference]:
    """Return the datasets in split `split_part` of a metadataset, without opening them.

    Args:
        path: The metadataset, or the document as a dict.
        split_part: The split.
        allow: "env" permits references to environment variables.
        must_exist: Whether the datasets have to exist, not only the documents.

    Raises:
        ConfigError: If a document is invalid.
        DatasetNotFoundError: If a dataset or document is missing.

    Example:
        >>> blend = {
        ...     "__module__": "megatron.energon",
        ...     "__class__": "MetadatasetV2",
        ...     "splits": {"train": {"path": "photos"}},
        ... }
        >>> found = traverse_metadataset(blend, split_part="train")
        >>> len(found), found[0].path.rpartition("/")[2]
        (1, 'photos')
    """
    leaves = resolve(
        path, split_part=split_part, training=False, allow=allow, must_exist=must_exist
    ).leaves
    return [
        TraversedDatasetReference(
            each.path, each.split_part, each.aux, {**each.subflavors, **outer}
        )
        for leaf in leaves
        for each, outer in leaf.datasets
    ]


_MAX_PROBLEMS = 100
"""The number reported at once: to explain each takes milliseconds."""


class _TooMuchError(Exception):
    """Ends the walk, while other problems are collected and the walk continues."""


_NOTHING = Branch((Leaf("", ""),), is_leaf=True)
"""Placeholder for an invalid node; lets resolution continue and collect further errors."""


@dataclass
class _Resolver:
    training: bool
    allow: Collection[str] = ()
    must_exist: bool = True
    problems: Problems = field(default_factory=Problems)
    documents: dict[str, Metadataset | BrokenMetadataset] = field(default_factory=dict)
    calls: CallsAhead = field(default_factory=CallsAhead)
    counts: Counter[Limit] = field(default_factory=Counter)
    branches: dict[tuple[str, ...], tuple[Branch, Counter[Limit]]] = field(default_factory=dict)
    """Splits of documents that were followed, each with its counts: documents that name others
    twice would double the work at each level."""

    def count(self, limit: Limit, node: Any, number: int = 1) -> None:
        """Count what documents expand to that refer to one another, maybe more than they contain.

        Raises:
            _TooMuchError: If it is beyond the limit.
        """
        self.counts[limit] += number
        if self.counts[limit] > limit.value:
            raise _TooMuchError(
                f"{node.where()}: beyond {limit.value:,} {limit.meaning}; {limit.hint}"
            )

    def collecting(self, branch: Callable[[], Branch], location: str = "") -> Branch:
        """Return a branch, or an empty one after collecting its problem, see `Problems.kept`."""
        with self.problems.kept(location):
            return branch()
        if len(self.problems) == _MAX_PROBLEMS:
            raise _TooMuchError(f"the rest was not read after {_MAX_PROBLEMS} problems")
        return _NOTHING

    def whole(self, path: DatasetPath, context: NodeContext) -> Branch:
        """Resolve all references of a call, as far as the limits allow."""
        with self.problems.kept():
            try:
                return self.collecting(lambda: self.start(path, context))
            except _TooMuchError as exc:
                raise ConfigError(str(exc)) from exc
        return _NOTHING

    def start(self, path: DatasetPath, context: NodeContext) -> Branch:
        """Return the branch of the path or document that a call names."""
        if isinstance(path, Mapping):
            return self.document(parse_metadataset(path, self.allow), context, origin="document")
        address = absolute(os.fspath(path), working_folder())
        return self.address(address, context, origin=address)

    def address(self, path: str, context: NodeContext, *, origin: str) -> Branch:
        """Return the branch of the dataset or document at `path`, which `origin` names."""
        at = "" if origin == path else f"{origin}: "
        try:
            kind = self.calls.result(path, dataset_kind, path)
            if not kind_entry(kind).has_samples:
                check_shard_list(path)
        except DatasetNotFoundError as exc:
            if self.must_exist or path.endswith((".yaml", ".yml")):
                raise DatasetNotFoundError(f"{at}{exc}") from exc
            kind = "webdataset"
        except ConfigError as exc:
            raise ConfigError(f"{at}{exc}") from exc
        if kind == "metadataset":
            return self.document(self.read(path), context, origin=origin)
        if not kind_entry(kind).has_samples:
            raise ConfigError(
                f"{at}{path} has no shards, only media metadata; it can be auxiliary data of "
                f"another dataset, as `aux: {{name: filesystem://{path}}}`"
            )
        leaf = Leaf(
            path=path,
            split_part=context.split_part,
            dataset_config=context.dataset_config,
            split_config=context.split_config,
            origin=origin,
            kind=kind,
        )
        return Branch((leaf,), is_leaf=True)

    def read(self, path: str) -> Metadataset | BrokenMetadataset:
        if path not in self.documents:
            self.documents[path] = parse_metadataset(path, self.allow)
        return self.documents[path]

    def document(
        self, document: Metadataset | BrokenMetadataset, context: NodeContext, *, origin: str
    ) -> Branch:
        """Return the branch of the split of `document` that `context` names."""
        if isinstance(document, BrokenMetadataset):
            self.problems.keep_broken(document, context.split_part)
            return _NOTHING
        part = context.split_part
        trail = (*context.trail, (identity(document.origin), part))
        check_cycle(trail, origin)
        splits, line = document.content.splits, document.content.where("splits")
        part = find_split(part, splits) or part
        if part not in splits:
            names = ", ".join(repr(name) for name in splits) or "none"
            asked = "" if origin == document.origin else f", which {origin} asks for"
            close = nearest(part, splits)
            hint = f"; did you mean {close!r}?" if close else ""
            if close:
                line = where(document.content._raw["splits"], close)
            raise ConfigError(f"{line}: no split {part!r}{asked}; there is {names}{hint}")
        node = splits[part]
        if node is None:
            raise EmptyDatasetError(f"{line}: split {part!r} is empty")
        file = document.origin if os.path.isfile(document.origin) else None
        below = replace(context, folder=document.folder, document=file, trail=trail)
        key = (identity(document.origin), part, context.dataset_config, context.split_config)
        if key in self.branches:
            branch, counts = self.branches[key]
            for limit, number in counts.items():
                self.count(limit, document.content, number)
            return branch
        before = self.counts.copy()
        branch = replace(self.node(node, below), is_leaf=False)
        self.branches[key] = branch, self.counts - before
        return branch

    def node(self, node: Any, context: NodeContext) -> Branch:
        """Return the branch of a node of any kind."""
        return self.collecting(lambda: self.sound_node(node, context), node.where())

    def sound_node(self, node: Any, context: NodeContext) -> Branch:
        from energon.metadataset import grammar

        match node:
            case grammar.SplitV1():
                entries = [entry.as_reference() for entry in node.datasets]
                blend = grammar.Blend.model_construct(blend=entries)
                return self.blend(blend, context, node.where("datasets"))
            case grammar.Blend():
                branch = self.blend(node, context, node.where("blend"))
            case grammar.EpochizedBlend():
                line = node.where("blend_epochized")
                branch = self.line(node.blend_epochized, context, "blend_epochized", line)
            case grammar.Concat():
                branch = self.line(node.concat, context, "concat", node.where("concat"))
            case grammar.Reference():
                branch = self.reference(node, context)
            case grammar.Join():
                branch = self.join(node, context)
        check_subset(node, is_leaf=branch.is_leaf)
        if not (node.subset or node.subflavors or node.shuffle_over_epochs_multiplier != 1):
            return branch
        return branch.with_leaves(lambda leaf: inherit(leaf, node))

    def expand(self, nodes: Collection[Any], context: NodeContext, above: Any) -> None:
        """Count the nodes below one, and begin to ask stores for the kinds of their datasets."""
        self.count(METADATASET_NODES, above, len(nodes))
        for node in nodes:
            path = getattr(node, "path", None)
            with suppress(ConfigError):  # raised again in its turn
                if path and is_remote(address := absolute(path, context.folder)):
                    self.calls.begin(address, dataset_kind, address)

    def reference(self, node: Reference, context: NodeContext) -> Branch:
        if not node.path:
            raise ConfigError(f"{node.where('path')}: the path is empty")
        path = absolute(node.path, context.folder)
        branch = self.address(path, context.below(node), origin=node.where("path"))
        if not branch.is_leaf:
            for key, what in (("aux", "auxiliary data belong"), ("read", "how to read belongs")):
                if getattr(node, key):
                    raise ConfigError(
                        f"{node.where(key)}: {what} to a dataset, and {path} is a metadataset; "
                        f"write `{key}` there"
                    )
            return branch
        aux = {name: absolute_aux(value, context.folder) for name, value in node.aux.items()}
        read = plain(node.read)
        return branch.with_leaves(lambda leaf: replace(leaf, aux=aux, read=read))

    def join(self, node: Join, context: NodeContext) -> Branch:
        """Return the branch of joined datasets."""
        below = context.below(node)
        named = isinstance(node.join, dict)
        members = list(node.join.values()) if isinstance(node.join, dict) else node.join
        joined = []
        self.expand(members, context, node)
        for name, member in zip(node.join, members, strict=True):
            branch = self.node(member, below)
            if not branch.is_leaf:
                raise ConfigError(
                    f"{member.where('path')}: {member.path} is a metadataset; datasets are joined "
                    "sample by sample, so name prepared datasets"
                )
            own_name = str(name) if named else None
            joined.append(JoinMember(branch.leaves[0], member.nonmatch, own_name))
        return Branch((joined_leaf(node, tuple(joined), context.document),), is_leaf=True)

    def blend(self, node: Blend, context: NodeContext, location: str) -> Branch:
        """Return the branch of a blend by weights."""
        if not node.blend:
            raise EmptyDatasetError(f"{location}: the list is empty")
        if not self.training:
            return self.line(node.blend, context, "blend", location)
        self.expand(node.blend, context, node)
        branches = [self.node(entry, context) for entry in node.blend]
        curves = [each.weight for each in node.blend if isinstance(each.weight, tuple)]
        self.count(SCHEDULE_POINTS, node, sum(map(len, curves)))
        check_never_zero(node, location)
        check_units(node.unit, branches, location)
        entries = tuple(
            MixEntry(
                branch.mix or 0,
                weight_curve(entry, node.schedule_unit),
                entry.max_epochs,
                entry.tokens,
            )
            for entry, branch in zip(node.blend, branches, strict=True)
        )
        return Branch(
            leaves=tuple(leaf for branch in branches for leaf in branch.leaves),
            mode=BlendMode.DATASET_WEIGHT,
            mix=Mix(entries, node.stopping_strategy == "first_exhausted", node.temperature),
            sizes=tuple(
                size for branch in branches for size in branch.sizes or (len(branch.leaves),)
            ),
            unit=node.unit,
            location=location,
        )

    def line(
        self, entries: Sequence[Node], context: NodeContext, word: str, location: str
    ) -> Branch:
        """Return the branch of concatenated datasets, each repeated."""
        if not entries:
            raise EmptyDatasetError(f"{location}: the list is empty")
        self.expand(entries, context, entries[0])
        branches = [self.node(entry, context) for entry in entries]
        if self.training:
            check_line(branches, word, location)
        leaves = tuple(
            replace(leaf, repetitions=leaf.repetitions * getattr(entry, "repetitions", 1.0))
            if self.training
            else leaf
            for entry, branch in zip(entries, branches, strict=True)
            for leaf in branch.leaves
        )
        return Branch(leaves, BlendMode.SAMPLE_REPETITIONS)


@dataclass(frozen=True)
class NodeContext:
    """The settings that a node inherits."""

    split_part: str
    dataset_config: str
    split_config: str
    folder: str
    document: str | None = None
    trail: tuple[tuple[str, str], ...] = ()  # documents and splits on the way

    def below(self, node: Reference | Join) -> NodeContext:
        """Return the settings that the node below a reference or a join inherits."""
        return replace(
            self,
            split_part=node.split_part or self.split_part,
            dataset_config=node.dataset_config or self.dataset_config,
            split_config=node.split_config or self.split_config,
        )


def inherit(leaf: Leaf, node: Inner) -> Leaf:
    """Return `leaf` with the settings of a node above it."""
    bounds = None if node.subset is None else node.subset.bounds
    leaf = replace(leaf, subflavors={**leaf.subflavors, **plain(node.subflavors)})
    return narrow(leaf, bounds, node.shuffle_over_epochs_multiplier)


def check_subset(node: Inner, *, is_leaf: bool) -> None:
    """Raise ConfigError if a node counts samples of more than one dataset."""
    subset = node.subset
    if subset and not is_leaf and int in map(type, subset.bounds):
        raise ConfigError(
            f"{subset.where('range')}: a number of samples makes sense for one dataset only: can "
            "only use absolute subset ranges for a leaf dataset. Use percentages like "
            '["0%", "50%"] for all datasets of a blend or metadataset'
        )


def joined_leaf(node: Join, members: tuple[JoinMember, ...], document: str | None) -> Leaf:
    """Return the leaf of a join.

    Args:
        node: The node.
        members: Its datasets; the leaf has the path of the first.
        document: The local file that contains it; None if there is none.
    """
    first = members[0].leaf
    joiner = SampleJoiner(
        node.joiner.module,
        node.joiner.class_ or str(node.joiner.function),
        node.joiner.class_ is not None,
        node.where("joiner"),
        document,
    )
    return Leaf(
        path=first.path,
        split_part=first.split_part,
        dataset_config=first.dataset_config,
        split_config=first.split_config,
        origin=node.where("join"),
        kind=first.kind,
        join=members,
        joiner=joiner,
    )
