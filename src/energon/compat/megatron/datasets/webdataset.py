"""Datasets described in a program instead of a `dataset.yaml`, under their former names.

A factory opens the prepared dataset at a path; `build()` returns its samples, to be wrapped.
Programs derive their own factories from these, which a `dataset.yaml` can then name. Their class
methods prepare the shards of a folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from energon.compat.megatron.datasets.arguments import (
    current_opening,
    defaults_of,
    load_config,
    older_decoder,
    opening_for,
    subset_ranges,
)
from energon.compat.megatron.datasets.leaf import LeafDataset, opened_leaf, recipe_of
from energon.compat.megatron.helpers import (
    INDEX_PLACE,
    MediaFilterConfig,
    ProgressBar,
    ShownProgress,
    prepare_filesystem_dataset,
)
from energon.compat.megatron.worker import note_ignored
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, SkipSample, UnknownArgumentError
from energon.formats.meta.braces import expand_braces
from energon.formats.meta.info import DatasetInfo, load_info, load_split
from energon.formats.meta.yaml import load
from energon.formats.tar.headers import split_name
from energon.formats.tar.scan import iter_members
from energon.io.epath import EPath, any_path
from energon.local_file import open_binary
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.kind import kind_entry
from energon.prepare.dataset import Indexing, dataset_locked, index_dataset
from energon.prepare.engines import Engine
from energon.prepare.index import find_shards
from energon.prepare.media import MediaFilter
from energon.prepare.remote import mirrored
from energon.prepare.splits import SplitRequest, present_split, split_dataset
from energon.samples.crude import CrudeSample
from energon.samples.field_map import FieldMap
from energon.samples.provenance import sources_of
from energon.sources.files.samples import WebdatasetFileStore
from energon.sources.kinds import kind_named
from energon.sources.shard_samples import PartFilter
from energon.sources.source import SampleSelection
from energon.sources.webdataset import WebdatasetSource
from energon.task_encoder.leaves import DatasetCall, DatasetClass, DatasetOpening
from energon.task_encoder.load import (
    CodeFields,
    LeafLoading,
    SampleLoading,
    find_code,
    seeded_if_random,
)
from energon.task_encoder.recipe import Recipe
from energon.worker import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One shard of a split.

    Args:
        name: Its path below the dataset.
        path: Where it is.
        count: Its number of samples.
    """

    name: str
    path: str
    count: int


MAX_PART_NAMES = 50


class PreparesShards:
    """Class methods of datasets of shards that write the files next to the shards."""

    @classmethod
    def prepare_dataset(
        cls,
        parent_path: str | os.PathLike[str],
        paths: Sequence[str] | None = None,
        *,
        split_parts_ratio: Sequence[tuple[str, float]] | None = None,
        split_parts_patterns: Sequence[tuple[str, str]] | None = None,
        split_config: str = "split.yaml",
        shuffle_seed: int | None = 42,
        progress_fn: ProgressBar | None = None,
        workers: int = 4,
        tar_index_only: bool = False,
        media_filter: MediaFilter | MediaFilterConfig | None = None,
        fix_duplicates: bool = False,
        index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
    ) -> set[str]:
        """Prepare a folder of tar shards; no `dataset.yaml` is written.

        Args:
            parent_path: The folder, local or in an object store.
            paths: The shards, or patterns with braces; None for all below the folder.
            split_parts_ratio: Names of splits and their ratios.
            split_parts_patterns: Names of splits and regular expressions, instead of ratios.
            split_config: The file below `.nv-meta` that lists the splits.
            shuffle_seed: None assigns shards to splits in their order, any number in a shuffled
                order.
            progress_fn: Shows the progress: wraps an iterator over shards, given their number.
            workers: Number of processes that read shards.
            tar_index_only: Whether to index shards only, and leave splits unchanged.
            media_filter: Files whose media metadata is stored; None for none.
            fix_duplicates: Whether to rewrite shards that contain duplicate keys.
            index_sqlite_tmp_path: Has no effect, as is logged once: indexes are written where they
                belong.

        Returns:
            The names of the parts of samples, 50 at most.

        Raises:
            ConfigError: If the arguments are invalid.
            DuplicateSampleKeyError: If a key occurs twice.
        """
        note_ignored(INDEX_PLACE, index_sqlite_tmp_path=index_sqlite_tmp_path is not None)
        folder, shown = any_path(parent_path), ShownProgress(progress_fn)
        if isinstance(folder, EPath) and fix_duplicates:
            raise ConfigError(
                f"{folder}: fix_duplicates rewrites shards, and those in an object store stay "
                "as they are; prepare a local copy with it"
            )
        request: SplitRequest | None = None
        if not tar_index_only:
            request = SplitRequest(
                ratio=None if split_parts_ratio is None else dict(split_parts_ratio),
                parts=[f"{name}:{pattern}" for name, pattern in split_parts_patterns or ()],
                shuffle=shuffle_seed is not None and split_parts_ratio is not None,
            )
        indexing = Indexing(
            engine=Engine(num_workers=workers), fix_duplicates=fix_duplicates, progress=shown
        )
        if isinstance(folder, EPath):
            indexing = replace(indexing, progress=ShownProgress(None))
            with mirrored(folder.url, progress=shown) as local:
                names = _index_shards(local, paths, indexing, request, split_config)
        else:
            names = _index_shards(folder, paths, indexing, request, split_config)
        if media_filter is not None:
            prepare_filesystem_dataset(parent_path, media_filter, workers=workers)
        return names

    @classmethod
    def add_media_metadata(
        cls,
        parent_path: str | os.PathLike[str],
        *,
        media_filter: MediaFilter | MediaFilterConfig,
        workers: int = 4,
        progress_fn: ProgressBar | None = None,
        index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
    ) -> int:
        """Store the metadata of the media files of a prepared dataset.

        Args:
            parent_path: Its folder, local or in an object store.
            media_filter: Selects the files.
            workers: Number of processes that read shards.
            progress_fn: Shows the progress, see `prepare_dataset`.
            index_sqlite_tmp_path: Has no effect, as is logged once.

        Returns:
            Number of files with metadata.
        """
        return prepare_filesystem_dataset(
            parent_path,
            media_filter,
            progress=progress_fn,
            workers=workers,
            index_sqlite_tmp_path=index_sqlite_tmp_path,
        )

    @staticmethod
    def iter_dataset_content(
        path: str | os.PathLike[str], extract_keys: Collection[str] = ()
    ) -> Iterator[dict[str, bytes | None]]:
        """Yield the parts of each sample of a shard, by name.

        Args:
            path: The shard.
            extract_keys: Parts whose content is included; it is None for all others.
        """
        with open_binary(path) as shard:
            file = shard.fileno()

            def read(offset: int, size: int) -> bytes:
                return os.pread(file, size, offset)

            key, sample = "", dict[str, bytes | None]()
            for member in iter_members(read, os.fstat(file).st_size, origin=str(path)):
                names = split_name(member.name)
                if names is None:
                    continue
                if names[0] != key and sample:
                    yield sample
                    sample = {}
                key, part = names
                is_extracted = part in extract_keys
                sample[part] = read(member.offset, member.size) if is_extracted else None
            if sample:
                yield sample


def _index_shards(
    folder: Path,
    paths: Sequence[str] | None,
    indexing: Indexing,
    request: SplitRequest | None,
    split_config: str,
) -> set[str]:
    """Index the shards of a local folder, and divide them into splits if that is requested.

    Returns:
        The names of the parts of samples.
    """
    shards = _shards(folder, paths)
    if request is not None:
        request.check(shards)

    def documents(info: DatasetInfo) -> Iterator[tuple[str, str]]:
        if request is not None:
            splits = split_dataset(info, request, present_split(folder)).to_yaml()
            as_json = split_config.endswith(".json")
            yield (
                split_config,
                json.dumps(load(splits, origin=split_config)) if as_json else splits,
            )

    names: set[str] = set()
    with dataset_locked(folder, indexing) as held:
        index_dataset(folder, shards, held, documents, check=names.update)
    return set(sorted(names)[:MAX_PART_NAMES])


def _shards(folder: Path, paths: Sequence[str] | None) -> list[str]:
    """Return the shards that `paths` name, in the order of the folder."""
    shards = [str(shard) for shard in find_shards(folder)]
    if paths is None:
        return shards
    named = {each for path in paths for each in expand_braces(str(path))}
    missing = sorted(named - set(shards))
    if missing:
        raise ConfigError(f"{folder} has no shard {missing[0]}; correct paths, or add the shard")
    return [shard for shard in shards if shard in named]


class WebdatasetFactory(PreparesShards, LeafDataset):
    """The samples of a prepared dataset of tar shards.

    Derive from it, or from one of the classes below, to change how samples are made: override
    `load_sample`, which receives the parts of a sample as bytes, or `sample_filter`. A
    `dataset.yaml` names such a class with `__module__` and `__class__`.

    Args:
        path: Its folder.
        split_part: The split to read.
        training: Whether each pass is shuffled, or samples come in order.
        worker_config: Rank and workers.
        shuffle_over_epochs: See `shuffle_over_epochs_multiplier` of `get_train_dataset`.
        parallel_shard_iters: See `get_train_dataset`.
        max_samples_per_sequence: See `get_train_dataset`.
        subset: A range of samples, as (start, stop) or in percent.
        split_config: File below `.nv-meta` that lists the splits; None for split.yaml.
        part_filter: The names of the parts to read, or a function that returns whether to read
            a part; None for all that are needed.

    Raises:
        ConfigError: If the arguments are invalid.
        DatasetNotFoundError: If there is no prepared dataset.
        EmptyDatasetError: If there are no samples.
    """

    source: WebdatasetSource
    __sample_type__: type | None = None
    takes_decoder = False
    """Whether a decoder is an argument."""
    _decoder: Any = None
    _fields: FieldMap | CodeFields | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split_part: str = "train",
        training: bool = True,
        worker_config: WorkerConfig,
        shuffle_over_epochs: int | None = 1,
        parallel_shard_iters: int | None = None,
        max_samples_per_sequence: int | None = None,
        subset: Any = None,
        split_config: str | None = None,
        part_filter: Collection[str] | Callable[[str], bool] | None = None,
    ) -> None:
        if isinstance(part_filter, str):
            raise ConfigError(f"part_filter={part_filter!r}: expected a list of part names")
        opening = current_opening()
        self.source = WebdatasetSource(
            path,
            SampleSelection(
                split_part,
                subset_ranges(subset),
                () if opening is None else opening.exclude,
                PartFilter(part_filter) if callable(part_filter) else part_filter,
            ),
            split_config=split_config or "split.yaml",
            pool=None if opening is None else opening.pool,
            allow=() if opening is None else opening.allow,
        )
        if isinstance(self._fields, FieldMap):
            kind_named("webdataset").check_field_map(self.source, self._fields)
        self.name = self.source.path.name
        self.primary = WebdatasetFileStore(self.source.path)
        self.split_part = split_part
        self._split_config = split_config or "split.yaml"
        counts = load_info(self.path).shard_counts
        self.shards = [
            ShardInfo(name=name, path=str(self.path / name), count=counts[name])
            for name in self.source.shards
        ]
        self.training = training
        self.worker_config = worker_config
        self.shuffle_over_epochs = shuffle_over_epochs
        self.parallel_shard_iters = parallel_shard_iters
        self.max_samples_per_sequence = max_samples_per_sequence
        self.subset = subset
        self.part_filter = part_filter
        self.subflavors: dict[str, Any] = {}

    def load_sample(self, raw_data: CrudeSample) -> Any:
        """Return the sample for `raw_data`, a dict of its parts as bytes."""
        return raw_data

    def sample_filter(self, key: str) -> bool:
        """Return whether to read the sample with `key`, in the form SHARD/KEY."""
        return True

    @property
    def sample_excludes(self) -> set[str]:
        """Samples that split.yaml excludes, as SHARD/KEY."""
        split = load_split(self.path, self._split_config)
        return {f"{shard}/{key}" for shard, key in split.excluded_samples}

    @cached_property
    def recipe(self) -> Recipe:  # type: ignore[override]
        """The recipe of its samples. Made on first use, after all constructors have run."""
        loading = LeafLoading(
            name=self.name,
            dataset_path=str(self.path),
            subflavors=self.subflavors,
            samples=self.sample_loading(),
            primary=partial(WebdatasetFileStore, self.source.path),
        )
        return recipe_of(
            [opened_leaf(self.source, loading, self.split_part, self)],
            self.worker_config,
            training=self.training,
            shuffle_over_epochs=self.shuffle_over_epochs,
        )

    def sample_loading(self) -> SampleLoading:
        crude = self._is_crude
        if self._is_plain:
            return SampleLoading(
                None if crude else self.__sample_type__, self._fields, self._decoder
            )
        # Crude samples are left to cookers.
        return SampleLoading(decoder=self._load) if crude else SampleLoading(load=self._load)

    def dataset_config(self) -> DatasetConfig:
        given = {"shuffle_over_epochs", "parallel_shard_iters", "max_samples_per_sequence"}
        return DatasetConfig(
            crude=self._is_crude,
            subflavors=self.subflavors,
            shuffle_over_epochs=self.shuffle_over_epochs,
            parallel_shard_iters=self.parallel_shard_iters,
            max_samples_per_sequence=self.max_samples_per_sequence,
            given=frozenset(given),
            origin=f"{type(self).__module__}.{type(self).__qualname__}",
        )

    def config(self) -> dict[str, Any]:
        """Return a description of the dataset as plain data."""
        names = "training split_part shuffle_over_epochs parallel_shard_iters"
        own = {name: vars(self)[name] for name in (*names.split(), "max_samples_per_sequence")}
        subset = None if self.subset is None else list(map(list, subset_ranges(self.subset)))
        shards = [{"name": s.name, "count": s.count, "_path": s.path} for s in self.shards]
        return {
            "type": type(self).__qualname__,
            "_path": str(self.path),
            "shards": shards,
            "sample_excludes": sorted(self.sample_excludes),
            "subset": subset,
            **own,
        }

    def __getstate__(self) -> dict[str, Any]:
        # Attributes that refer back to the pipeline, which would lead in circles.
        return {name: value for name, value in vars(self).items() if name != "recipe"}

    @property
    def _is_crude(self) -> bool:
        kind = self.__sample_type__
        return kind is None or issubclass(kind, dict)

    @property
    def _is_plain(self) -> bool:
        """Whether the class does not change how samples are made, so that the recipe makes them."""
        methods = [getattr(type(self), name, None) for name in _OVERRIDABLE]
        own = all(getattr(method, "__module__", __name__) == __name__ for method in methods)
        has_plain_decoder = self._decoder is None or isinstance(self._decoder, SampleDecoder)
        return own and has_plain_decoder and "_sample_loader" not in vars(self)

    def _load(self, raw: CrudeSample) -> Any:
        if not self.sample_filter(f"{raw['__shard__']}/{raw['__key__']}"):
            raise SkipSample
        raw["__sources__"] = sources_of(str(self.path), raw)
        return self.load_sample(raw)

    @classmethod
    def open_dataset(cls, opening: DatasetOpening) -> Self:
        with opening_for(opening):
            return load_config(
                opening.config.arguments, default_type=cls, default_kwargs=defaults_of(opening)
            )


_OVERRIDABLE = ("load_sample", "sample_filter", "_sample_loader", "_load")


class GenericWebdatasetFactory(WebdatasetFactory):
    """The samples of a prepared dataset as a sample type, whose fields are the bytes of parts.

    Args:
        path: Its folder.
        sample_type: The type; None for `__sample_type__` of the class.
        subflavors: The `__subflavors__` of the samples.
        field_map: Maps parts to the fields of the type.
        sample_loader: Instead of a field map, a function from the parts of a sample to its fields,
            or `file.py:function` below `.nv-meta`, which must be allowed.
        part_filter: The parts that a `sample_loader` needs; see `WebdatasetFactory`.
        settings: Arguments of `WebdatasetFactory`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sample_type: type | None = None,
        subflavors: Mapping[str, Any] | None = None,
        field_map: Mapping[str, str] | None = None,
        sample_loader: str | Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        part_filter: str | Collection[str] | Callable[[str], bool] | None = None,
        **settings: Any,
    ) -> None:
        if sample_loader is not None and field_map is not None:
            raise ConfigError("pass a field_map or a sample_loader, not both")
        if sample_type is not None:
            self.__sample_type__ = sample_type
        loader = _code(path, "sample_loader", sample_loader)
        chosen = _code(path, "part_filter", part_filter)
        if not self._is_crude:
            self._fields = _fields(self.__sample_type__, field_map, loader)
        elif loader is not None or field_map is not None:
            raise ConfigError(
                f"{type(self).__name__} yields crude samples, which have no fields; drop "
                f"{'field_map' if loader is None else 'sample_loader'}"
            )
        if chosen is None and isinstance(self._fields, FieldMap):
            chosen = self._fields.parts
        super().__init__(path, part_filter=chosen, **settings)
        self.subflavors = dict(subflavors or {})

    def load_sample(self, sample: CrudeSample) -> Any:
        if self._is_crude:
            return sample
        return self.__sample_type__(**self._sample_loader(sample))  # type: ignore[misc]

    def _sample_loader(self, sample: CrudeSample) -> dict[str, Any]:
        """Return the fields of a sample, as arguments of its type."""
        fields = {
            "__key__": sample["__key__"],
            "__restore_key__": sample["__restore_key__"],
            "__subflavors__": sample["__subflavors__"],
            "__sources__": sample["__sources__"],
        }
        return fields | (self._fields.apply(sample) if self._fields is not None else {})


class DecoderWebdatasetFactory(GenericWebdatasetFactory):
    """The samples of a prepared dataset as a sample type, whose fields are decoded parts.

    Args:
        path: Its folder.
        decoder: Decodes the parts; None leaves them as bytes.
        settings: Arguments of `GenericWebdatasetFactory`. Deprecated are `auto_decode`, where False
            is `decoder=None`, and the arguments of `SampleDecoder`; `ignore_decoder_errors` has no
            effect, as is logged once.
    """

    takes_decoder = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        decoder: Any = SampleDecoder(),  # noqa: B008 - immutable
        **settings: Any,
    ) -> None:
        note_ignored(
            "failures of decoders are tolerated as those of hooks are",
            ignore_decoder_errors=bool(settings.pop("ignore_decoder_errors", False)),
        )
        self._decoder = older_decoder(decoder, settings)
        self.image_decode = getattr(self._decoder, "image_decode", SampleDecoder.image_decode)
        self.av_decode = getattr(self._decoder, "av_decode", SampleDecoder.av_decode)
        super().__init__(path, **settings)

    def load_sample(self, sample: CrudeSample) -> Any:
        decoder = seeded_if_random(self._decoder)
        if decoder is not None:
            sample = decoder(sample)
        return super().load_sample(sample)


class StandardWebdatasetFactory(DecoderWebdatasetFactory):
    """The samples of a prepared dataset as a sample type, as an ordinary dataset.yaml describes."""

    def __init__(self, path: str | os.PathLike[str], *, sample_type: type, **settings: Any) -> None:
        super().__init__(path, sample_type=sample_type, **settings)


class CrudeWebdataset(DecoderWebdatasetFactory):
    """The crude samples of a prepared dataset: dicts of parts, for cookers."""

    __sample_type__ = CrudeSample

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        super().__init__(path, **settings)


def _code(path: str | os.PathLike[str], key: str, given: Any) -> Any:
    """Return a function, loaded from a file next to the dataset if given by name."""
    if not isinstance(given, str):
        return given
    if not (".py" in given or ":" in given):
        raise ConfigError(f"{key} {given!r}: expected a list of part names, or FILE.py:FUNCTION")
    opening = current_opening()
    config = DatasetConfig(origin=f"{os.fspath(path)}/.nv-meta/dataset.yaml")
    allow = () if opening is None else opening.allow
    return find_code(config, os.fspath(path), key, given, allow)


def _fields(
    sample_type: type | None,
    field_map: Mapping[str, str] | None,
    sample_loader: Callable[[Any], Mapping[str, Any]] | None,
) -> FieldMap | CodeFields | None:
    """Return the field map of `sample_type`; None without a type."""
    if sample_type is None:
        return None
    if sample_loader is not None:
        return CodeFields(sample_loader, sample_type, ())
    if field_map is None:
        raise ConfigError(
            f"{sample_type.__name__}: the parts that its fields come from are unknown; pass a "
            "field_map or a sample_loader"
        )
    fields = FieldMap.parse(dict(field_map))
    fields.check(sample_type)
    return fields


@dataclasses.dataclass(frozen=True)
class GetterCall(DatasetCall):
    """The call of a getter of `megatron.energon`.

    Args:
        arguments: Arguments that the getter does not know, which are for the datasets.
        as_factories: Whether each dataset of shards becomes an object of its class.
    """

    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    as_factories: bool = False

    def open(self, opening: DatasetOpening) -> DatasetClass | None:
        replaced, leaf = _replaced(), opening.leaf
        if replaced is None and not self.arguments and not self.as_factories:
            return super().open(opening)
        if not kind_entry(leaf.kind).in_shards:
            if self.arguments:
                name = next(iter(self.arguments))
                raise UnknownArgumentError(f"{leaf.path} is not a dataset of shards: no {name!r}")
            return None
        with opening_for(opening):
            dataset: Any = (replaced or load_config)(
                EPath(leaf.path) / ".nv-meta" / leaf.dataset_config,
                default_type=StandardWebdatasetFactory,
                default_kwargs={**defaults_of(opening), **self.arguments},
            )
        if not isinstance(dataset, DatasetClass):
            raise ConfigError(
                f"{leaf.path}: load_config of megatron.energon.dataset_config returned a "
                f"{type(dataset).__name__}, expected a dataset"
            )
        return dataset


def _replaced() -> Callable[..., Any] | None:
    """Return a program's replacement of `load_config`; None if there is none."""
    module = sys.modules.get("megatron.energon.dataset_config")
    replacement = None if module is None else vars(module).get("load_config")
    return None if replacement is load_config else replacement
