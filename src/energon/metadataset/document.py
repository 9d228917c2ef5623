"""Read a metadataset from a file or from values in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from energon.errors import ConfigError
from energon.formats.yaml import Map, Seq, load, marked_like
from energon.io.address import parent_address, redact
from energon.io.files import read_bytes
from energon.metadataset.variables import substitute

if TYPE_CHECKING:
    from energon.metadataset.grammar import Document
    from energon.metadataset.grammar_v1 import DocumentV1


@dataclass(frozen=True)
class Metadataset:
    """A document that keeps to the grammar.

    Args:
        origin: Its file, or "document".
        folder: What relative paths in it start from.
        content: What is written.
    """

    origin: str
    folder: str
    content: Document | DocumentV1


def read_metadataset(path: str) -> Metadataset:
    """Return the document at address `path`.

    Raises:
        FormatError: If it is not YAML.
        ConfigError: If it breaks the grammar; names every place where it does.
    """
    origin = redact(path)
    raw = load(read_bytes(path), origin=origin)
    return Metadataset(origin, parent_address(path), _validate(raw, origin))


def read_mapping(document: Mapping[str, Any]) -> Metadataset:
    """Return `document`, in which relative paths start from the working directory.

    Raises:
        ConfigError: If it breaks the grammar; names every place where it does.
    """
    raw = document if isinstance(document, Map) else _mark(document, "document")
    return Metadataset("document", os.getcwd(), _validate(raw, "document"))


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of metadatasets, for editors that complete and check YAML.

    It is shipped as `schema.json` beside this file.
    """
    from pydantic import TypeAdapter

    from energon.metadataset.grammar import Document
    from energon.metadataset.grammar_v1 import DocumentV1

    schema = TypeAdapter(Document | DocumentV1).json_schema(by_alias=True)
    models = schema["$defs"]
    for model in models.values():
        properties = model.get("properties", {})
        model["properties"] = {name: _or_variable(each) for name, each in properties.items()}
    for name in ("Document", "DocumentV1"):
        models[name]["patternProperties"] = {"^x-": {}}
    models["Variable"] = {
        "type": "string",
        "pattern": r"\$\{.+\}",
        "description": "A variable of `vars` or of the environment",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value that may also be a reference like `${name}`."""
    if schema.get("type") == "string" and not {"enum", "const"} & set(schema):
        return schema
    return {"anyOf": [schema, {"$ref": "#/$defs/Variable"}]}


def _validate(raw: Any, origin: str) -> Document | DocumentV1:
    # pydantic takes 70 ms to import, and a dataset without a metadataset does not need it.
    from pydantic import ValidationError

    from energon.metadataset.problems import explain

    if not isinstance(raw, Map):
        found = (
            "is empty"
            if raw is None
            else "holds a list"
            if isinstance(raw, Seq)
            else f"is {raw!r:.60}"
        )
        raise ConfigError(f"{origin}: {found}; wanted is a metadataset, which has `splits:`")
    model = _version(raw)
    raw = substitute(_without_extensions(raw), allow_environment="://" not in origin)
    try:
        return model.model_validate(raw)
    except ValidationError as exc:
        raise ConfigError(explain(exc, model, raw)) from exc


def _version(raw: Mapping[str, Any]) -> type[Document] | type[DocumentV1]:
    """Return the version that a document is written in: `__class__` decides, or `datasets`."""
    from energon.metadataset.grammar import Document
    from energon.metadataset.grammar_v1 import DocumentV1

    name = raw.get("__class__")
    if name is not None:
        return DocumentV1 if name == "Metadataset" else Document
    splits = raw.get("splits")
    nodes = splits.values() if isinstance(splits, Mapping) else ()
    has_datasets = any(isinstance(node, Mapping) and "datasets" in node for node in nodes)
    return DocumentV1 if has_datasets else Document


def _without_extensions(raw: Map) -> Map:
    """Return the document without keys that begin with `x-`, which hold what anchors name."""
    kept = {key: value for key, value in raw.items() if not str(key).startswith("x-")}
    if len(kept) == len(raw):
        return raw
    document: Map = marked_like(Map(kept), raw)
    return document


def _mark(value: Any, path: str) -> Any:
    """Return a copy of `value` whose parts know their path in the document."""
    marked: Map | Seq
    if isinstance(value, Mapping):
        marked = Map({key: _mark(item, f"{path}.{key}") for key, item in value.items()})
        marked.marks = {}
    elif isinstance(value, list | tuple):
        marked = Seq(_mark(item, f"{path}[{index}]") for index, item in enumerate(value))
        marked.marks = []
    else:
        return value
    marked.origin, marked.mark = path, None
    return marked
