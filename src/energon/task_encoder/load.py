"""Decode, load, join and cook: from the bytes of a leaf's samples to the input of encoders.

Code stored with a dataset, `sample_loader.py`, runs only where the user allows it. Pipelines carry
the text of the file to their workers, so that all of them run what the user has allowed, whatever
happens to the file.
"""

from __future__ import annotations

import hashlib
import posixpath
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, SampleError, SecurityError
from energon.io.address import join_address, redact
from energon.io.files import read_text
from energon.limits import is_allowed, refusal
from energon.messages import describe_error, type_in_words
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import SampleJoiner
from energon.samples.crude import JOINED, META_NAMES, CrudeSample, stamp
from energon.samples.field_map import FieldMap, SampleMaker, decoding_first, maker_of
from energon.samples.provenance import sources_of
from energon.samples.sample_types import resolve_class, resolve_function
from energon.sources.files.store import FileStore
from energon.sources.shard_samples import PartFilter
from energon.stages.hooks.hook import Compiled, Hook, compiled
from energon.stages.lane import active_generator
from energon.task_encoder.cooker import (
    Cooker,
    CookerArguments,
    add_sources,
    cooker_arguments,
    find_cooker,
)
from energon.task_encoder.encoder import AnyTaskEncoder, HookMaker


@dataclass(frozen=True)
class DatasetCode:
    """A function of a Python file.

    Args:
        origin: The file.
        text: What is in it.
        name: Name of the function.

    Raises:
        ConfigError: If there is no such function, or the file cannot be run.
    """

    origin: str
    text: str = field(repr=False)
    name: str

    def __post_init__(self) -> None:
        if not callable(getattr(self._module, self.name, None)):
            raise ConfigError(f"{self.origin}: has no function {self.name!r}")

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return getattr(self._module, self.name)(*arguments)

    @property
    def _module(self) -> ModuleType:
        return _run(self.origin, self.text)


@dataclass(frozen=True)
class CodeFields:
    """Makes the fields of a sample from its parts with a function.

    Args:
        loader: The function.
        sample_type: What the fields belong to.
        parts: Which parts it needs.
    """

    loader: Callable[[Any], Any]
    sample_type: type
    parts: Collection[str] | PartFilter

    def maker(self, sample_type: type, decoder: Callable[[Any], Any] | None = None) -> SampleMaker:
        """Return a function that makes a `sample_type` from parts, see `FieldMap.maker`."""
        return decoding_first(maker_of(self.apply, sample_type), decoder)

    def apply(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the fields.

        Raises:
            SampleError: If the function returns something else.
        """
        made = self.loader(parts)
        if not isinstance(made, Mapping):
            raise SampleError(
                f"{self.loader} returned {type_in_words(made)}, expected a dict of the fields "
                f"of {self.sample_type.__name__}"
            )
        if is_dataclass(self.sample_type):
            names = {own.name for own in fields(self.sample_type)}
            unknown = [name for name in made if name not in names]
            if unknown:
                raise SampleError(
                    f"{self.loader} returned {unknown[0]!r}, which is not a field of "
                    f"{self.sample_type.__name__}"
                )
        return dict(made)


def find_code(
    config: DatasetConfig, dataset: str, key: str, spec: str, allow: Collection[str]
) -> DatasetCode:
    """Return the function that a key of `dataset.yaml` names as `file.py:function`.

    Args:
        config: The description.
        dataset: Address of the dataset.
        key: The key, which is the name of the function if none is written.
        spec: What is written.
        allow: What the user allows.

    Raises:
        SecurityError: If it is not allowed.
        ConfigError: If there is no such file or function.
    """
    if not is_allowed("code", allow):
        raise refusal(
            "code", f"{config.origin}: {key} {spec!r} is code of the dataset, which is not run"
        )
    file, _, name = spec.partition(":")
    relative = posixpath.normpath(file)
    if posixpath.isabs(relative) or relative.startswith("..") or "://" in file:
        raise ConfigError(
            f"{config.origin}: {key} {spec!r} is not beside it; expected FILE.py:FUNCTION"
        )
    address = join_address(dataset, f".nv-meta/{relative}")
    try:
        text = read_text(address)
    except FileNotFoundError as error:
        raise ConfigError(f"{config.origin}: {key} {spec!r}: there is no {file}") from error
    return DatasetCode(redact(address), text, name or key)


@lru_cache(maxsize=64)
def _run(origin: str, text: str) -> ModuleType:
    """Return the file as a module; it runs once per process."""
    digest = hashlib.sha256(f"{origin}\0{text}".encode()).hexdigest()[:16]
    module = ModuleType(f"energon_dataset_code_{digest}")
    module.__file__ = origin
    # Dataclasses and pickle look for their module there.
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, origin, "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        raise ConfigError(f"{origin}: {describe_error(error)}") from error
    return module


_MODULES = ("energon", "megatron.energon")
_SETTINGS = (
    *("image_decode", "image_size", "min_size", "random_resized_crop", "exact_resize"),
    *("max_enlargement", "av_decode", "video_decode_audio", "guess_content"),
)
"""Settings of decoders that a document may make; anything that decides which code runs is not."""


class Inherited(Enum):
    """Stands for the decoder of the task encoder."""

    DECODER = "that of the task encoder"


LoadFunction = Callable[[CrudeSample], Any]
"""Makes a sample from the bytes of its parts."""

LeafDecoder = SampleDecoder | LoadFunction | None | Inherited


def leaf_decoder(config: DatasetConfig) -> LeafDecoder:
    """Return the decoder that a `dataset.yaml` names; None if it disables decoding.

    Raises:
        ConfigError: If it is not a `SampleDecoder`, or its settings are invalid.
    """
    if "decoder" not in config.given:
        return Inherited.DECODER
    if config.decoder is None:
        return None
    settings = dict(config.decoder)
    named = settings.pop("__module__", _MODULES[0]), settings.pop("__class__", "SampleDecoder")
    if named not in {(module, "SampleDecoder") for module in _MODULES}:
        raise ConfigError(
            f"{config.origin}: decoder {'.'.join(map(str, named))} is not known; expected a "
            "SampleDecoder. Set another one as `decoder` of the task encoder"
        )
    for name in settings:
        if name not in _SETTINGS:
            raise ConfigError(
                f"{config.origin}: decoder has no setting {name!r} here, only "
                f"{', '.join(_SETTINGS)}; set others in the `decoder` of the task encoder"
            )
    try:
        return SampleDecoder(**settings)
    except ConfigError as error:
        raise ConfigError(f"{config.origin}: decoder: {error}") from error


def permitted(decoder: Any, allow: Collection[str]) -> Any:
    """Return a decoder that may unpickle if the call allows it."""
    if "pickle" in allow and isinstance(decoder, SampleDecoder):
        return replace(decoder, allow=("pickle",))
    return decoder


def seeded_if_random(decoder: LoadFunction | None) -> LoadFunction | None:
    """Return a decoder whose random numbers depend only on the key of the sample."""
    return SeededDecoder(decoder) if getattr(decoder, "is_random", False) else decoder


@dataclass(frozen=True)
class SeededDecoder:
    """Decodes parts with random numbers seeded by the sample's key, on every topology alike."""

    decoder: Any

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        """Return a dict of the same type with the parts of `sample` decoded."""
        seed = int(active_generator().integers(1 << 63))
        return self.decoder(sample, seed=seed)


@dataclass(frozen=True)
class SampleLoading:
    """How the samples of a dataset are made from the bytes of their parts.

    Args:
        sample_type: Their type; None for crude samples, which are left to cookers.
        field_map: Maps parts to the fields of `sample_type`.
        decoder: Decodes the parts.
        load: Makes typed samples, in place of the other three.
    """

    sample_type: type | None = None
    field_map: FieldMap | CodeFields | None = None
    decoder: LeafDecoder = Inherited.DECODER
    load: LoadFunction | None = None


@dataclass(frozen=True)
class LeafLoading:
    """How the samples of a leaf are made and cooked.

    Args:
        name: Its name in messages.
        dataset_path: The folder of the dataset.
        subflavors: The subflavors of the dataset and of all documents that refer to it.
        samples: How they are made from the bytes of their parts.
        aux: Auxiliary data by name, for cookers.
        primary: Opens the files of the dataset by name, for cookers that need them.
        join: The datasets that it joins; None for a single dataset.
        allow: What the user allows its samples.
    """

    name: str
    dataset_path: str
    subflavors: Mapping[str, Any]
    samples: SampleLoading = SampleLoading()
    aux: Mapping[str, FileStore[Any]] = field(default_factory=dict)
    primary: Callable[[], FileStore[Any]] | None = None
    join: JoinLoading | None = None
    allow: Collection[str] = ()


@dataclass(frozen=True)
class JoinLoading:
    """How the samples of several datasets are made, and joined into one.

    Args:
        members: How those of each dataset are made.
        names: For each, the argument of the joiner; None for the next one in order.
        joiner: Combines the samples of the members into one: the name in a document, or the
            function itself.
        allow: What the user allows a document to name.
    """

    members: tuple[LeafLoading, ...]
    names: tuple[str | None, ...]
    joiner: SampleJoiner | Callable[..., Any]
    allow: Collection[str] = ()


def load_hooks(hooks: HookMaker, loading: LeafLoading) -> tuple[Hook, ...]:
    """Return the hooks that make and cook the samples of a leaf with a single dataset."""
    encoder, load = hooks.encoder, load_function(loading, hooks.encoder)
    if not isinstance(load, LoadCrude):
        return (hooks.make("load_sample", load),)
    if not encoder.cookers:
        return (hooks.make("decode", load.decoder),) if load.decoder is not None else ()
    cooker = find_cooker(encoder.cookers, loading.subflavors, dataset=loading.name)
    cook = CookSample(load, encoder, cooker, arguments_of(cooker, loading, encoder))
    return (cook_hook(hooks, cook, cooker),)


def load_function(loading: LeafLoading, encoder: AnyTaskEncoder) -> LoadFunction:
    """Return the function that makes the samples of a single dataset."""
    samples = loading.samples
    if samples.load is not None:
        return samples.load
    inherited: LoadFunction | None = encoder.decoder
    decoder = inherited if isinstance(samples.decoder, Inherited) else samples.decoder
    decoder = seeded_if_random(permitted(decoder, loading.allow))
    if samples.sample_type is not None and samples.field_map is not None:
        return LoadSample(samples.sample_type, samples.field_map, decoder)
    return LoadCrude(decoder)


def arguments_of(
    cooker: Cooker[Any], loading: LeafLoading, encoder: AnyTaskEncoder
) -> CookerArguments:
    """Return the keyword arguments of `cooker` for the samples of a leaf."""
    return cooker_arguments(
        cooker,
        aux=loading.aux,
        primary=loading.primary,
        decoder=permitted(encoder.decoder, loading.allow),
        dataset=loading.name,
    )


def cook_hook(hooks: HookMaker, cook: Callable[[Any], Any], cooker: Cooker[Any]) -> Hook:
    """Return `cook` as a hook, run according to the marks of `cooker` or of the encoder."""
    marked = cooker.cook
    if not hasattr(marked, "__stateless__"):
        marked = hooks.encoder._hook_method("cook_crude_sample").marked
    return hooks.make("cook_crude_sample", cook, settings=marked)


def runs_user_code(loading: LeafLoading, encoder: AnyTaskEncoder) -> bool:
    """Return whether the program, or code stored with the dataset, decodes or makes its samples."""
    samples = loading.samples
    decoder = encoder.decoder if isinstance(samples.decoder, Inherited) else samples.decoder
    is_ours = type(decoder) is SampleDecoder and not any(decoder.decoders.values())
    return (
        loading.join is not None
        or samples.load is not None
        or isinstance(samples.field_map, CodeFields)
        or not (decoder is None or is_ours)
    )


def needs_sources(encoder: AnyTaskEncoder, loading: LeafLoading) -> bool:
    """Return whether samples have to carry their sources when they are read.

    Those of joins and of programs' own datasets get them later. Crude samples that neither a cooker
    nor any other code of the program sees have none.
    """
    samples = loading.samples
    if loading.join is not None or samples.load is not None:
        return False
    is_typed = samples.sample_type is not None and samples.field_map is not None
    return is_typed or bool(encoder.cookers) or not encoder._is_plain


def _with_limits(decoder: LoadFunction | None) -> LoadFunction | None:
    return decoder.with_limits() if isinstance(decoder, SampleDecoder) else decoder


@dataclass(frozen=True)
class LoadSample(Compiled):
    """Makes a typed sample from the bytes of its parts.

    Args:
        sample_type: Its type.
        field_map: Maps parts to its fields.
        decoder: Decodes the parts.
    """

    sample_type: type
    field_map: FieldMap | CodeFields
    decoder: LoadFunction | None

    def _compile(self) -> Callable[[CrudeSample], Any]:
        decoder, fields = _with_limits(self.decoder), self.field_map
        make = fields.maker(self.sample_type, decoder)
        if isinstance(fields, FieldMap) and isinstance(decoder, SampleDecoder):
            make = fields.decoding_maker(
                self.sample_type, decoder.of_part, entries=len(META_NAMES) + 1, make=make
            )
        return make

    def _of_columns(self) -> Callable[[CrudeSample], Any] | None:
        if self.decoder is not None:
            return None
        return _LoadColumns(self.field_map, self.sample_type)


@dataclass(frozen=True)
class _LoadColumns:
    """Makes a batch from columns of parts; equal for leaves whose samples may share a batch."""

    field_map: FieldMap | CodeFields
    sample_type: type

    def __call__(self, columns: CrudeSample) -> Any:
        columns["__restore_key__"] = tuple(columns["__restore_key__"])
        return self._make(columns)

    @cached_property
    def _make(self) -> Callable[..., Any]:
        return self.field_map.maker(self.sample_type)


@dataclass(frozen=True)
class LoadCrude(Compiled):
    """Decodes the parts of a crude sample.

    Args:
        decoder: Decodes the parts; None leaves them as bytes.
    """

    decoder: LoadFunction | None

    def _compile(self) -> Callable[[CrudeSample], Any]:
        return self.followed_by(None)

    def followed_by(self, then: Callable[[Any], Any] | None) -> Callable[[CrudeSample], Any]:
        """Return a function that loads a sample, and returns what `then` returns for it, if any."""
        decoder = _with_limits(self.decoder)
        if decoder is None:
            return (lambda raw: raw) if then is None else then

        def load(raw: CrudeSample) -> Any:
            sources = raw["__sources__"]
            sample = decoder(raw)
            sample["__sources__"] = sources
            return sample if then is None else then(sample)

        return load


@dataclass(frozen=True)
class CookSample(Compiled):
    """Cooks a crude sample with the cooker of its leaf."""

    load: LoadCrude
    encoder: AnyTaskEncoder
    cooker: Cooker[Any]
    arguments: CookerArguments

    def _compile(self) -> Callable[[CrudeSample], Any]:
        encoder, cooker, arguments_of = self.encoder, self.cooker, self.arguments
        if not (arguments_of or encoder._hook_method("cook_crude_sample").overridden):
            return self.load.followed_by(cooker.cook)

        def cook(sample: CrudeSample) -> Any:
            arguments = arguments_of(sample["__key__"])
            cooked = encoder.cook_crude_sample(sample, cooker, arguments)
            return add_sources(cooked, sample) if arguments else cooked

        return self.load.followed_by(cook)


def join_hooks(hooks: HookMaker, loading: LeafLoading, join: JoinLoading) -> tuple[Hook, ...]:
    """Return the hooks that make, join and cook the samples of a leaf that joins datasets."""
    encoder = hooks.encoder
    loaders = tuple(load_function(member, encoder) for member in join.members)
    paths = tuple(member.dataset_path for member in join.members)
    joiner = join.joiner
    if isinstance(joiner, SampleJoiner):
        joiner = find_joiner(joiner, join.allow)
    joined = hooks.make("join", JoinSample(loaders, paths, join.names, joiner))
    try:
        cooker = find_cooker(encoder.cookers, loading.subflavors, dataset=loading.name)
    except ConfigError:  # no cooker applies, which is right if the joiner returns typed samples
        return (joined,)
    cook = CookJoined(encoder, cooker, arguments_of(cooker, loading, encoder))
    return joined, cook_hook(hooks, cook, cooker)


@dataclass(frozen=True)
class JoinSample(Compiled):
    """Combines the samples of the datasets of a join into one.

    Args:
        loaders: Make of the bytes of a dataset's sample what the joiner gets.
        paths: The datasets.
        names: For each, the argument of the joiner; None for the next one in order.
        joiner: Gets None for what is missing.
    """

    loaders: tuple[LoadFunction, ...]
    paths: tuple[str, ...]
    names: tuple[str | None, ...]
    joiner: Callable[..., Any]

    def _compile(self) -> Callable[[CrudeSample], Any]:
        joiner = self.joiner
        loaders = [compiled(load) for load in self.loaders]

        def join(raw: CrudeSample) -> Any:
            ordered: list[Any] = []
            named: dict[str, Any] = {}
            members = zip(loaders, self.paths, self.names, raw[JOINED], strict=True)
            for load, path, name, member in members:
                sample = None
                if member is not None:
                    member["__sources__"] = sources_of(path, member)
                    sample = load(member)
                if name is None:
                    ordered.append(sample)
                else:
                    named[name] = sample
            joined = joiner(*ordered, **named)
            # Joiners pass on the key of one of the datasets, which has numbers of its own.
            stamp(joined, raw["__restore_key__"])
            return joined

        return join


@dataclass(frozen=True)
class CookJoined:
    """Cooks the result of a joiner if it is crude, that is, a dict."""

    encoder: AnyTaskEncoder
    cooker: Cooker[Any]
    arguments: CookerArguments

    def __call__(self, sample: Any) -> Any:
        """Return the cooked sample; samples that are not crude are returned unchanged."""
        if not isinstance(sample, dict):
            return sample
        crude = sample if isinstance(sample, CrudeSample) else CrudeSample(sample)
        return self.encoder.cook_crude_sample(crude, self.cooker, self.arguments(crude["__key__"]))


def find_joiner(joiner: SampleJoiner, allow: Collection[str] = ()) -> Callable[..., Any]:
    """Return the joiner that the document names.

    Args:
        joiner: The name.
        allow: Allowed actions: a function needs "code", a sample type of the program nothing.

    Raises:
        ConfigError: If there is no such name, or it cannot join.
        SecurityError: If it needs what is not allowed.
    """
    try:
        if not joiner.is_type:
            return resolve_function(joiner.module, joiner.name, allow=allow)
        kind = resolve_class(joiner.module, joiner.name, allow=allow)
    except (ConfigError, SecurityError) as error:
        raise type(error)(f"{joiner.origin}: {error}") from error
    if not (isinstance(kind, type) and hasattr(kind, "from_joined")):
        raise ConfigError(
            f"{joiner.origin}: {joiner.name} has no from_joined; derive it from energon.Sample, "
            "or name a __function__"
        )
    return kind.from_joined  # type: ignore[no-any-return]
