"""Open the leaves of a resolved document: from paths to datasets with known sample counts.

A `dataset.yaml` may name a class of the program with `__class__`. Documents that name a class of
energon never use it. Any other class has to derive from `DatasetClass`, and to be defined or
imported by the program. Its datasets take part in blends, orders and states like all others: the
class determines the samples and how they are decoded.

The indexes of joins can be built before a job starts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from energon.errors import ConfigError
from energon.formats.meta.info import META, check_inside
from energon.io.address import address_name, is_remote, redact
from energon.io.threads import CallsAhead
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.document import Problems, read_metadataset
from energon.metadataset.kind import dataset_kind
from energon.metadataset.leaf import Leaf, SampleJoiner, multiply_shuffle
from energon.metadataset.resolve import DatasetPath, resolve
from energon.plan.leaves.leaf import PlanLeaf
from energon.samples.field_map import FieldMap
from energon.samples.sample_types import resolve_class
from energon.sources.files.store import FileStore
from energon.sources.kinds import DatasetKind, kind_named
from energon.sources.shard_samples import PartFilter
from energon.sources.shards import ShardPool
from energon.sources.source import OpenRequest, Source
from energon.task_encoder.load import (
    CodeFields,
    JoinLoading,
    LeafLoading,
    SampleLoading,
    find_code,
    leaf_decoder,
)
from energon.worker import WorkerConfig

if TYPE_CHECKING:
    from energon.prepare.verify.quarantine import Exclusions


class DatasetClass:
    """Base of the classes that a `dataset.yaml` may name with `__class__`.

    Attributes:
        source: The samples, by number.
    """

    source: Source

    @classmethod
    def open_dataset(cls, opening: DatasetOpening) -> Self:
        """Open the dataset of a document."""
        raise NotImplementedError

    def dataset_config(self) -> DatasetConfig:
        """Return its configuration: order and subflavors."""
        raise NotImplementedError

    def sample_loading(self) -> SampleLoading:
        """Return how its samples are made."""
        raise NotImplementedError


@dataclass(frozen=True)
class DatasetCall:
    """The call that opens datasets, which dataset classes of a program may inspect.

    Args:
        training: Whether it is for training or for validation.
        worker_config: Rank and workers; None if nothing is loaded, as in commands.
        settings: Defaults for settings such as `max_samples_per_sequence`, used unless the
            document or the class sets them.
    """

    training: bool = False
    worker_config: WorkerConfig | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def open(self, opening: DatasetOpening) -> DatasetClass | None:
        """Open the dataset if a class of the program does that; return None for all others.

        Raises:
            ConfigError: If the document names something else than a dataset class, or it fails.
            SecurityError: If it names what the program has neither defined nor imported.
        """
        named = opening.config.dataset_class
        if named is None:
            return None
        kind: Any = resolve_class(*named, allow=opening.allow, kinds=(DatasetClass,))
        if not (isinstance(kind, type) and issubclass(kind, DatasetClass)):
            raise ConfigError(
                f"{opening.config.origin}: {'.'.join(named)} is not a dataset class; derive it "
                "from one of megatron.energon, like DefaultDecoderWebdatasetFactory"
            )
        return kind.open_dataset(opening)


@dataclass(frozen=True)
class DatasetOpening(OpenRequest):
    """A request to open a dataset, which a class of the program may answer.

    Args:
        call: The call that opens it.
    """

    call: DatasetCall = field(default_factory=DatasetCall)


@dataclass(frozen=True)
class OpenedLeaf:
    """An open leaf: its sample counts, and whatever reading, ordering and hooks need.

    Args:
        source: Its samples.
        loading: How they are made and cooked.
        plan_leaf: How they are ordered.
        config: The configuration of the dataset.
        dataset: The object of the program's own dataset class; None for all other datasets.
    """

    source: Source
    loading: LeafLoading
    plan_leaf: PlanLeaf
    config: DatasetConfig
    dataset: DatasetClass | None = None

    def __len__(self) -> int:
        return self.plan_leaf.num_samples

    @property
    def name(self) -> str:
        """Name of the dataset folder."""
        return self.source.path.name

    @property
    def paths(self) -> list[str]:
        """The dataset folder, as a list of one; those of all datasets of a join."""
        return [str(path) for path in self.source.paths]

    @property
    def subflavors(self) -> Mapping[str, Any]:
        """The subflavors of the dataset and of all documents that refer to it."""
        return self.loading.subflavors


def open_leaves(
    leaves: Sequence[Leaf],
    subflavors: Mapping[str, Any] | None,
    exclude_from: str | os.PathLike[str] | Exclusions | None = None,
    allow: Collection[str] = (),
    call: DatasetCall = DatasetCall(),
) -> list[OpenedLeaf]:
    """Open the datasets that `leaves` refer to, with `subflavors` merged over theirs.

    Args:
        leaves: What a document refers to.
        subflavors: Labels of the samples, which override those of the datasets.
        exclude_from: Quarantine file, or folder of them; None for none. A joined sample is excluded
            with any of the samples it consists of.
        allow: What datasets may do, see `energon.limits`.
        call: For what they are opened; dataset classes of the program are told.

    Raises:
        SecurityError: If a dataset needs something that is not allowed.
        ConfigError: If a dataset.yaml is invalid, or asks for what is missing; names what is
            wrong with each of the leaves.
        DatasetNotFoundError: If there is no such dataset.
        EmptyDatasetError: If a leaf has no samples in its split.
    """
    if not isinstance(subflavors or {}, Mapping):
        raise ConfigError(
            f"subflavors={subflavors!r}: expected a dict of labels, like {{'source': 'web'}}"
        )
    exclusions = find_exclusions(leaves, exclude_from)
    opener = _Opener(subflavors or {}, exclusions, ShardPool(), allow, call)
    problems = Problems()
    uids = _uids(leaves)
    opened = []
    with CallsAhead() as calls:
        for leaf, uid in zip(leaves, uids, strict=True):
            if leaf.joiner is None and is_remote(leaf.path):
                calls.begin(uid, opener.open_early, leaf, uid)
        for leaf, uid in zip(leaves, uids, strict=True):
            with problems.kept(leaf.origin if leaf.origin != leaf.path else ""):
                if leaf.joiner is not None:
                    opened.append(opener.join(leaf, leaf.joiner, uid))
                    continue
                single = calls.result(uid, opener.open_early, leaf, uid)
                if isinstance(single, DatasetOpening):
                    single = opener.open(single, uid)
                opened.append(single)
    problems.raise_all()
    return opened


def _uids(leaves: Sequence[Leaf]) -> list[str]:
    """Return names that identify leaves in states, in any document and at any mount point."""
    counts = Counter[str]()
    uids = []
    for leaf in leaves:
        name = "&".join(address_name(dataset.path) for dataset, _ in leaf.datasets)
        name += f"/{leaf.split_part}"
        counts[name] += 1
        uids.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return uids


def open_members(leaf: Leaf, pool: ShardPool, allow: Collection[str] = ()) -> list[Source]:
    """Open the datasets of a join, for reading their keys."""
    members = _Opener({}, None, pool, allow, DatasetCall()).members(leaf, "member")
    return [member.source for member in members]


@dataclass(frozen=True)
class _Opener:
    """Opens the datasets of a call, see `open_leaves`."""

    subflavors: Mapping[str, Any]
    exclusions: Exclusions | None
    pool: ShardPool
    allow: Collection[str]
    call: DatasetCall

    def request(self, leaf: Leaf) -> DatasetOpening:
        """Return the request to open a dataset, whose options are checked."""
        kind = kind_named(leaf.kind)
        kind.check_options(leaf)
        by_file = {} if self.exclusions is None else self.exclusions.of(leaf.path)
        exclude = [entry for entries in by_file.values() for entry in entries]
        return DatasetOpening(leaf, kind.config(leaf), exclude, self.pool, self.allow, self.call)

    def open_early(self, leaf: Leaf, uid: str) -> OpenedLeaf | DatasetOpening:
        """Open a dataset, perhaps in a thread, which classes of the program may not expect."""
        request = self.request(leaf)
        return request if request.config.dataset_class else self.open(request, uid)

    def open(
        self, request: DatasetOpening, uid: str, outer: Mapping[str, Any] | None = None
    ) -> OpenedLeaf:
        """Open a single dataset.

        Args:
            request: The request.
            uid: Its name.
            outer: The subflavors of the join that it belongs to.
        """
        leaf, kind = request.leaf, kind_named(request.leaf.kind)
        dataset = self.call.open(request)
        if dataset is not None:
            config, samples = dataset.dataset_config(), dataset.sample_loading()
            source = dataset.source
        else:
            config = request.config
            samples, source = _open_described(kind, request)
        if leaf.aux and not config.crude:
            raise ConfigError(
                f"{leaf.origin}: aux ({', '.join(leaf.aux)}) is for cookers, and {config.origin} "
                "describes samples that need none; make it a CrudeWebdataset, or drop aux"
            )
        primary = partial(kind.file_store, leaf.path, pool=self.pool, allow=self.allow)
        loading = LeafLoading(
            name=uid,
            dataset_path=leaf.path,
            subflavors={
                **config.subflavors,
                **leaf.subflavors,
                **(outer or {}),
                **self.subflavors,
            },
            samples=samples,
            aux=self._aux(leaf),
            primary=primary if config.crude else None,
            allow=self.allow,
        )
        return OpenedLeaf(source, loading, _plan_leaf(leaf, uid, source, config), config, dataset)

    def members(self, leaf: Leaf, uid: str) -> list[OpenedLeaf]:
        """Open the datasets of a join."""
        problems = Problems()
        members = []
        for number, member in enumerate(leaf.join):
            with problems.kept(member.leaf.origin):
                request = self.request(member.leaf)
                members.append(self.open(request, f"{uid}[{number}]", leaf.subflavors))
        problems.raise_all()
        return members

    def join(self, leaf: Leaf, joiner: SampleJoiner, uid: str) -> OpenedLeaf:
        """Open a join."""
        from energon.task_encoder.open_join import open_join  # most runs have no joins

        members = self.members(leaf, uid)
        first, config = members[0].loading, members[0].config
        source: Source = open_join(leaf, [member.source for member in members])
        aux: dict[str, FileStore[Any]] = {}
        for member in members:
            for key in member.loading.aux:
                if key in aux:
                    raise ConfigError(
                        f"{leaf.origin}: two datasets of the join name auxiliary data {key!r}; "
                        "cookers know them by name, so give each another one"
                    )
            aux |= member.loading.aux
        loading = LeafLoading(
            name=uid,
            dataset_path=leaf.path,
            subflavors=first.subflavors,
            aux=aux,
            primary=first.primary,
            join=JoinLoading(
                tuple(member.loading for member in members),
                tuple(member.name for member in leaf.join),
                joiner,
                tuple(self.allow),
            ),
            allow=self.allow,
        )
        return OpenedLeaf(source, loading, _plan_leaf(leaf, uid, source, config), config)

    def _aux(self, leaf: Leaf) -> dict[str, FileStore[bytes]]:
        """Return the stores of a leaf by name; most leaves have none."""
        if not leaf.aux:
            return {}
        from energon.sources.files.open import open_aux

        return open_aux(leaf.aux, origin=leaf.origin, pool=self.pool, allow=self.allow)


def _plan_leaf(leaf: Leaf, uid: str, source: Source, config: DatasetConfig) -> PlanLeaf:
    own = config.shuffle_over_epochs if "shuffle_over_epochs" in config.given else 1
    return PlanLeaf(
        uid=uid,
        num_samples=len(source),
        repetitions=leaf.repetitions,
        shuffle_over_epochs=multiply_shuffle(own, leaf.shuffle_over_epochs_multiplier),
    )


def _open_described(kind: DatasetKind, opening: DatasetOpening) -> tuple[SampleLoading, Source]:
    """Open a dataset according to its own `dataset.yaml`."""
    leaf, allow, config = opening.leaf, opening.allow, opening.config
    if config.split_config is not None:
        check_inside([f"{META}/{config.split_config}"], origin=config.origin, allow=allow)
    sample_type, field_map = _sample_type(config, leaf, allow)
    parts = _filter(config, leaf, allow) if field_map is None else field_map.parts
    source = kind.open(opening, parts)
    if isinstance(field_map, FieldMap):
        kind.check_field_map(source, field_map)
    return SampleLoading(sample_type, field_map, leaf_decoder(config)), source


def find_exclusions(
    leaves: Sequence[Leaf], exclude_from: str | os.PathLike[str] | Exclusions | None
) -> Exclusions | None:
    """Return the samples that quarantine files exclude; None without such files.

    Args:
        leaves: All that the run refers to.
        exclude_from: The files, or what this has returned for more leaves than these.

    Raises:
        ConfigError: If it is not a path.
        DatasetNotFoundError: If there is no such file or folder.
    """
    if exclude_from is None:
        return None
    from energon.prepare.verify.quarantine import Exclusions

    if isinstance(exclude_from, Exclusions):
        return exclude_from
    paths = (dataset.path for leaf in leaves for dataset, _ in leaf.datasets)
    return Exclusions(exclude_from, paths)


def _sample_type(
    config: DatasetConfig, leaf: Leaf, allow: Collection[str]
) -> tuple[type | None, FieldMap | CodeFields | None]:
    if config.sample_type is None:
        return None, None
    try:
        sample_type = resolve_class(*config.sample_type, allow=allow)
        if config.sample_loader is None:
            field_map = FieldMap.parse(config.field_map or {})
            field_map.check(sample_type)
            return sample_type, field_map
    except ConfigError as error:
        raise ConfigError(f"{config.origin or redact(leaf.path)}: {error}") from error
    loader = find_code(config, leaf.path, "sample_loader", config.sample_loader, allow)
    return sample_type, CodeFields(loader, sample_type, _filter(config, leaf, allow) or ())


def _filter(
    config: DatasetConfig, leaf: Leaf, allow: Collection[str]
) -> Collection[str] | PartFilter | None:
    """Return the parts that the description names; None if it names none."""
    if isinstance(config.part_filter, str):
        return PartFilter(find_code(config, leaf.path, "part_filter", config.part_filter, allow))
    return config.part_filter


def prepare_metadataset(path: str | os.PathLike[str], *, allow: Collection[str] = ()) -> list[Path]:
    """Build all missing indexes for the joins of a metadataset.

    Otherwise they are built when they are first needed, while all ranks wait. The code of
    joiners is not run. Indexes of earlier versions of the document are deleted.

    Args:
        path: The metadataset YAML.
        allow: What data may do, see `get_train_dataset`.

    Returns:
        Where the indexes are.

    Raises:
        ConfigError: If a document is invalid, or samples have no match where that is an error.
        DatasetNotFoundError: If something is missing.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("joined.yaml").write_text('''
        ... __module__: energon
        ... __class__: MetadatasetV2
        ... splits:
        ...   train:
        ...     join:
        ...       - {path: photos}
        ...       - {path: photos}
        ...     joiner: {__module__: energon, __class__: CaptioningSample}
        ... ''')
        >>> [path.suffix for path in prepare_metadataset("joined.yaml")]
        ['.bin']
    """
    from energon.task_encoder.open_join import index_name

    paths = build_join_indexes(path, metadataset_splits(path, allow), allow=allow)
    folder = Path(f"{os.path.abspath(path)}.cache")
    for stale in set(folder.glob(index_name("*"))) - set(paths):
        stale.unlink(missing_ok=True)
    return paths


def build_join_indexes(
    path: DatasetPath,
    split_parts: Sequence[str],
    *,
    dataset_config: str | None = None,
    split_config: str | None = None,
    allow: Collection[str] = (),
) -> list[Path]:
    """Build all missing indexes for the joins in some splits.

    Args:
        path: A metadataset YAML, or the document as a dict.
        split_parts: The splits.
        dataset_config: File below `.nv-meta` that describes samples; None for dataset.yaml.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        allow: What data may do, see `get_train_dataset`.

    Returns:
        Where the indexes are.
    """
    from energon.task_encoder.open_join import join_digest, join_index

    leaves = [
        leaf
        for part in split_parts
        for leaf in resolve(
            path,
            split_part=part,
            training=False,
            dataset_config=dataset_config,
            split_config=split_config,
            allow=allow,
        ).leaves
    ]
    paths = []
    pool = ShardPool()
    for leaf in leaves:
        if leaf.join:
            sources = open_members(leaf, pool, allow)
            index = join_index(leaf, sources, join_digest(leaf, sources))
            paths.append(Path(str(index.path)))
    return paths


def metadataset_splits(path: DatasetPath, allow: Collection[str] = ()) -> list[str]:
    """Return the names of the splits of a metadataset, without those that are empty.

    Raises:
        ConfigError: If this is a single dataset.
    """
    if not isinstance(path, Mapping):
        if dataset_kind(path) != "metadataset":
            raise ConfigError(f"{path} is not a metadataset; expected a .yaml file")
        path = os.fspath(path)
    document = read_metadataset(path, allow)
    return [part for part, node in document.content.splits.items() if node is not None]
