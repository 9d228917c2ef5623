"""Create objects from documents, for programs that read their own documents.

Documents may name classes of energon and those that the program has defined or imported, as decided
in `energon.samples`. `load_config` creates the object described by a YAML document, including the
datasets of leaves. The index of a JSONL file can also be read and written line by line here.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import IO, Any, Literal, Self, TypeVar, Union

from energon.allow import is_allowed
from energon.compat.megatron.datasets import others
from energon.compat.megatron.datasets import webdataset as factories
from energon.compat.megatron.datasets.arguments import (
    call_with,
    check_written,
    current_opening,
    defaults_of,
    opening_for,
    read_arguments,
)
from energon.compat.megatron.datasets.webdataset import (
    DecoderWebdatasetFactory,
    StandardWebdatasetFactory,
    WebdatasetFactory,
)
from energon.compat.megatron.names import class_of
from energon.compat.megatron.worker import note_ignored
from energon.errors import ConfigError, UnknownArgumentError
from energon.formats.meta.jsonl import jsonl_index_path
from energon.formats.meta.yaml import load
from energon.io.epath import EPath
from energon.io.files import file_info, read_bytes, read_document
from energon.metadataset.kind import kind_entry
from energon.samples.sample import Sample
from energon.samples.sample_types import resolve_class, resolve_function
from energon.task_encoder.dataset_class import DatasetCall, DatasetClass, DatasetOpening

T = TypeVar("T")

_NUMBERS = (int, float)


class JsonValueError(ConfigError):
    """A document has an unexpected value."""


@dataclasses.dataclass(frozen=True)
class JsonParser:
    """Creates objects of requested types from the content of documents.

    Args:
        strict: Whether unknown keys are errors; otherwise they are ignored.
        allow: What a document may name besides known classes, see `get_train_dataset`.
    """

    strict: bool = True
    allow: Collection[str] = ()

    def raw_to_instance(self, kwargs: Mapping[str, Any], inst_type: Any) -> Any:
        """Return the object with the class and arguments in a document.

        Args:
            kwargs: The document: arguments, optionally with `__module__` and `__class__` (or
                `__function__`, which must be allowed).
            inst_type: The class, unless the document names one, which must derive from it.

        Raises:
            JsonValueError: If the class is invalid, or does not accept the arguments.
            SecurityError: If the document names something that is not allowed.
        """
        given = dict(kwargs)
        module, name = given.pop("__module__", None), given.pop("__class__", None)
        function = given.pop("__function__", None)
        if function is not None:
            return resolve_function(str(module), str(function), allow=self.allow)(**given)
        kind = inst_type if name is None else self._class(str(module), str(name), inst_type)
        return self.safe_call_function(given, kind)

    def raw_to_typed(self, raw_data: Any, inst_type: Any, allow_imports: bool = True) -> Any:
        """Convert a value of a document to a type.

        Args:
            raw_data: The value.
            inst_type: A class, a dataclass, or a type like `list[int] | None`.
            allow_imports: Whether it may name classes.

        Raises:
            JsonValueError: If it cannot be converted.
        """
        origin, inner = typing.get_origin(inst_type), typing.get_args(inst_type)
        if inst_type in (Any, None) or isinstance(inst_type, TypeVar):
            return raw_data
        if origin in (Union, UnionType):
            return self._any_of(raw_data, inner, allow_imports)
        if origin is Literal:
            if raw_data in inner:
                return raw_data
            raise _unlike(raw_data, inst_type)
        if origin in (list, tuple, set):
            return self._elements(raw_data, origin, inner, allow_imports)
        if origin is dict or inst_type is dict:
            if not isinstance(raw_data, Mapping):
                raise _unlike(raw_data, inst_type)
            keys, values = inner or (Any, Any)
            return {
                self.raw_to_typed(key, keys): self.raw_to_typed(value, values, allow_imports)
                for key, value in raw_data.items()
            }
        if origin is type:
            names = raw_data if isinstance(raw_data, Mapping) else {}
            return self._class(str(names.get("__module__")), str(names.get("__class__")), inner[0])
        return self._simple(raw_data, inst_type, allow_imports)

    def safe_call_function(
        self, raw_data: Mapping[str, Any], fn: Callable[..., T], allow_imports: bool = True
    ) -> T:
        """Call a function with arguments from a document, converted to its annotated types.

        Raises:
            JsonValueError: If it does not accept the arguments.
        """
        target: Any = vars(fn).get("__init__", fn) if isinstance(fn, type) else fn
        try:
            hints = typing.get_type_hints(target)
        except (NameError, TypeError, AttributeError):
            hints = {}
        fields = getattr(fn, "__dataclass_fields__", None)
        given = {
            name: self.raw_to_typed(value, hints.get(name, Any), allow_imports)
            for name, value in raw_data.items()
            if self.strict or fields is None or name in fields
        }
        try:
            return call_with(fn, given, {}, origin="document")
        except ConfigError as error:
            raise JsonValueError(str(error)) from error

    def override(self, value: T, overrides: Mapping[str, Any], inst_type: Any = None) -> T:
        """Return a copy of a dataclass or dict with some of its fields replaced.

        Args:
            value: The object.
            overrides: New values by name; dotted names refer to fields of inner objects.
            inst_type: Has no effect.
        """
        changes: dict[str, Any] = {}
        inner: dict[str, dict[str, Any]] = {}
        for name, new in overrides.items():
            first, dot, rest = name.partition(".")
            if dot:
                inner.setdefault(first, {})[rest] = new
            else:
                changes[name] = new
        for name, below in inner.items():
            old = value[name] if isinstance(value, dict) else getattr(value, name)
            changes[name] = self.override(old, below)
        if isinstance(value, dict):
            return {**value, **changes}  # type: ignore[return-value]
        hints = typing.get_type_hints(type(value))
        typed = {
            name: new if name in inner else self.raw_to_typed(new, hints.get(name, Any))
            for name, new in changes.items()
        }
        return dataclasses.replace(value, **typed)  # type: ignore[type-var]

    def _class(self, module: str, name: str, expected: Any) -> Any:
        kind = typing.get_origin(expected) or expected
        base = kind if isinstance(kind, type) else object
        # Where any type is accepted, a document must not choose from all classes of the program.
        kinds = () if base is object else (base,)
        named = None if base is object else class_of(name, base)
        ours = {} if named is None else {name: named}
        resolved = resolve_class(module, name, allow=self.allow, kinds=kinds, ours=ours)
        if is_allowed("code", self.allow) and not (
            isinstance(resolved, type) and issubclass(resolved, base)
        ):
            raise JsonValueError(f"{module}.{name} is not a {base.__name__}")
        return resolved

    def _any_of(self, raw: Any, kinds: Collection[Any], allow_imports: bool) -> Any:
        if raw is None and NoneType in kinds:
            return None
        problems = []
        for kind in kinds:
            try:
                return self.raw_to_typed(raw, kind, allow_imports)
            except JsonValueError as error:
                problems.append(str(error))
        raise JsonValueError("; ".join(problems))

    def _elements(self, raw: Any, origin: Any, inner: Any, allow_imports: bool) -> Any:
        if not isinstance(raw, list | tuple):
            raise _unlike(raw, origin)
        if origin is tuple and inner and inner[-1] is not Ellipsis:
            if len(inner) != len(raw):
                raise JsonValueError(f"expected {len(inner)} values, found {len(raw)}: {raw!r}")
            kinds = list(inner)
        else:
            kinds = [inner[0] if inner else Any] * len(raw)
        return origin(
            self.raw_to_typed(each, kind, allow_imports)
            for each, kind in zip(raw, kinds, strict=True)
        )

    def _simple(self, raw: Any, kind: Any, allow_imports: bool) -> Any:
        if kind is NoneType:
            if raw is not None:
                raise _unlike(raw, kind)
            return None
        if not isinstance(kind, type) or (isinstance(raw, kind) and not _is_bool(raw, kind)):
            return raw
        if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
            return float(raw)
        if issubclass(kind, Enum):
            names = {member.name.lower(): member for member in kind}
            if isinstance(raw, str) and raw.lower() in names:
                return names[raw.lower()]
        elif isinstance(raw, str) and issubclass(kind, EPath | Path):
            return kind(raw)
        elif isinstance(raw, Mapping) and (allow_imports or "__class__" not in raw):
            return self.raw_to_instance(raw, kind)
        raise _unlike(raw, kind)


def to_json_object(obj: Any) -> Any:
    """Return an object as plain data, from which `JsonParser` recreates it, given its type."""
    if isinstance(obj, Enum):
        return obj.name
    if isinstance(obj, type):
        return {"__module__": obj.__module__, "__class__": obj.__qualname__}
    if isinstance(obj, FunctionType):
        return {"__module__": obj.__module__, "__function__": obj.__qualname__}
    names: Iterable[str] = getattr(obj, "_fields", ())  # of named tuples
    if dataclasses.is_dataclass(obj):
        names = [field.name for field in dataclasses.fields(obj) if field.init]
    if names:
        return {name: to_json_object(getattr(obj, name)) for name in names}
    if isinstance(obj, Mapping):
        return {str(key): to_json_object(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple | set):
        return [to_json_object(each) for each in obj]
    return str(obj) if isinstance(obj, EPath | Path) else obj


def _is_bool(raw: Any, kind: type) -> bool:
    return isinstance(raw, bool) and kind in _NUMBERS


def _unlike(raw: Any, kind: Any) -> JsonValueError:
    return JsonValueError(f"expected {getattr(kind, '__name__', kind)}, found {raw!r}")


IJSONL_SUFFIX = ".jsonl.idx"
_ENTRY = struct.Struct("<Q")


class IJsonlIndexReader:
    """Reads the start of each line of an indexed JSONL file, and the end of the last, in bytes.

    Args:
        jsonl_path: The JSONL file.
    """

    def __init__(self, jsonl_path: str | os.PathLike[str]) -> None:
        self._data = read_bytes(jsonl_index_path(os.fspath(jsonl_path)))

    def __len__(self) -> int:
        return len(self._data) // _ENTRY.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"entry {index} of an index that has {len(self)}")
        return int(_ENTRY.unpack_from(self._data, index * _ENTRY.size)[0])

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(len(self)))

    def close(self) -> None:
        """Do nothing: the file was closed after it was read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @staticmethod
    def count_samples(jsonl_path: str | os.PathLike[str]) -> int:
        """Return the number of lines of an indexed file."""
        info = file_info(jsonl_index_path(os.fspath(jsonl_path)))
        if info is None:
            raise FileNotFoundError(f"{jsonl_path} is not indexed; run `energon prepare` on it")
        return info.size // _ENTRY.size - 1

    @staticmethod
    def size(jsonl_path: str | os.PathLike[str]) -> int:
        """Return the end of the last line."""
        reader = IJsonlIndexReader(jsonl_path)
        return reader[len(reader) - 1]


class IJsonlIndexWriter:
    """Writes an index: `append` the start of each line, and the end of the last one.

    The index appears when the block ends without an error.

    Args:
        jsonl_path: The JSONL file.
    """

    def __init__(self, jsonl_path: str | os.PathLike[str]) -> None:
        self.jsonl_path = EPath(jsonl_path)
        self.final_name = EPath(jsonl_index_path(os.fspath(jsonl_path)))
        self.tmp_name = EPath(f"{self.final_name}.tmp")
        self.ijsonl: IO[Any] = self.tmp_name.open("wb")

    def append(self, offset: int) -> None:
        """Add the start of a line, or the end of the last."""
        self.ijsonl.write(_ENTRY.pack(offset))

    def close(self, finalize: bool = True) -> None:
        """Close the index and move it into place or, unless `finalize`, delete it."""
        self.ijsonl.close()
        if finalize:
            self.tmp_name.move(self.final_name)
        else:
            self.tmp_name.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finalize=kind is None)


def load_config(
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    default_type: type[T],
    default_kwargs: Mapping[str, Any] | None = None,
    parser: Any = None,
    allow: Collection[str] = (),
) -> T:
    """Return the object described by a YAML document: a type and its arguments.

    A program may replace this function in `megatron.energon.dataset_config` to change how the
    getters open datasets.

    Args:
        path: The file, or the document as a dict.
        default_type: The type, unless the document names one with `__module__` and `__class__`.
        default_kwargs: Arguments that the document may omit.
        parser: Has no effect, as is logged once: documents are data, types in them are looked up by
            name.
        allow: What a document may name besides the dataset classes and sample types known to this
            program: "code" lets it import modules and call anything.

    Raises:
        ConfigError: If the document is invalid.
        SecurityError: If it names something that is not allowed.
    """
    note_ignored("types in documents are looked up by name", parser=parser is not None)
    document = path if isinstance(path, Mapping) else load(read_document(path), origin=str(path))
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path}: expected a mapping, found {type(document).__name__}")
    opening, origin = current_opening(), "document" if document is path else str(path)
    allow = allow or (() if opening is None else opening.allow)
    written = dict(document)
    module, name = written.pop("__module__", None), written.pop("__class__", None)
    given = read_arguments(written, origin=origin, allow=allow)
    kind: Any = default_type
    if name is not None:
        kind = _find(str(module), str(name), allow, default_type)
    defaults = dict(default_kwargs or {})
    if isinstance(kind, type) and issubclass(kind, WebdatasetFactory):
        if not issubclass(kind, DecoderWebdatasetFactory):
            defaults.pop("decoder", None)
        if opening is not None:
            given = check_written(given, opening)
    config: T = call_with(kind, given, defaults, origin=origin)
    return config


def _find(module: str, name: str, allow: Collection[str], default: Any) -> Any:
    """Return the named class: a dataset class, a sample type, or a subclass of the default."""
    ours: dict[str, type] = _DATASET_CLASSES
    kinds: tuple[type, ...] = (Sample, DatasetClass)
    if isinstance(default, type) and default is not object:
        kinds = (*kinds, default)
        if name not in ours and (named := class_of(name, default)) is not None:
            ours = {**ours, name: named}
    return resolve_class(module, name, allow=allow, kinds=kinds, ours=ours)


_DATASET_CLASSES: dict[str, type] = {
    "DefaultDecoderWebdataset": DecoderWebdatasetFactory,
    "DefaultDecoderWebdatasetFactory": DecoderWebdatasetFactory,
    "DefaultGenericWebdataset": factories.GenericWebdatasetFactory,
    "DefaultGenericWebdatasetFactory": factories.GenericWebdatasetFactory,
} | {
    name: value
    for place in (factories, others)
    for name, value in vars(place).items()
    if isinstance(value, type) and issubclass(value, WebdatasetFactory)
}


@dataclass(frozen=True)
class GetterCall(DatasetCall):
    """The call of a getter of `megatron.energon`.

    Args:
        arguments: Arguments that the getter does not know, which are for the datasets.
        as_factories: Whether each dataset of shards becomes an object of its class.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
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
