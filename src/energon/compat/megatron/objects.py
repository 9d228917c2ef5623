"""Read the documents of a program as objects of its types, and indexes of JSONL line by line.

Documents may name classes of energon and those that the program has defined or imported, as decided
in `energon.samples`.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import UnionType
from typing import IO, Any, Literal, Self, TypeVar, Union

import numpy as np

from energon.compat.megatron.datasets.arguments import call_with, named_class
from energon.errors import ConfigError
from energon.formats.meta.jsonl import jsonl_index_path
from energon.io.epath import EPath
from energon.io.files import read_bytes
from energon.limits import is_allowed
from energon.samples.sample_types import resolve_function

T = TypeVar("T")


class JsonValueError(ConfigError):
    """A document has an unexpected value."""


@dataclass(frozen=True)
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
        kind, inner = typing.get_origin(inst_type) or inst_type, typing.get_args(inst_type)
        convert = partial(self.raw_to_typed, allow_imports=allow_imports)
        is_bool = isinstance(raw_data, bool) and kind in (int, float)
        if kind in (Any, None):
            return raw_data
        if kind in (Union, UnionType):
            problems = []
            for each in inner:
                try:
                    return convert(raw_data, each)
                except JsonValueError as error:
                    problems.append(str(error))
            raise JsonValueError("; ".join(problems))
        if kind in (list, tuple, set) and isinstance(raw_data, list | tuple):
            is_fixed = kind is tuple and inner and inner[-1] is not Ellipsis
            kinds = inner if is_fixed else (inner or (Any,))[:1] * len(raw_data)
            if len(kinds) == len(raw_data):
                return kind(map(convert, raw_data, kinds))
        elif kind is dict and isinstance(raw_data, Mapping):
            of_keys, of_values = inner or (Any, Any)
            return {convert(k, of_keys): convert(v, of_values) for k, v in raw_data.items()}
        elif kind is type and inner:
            names = raw_data if isinstance(raw_data, Mapping) else {}
            return self._class(str(names.get("__module__")), str(names.get("__class__")), inner[0])
        elif kind is Literal:
            if raw_data in inner:
                return raw_data
        elif not isinstance(kind, type) or (isinstance(raw_data, kind) and not is_bool):
            return raw_data
        elif kind is float and type(raw_data) is int:
            return float(raw_data)
        elif issubclass(kind, Enum) and isinstance(raw_data, str):
            for member in kind:
                if member.name.lower() == raw_data.lower():
                    return member
        elif isinstance(raw_data, str) and issubclass(kind, EPath | Path):
            return kind(raw_data)
        elif isinstance(raw_data, Mapping) and (allow_imports or "__class__" not in raw_data):
            return self.raw_to_instance(raw_data, kind)
        expected = getattr(inst_type, "__name__", inst_type)
        raise JsonValueError(f"expected {expected}, found {raw_data!r}")

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

    def _class(self, module: str, name: str, expected: Any) -> Any:
        kind = typing.get_origin(expected) or expected
        base = kind if isinstance(kind, type) else object
        # Where any type is accepted, a document must not choose from all classes of the program.
        resolved = named_class(module, name, self.allow, () if base is object else (base,))
        if is_allowed("code", self.allow) and not (
            isinstance(resolved, type) and issubclass(resolved, base)
        ):
            raise JsonValueError(f"{module}.{name} is not a {base.__name__}")
        return resolved


IJSONL_SUFFIX = ".jsonl.idx"


class IJsonlIndexReader:
    """Reads the start of each line of an indexed JSONL file, and the end of the last, in bytes.

    Args:
        jsonl_path: The JSONL file.
    """

    def __init__(self, jsonl_path: str | os.PathLike[str]) -> None:
        self._offsets = np.frombuffer(read_bytes(jsonl_index_path(os.fspath(jsonl_path))), "<u8")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> int:
        return int(self._offsets[index])

    def close(self) -> None:
        """Do nothing: the file was closed after it was read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @staticmethod
    def count_samples(jsonl_path: str | os.PathLike[str]) -> int:
        """Return the number of lines of an indexed file."""
        return len(IJsonlIndexReader(jsonl_path)) - 1

    @staticmethod
    def size(jsonl_path: str | os.PathLike[str]) -> int:
        """Return the end of the last line."""
        return IJsonlIndexReader(jsonl_path)[-1]


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
        self.ijsonl.write(offset.to_bytes(8, "little"))

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
