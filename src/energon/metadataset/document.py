"""Read a metadataset from a file or from values in memory, and collect all of its problems."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from energon.errors import ConfigError, DatasetNotFoundError, FormatError
from energon.formats.meta.yaml import MarkedMap, Seq, as_configuration, load, marked_like, where
from energon.io.address import is_remote, parent_address, redact
from energon.io.files import read_document
from energon.metadataset.kind import dataset_kind
from energon.metadataset.leaf import absolute
from energon.metadataset.variables import substitute

if TYPE_CHECKING:
    from energon.metadataset.grammar import Document, DocumentV1


@dataclass(frozen=True)
class Metadataset:
    """A document that follows the grammar.

    Args:
        origin: Its file, or "document".
        folder: The folder that relative paths start from.
        content: Its content.
    """

    origin: str
    folder: str
    content: Document | DocumentV1


@dataclass(frozen=True)
class BrokenMetadataset:
    """A document that does not.

    Args:
        folder: The folder that relative paths start from.
        raw: Its content as far as it could be read.
        message: Its problems, one per line.
    """

    folder: str
    raw: MarkedMap
    message: str


def read_metadataset(source: str | Mapping[str, Any], allow: Collection[str] = ()) -> Metadataset:
    """Return the document at an address, or in a mapping.

    Args:
        source: Its address, or its content, in which relative paths start from the working
            directory.
        allow: "env" permits references to environment variables, if it is on this machine.

    Raises:
        ConfigError: If it is not YAML, or breaks the grammar; names every location where it does.
        SecurityError: If it reads the environment and may not.
    """
    parsed = parse_metadataset(source, allow)
    if isinstance(parsed, BrokenMetadataset):
        raise ConfigError(parsed.message)
    return parsed


def parse_metadataset(
    source: str | Mapping[str, Any], allow: Collection[str] = ()
) -> Metadataset | BrokenMetadataset:
    """Return the document at an address or in a mapping, whether or not it follows the grammar.

    Raises:
        ConfigError: If it is not YAML, or not a mapping.
        SecurityError: If it reads the environment and may not.
    """
    # pydantic takes 70 ms to import, and datasets without a metadataset do not need it.
    from pydantic import ValidationError

    from energon.metadataset.problems import explain

    if isinstance(source, Mapping):
        origin, folder = "document", os.getcwd()
        raw = source if isinstance(source, MarkedMap) else _mark(source, origin)
    else:
        origin, folder = redact(source), parent_address(source)
        with as_configuration():
            raw = load(read_document(source), origin=origin)
    if not isinstance(raw, MarkedMap):
        raise ConfigError(
            f"{origin}: {_description(raw)}; expected a metadataset, which has `splits:`"
        )
    model = _version(raw)
    is_elsewhere = isinstance(source, str) and is_remote(source)
    raw, unresolved = substitute(_without_extensions(raw), is_remote=is_elsewhere, allow=allow)
    try:
        content = model.model_validate(raw)
    except ValidationError as exc:
        return BrokenMetadataset(folder, raw, explain(exc, model, raw, unresolved))
    if unresolved:
        return BrokenMetadataset(folder, raw, explain(None, model, raw, unresolved))
    return Metadataset(origin, folder, content)


def paths_in(raw: MarkedMap, split_part: str) -> Iterator[tuple[str, str]]:
    """Yield the paths in a split of a possibly broken document, with the location of each."""
    splits = raw.get("splits")
    if isinstance(splits, Mapping):
        yield from _paths_below(splits.get(split_part))


def _paths_below(node: Any) -> Iterator[tuple[str, str]]:
    if isinstance(node, Seq):
        for entry in node:
            yield from _paths_below(entry)
    elif isinstance(node, MarkedMap):
        path = node.get("path")
        if isinstance(path, str) and "${" not in path:
            yield where(node, "path"), path
        for key in ("blend", "blend_epochized", "concat", "datasets"):
            yield from _paths_below(node.get(key))
        members = node.get("join")
        yield from _paths_below(
            Seq(members.values()) if isinstance(members, MarkedMap) else members
        )


def _description(raw: Any) -> str:
    if raw is None:
        return "is empty"
    return "holds a list" if isinstance(raw, Seq) else f"is {raw!r:.60}"


def _version(raw: Mapping[str, Any]) -> type[Document] | type[DocumentV1]:
    """Return the version of a document, from its `__class__` or the key `datasets`."""
    from energon.metadataset.grammar import Document, DocumentV1

    name = raw.get("__class__")
    if name is not None:
        return DocumentV1 if name == "Metadataset" else Document
    splits = raw.get("splits")
    nodes = splits.values() if isinstance(splits, Mapping) else ()
    has_datasets = any(isinstance(node, Mapping) and "datasets" in node for node in nodes)
    return DocumentV1 if has_datasets else Document


def _without_extensions(raw: MarkedMap) -> MarkedMap:
    """Return the document without keys that begin with `x-`, which only define anchors."""
    kept = {key: value for key, value in raw.items() if not str(key).startswith("x-")}
    document: MarkedMap = marked_like(MarkedMap(kept), raw)
    return document


def _mark(value: Any, path: str) -> Any:
    """Return a copy of `value` whose parts know their path in the document."""
    marked: MarkedMap | Seq
    if isinstance(value, Mapping):
        marked = MarkedMap({key: _mark(item, f"{path}.{key}") for key, item in value.items()})
        marked.marks = {}
    elif isinstance(value, list | tuple):
        marked = Seq(_mark(item, f"{path}[{index}]") for index, item in enumerate(value))
        marked.marks = []
    else:
        return value
    marked.origin, marked.mark = path, None
    return marked


_LOCATION = re.compile(r"(\S.*?):(\d+):(\d+): ")


class Problems:
    """The problems found while reading documents."""

    def __init__(self) -> None:
        self._problems: list[Exception] = []

    @contextmanager
    def kept(self, location: str = "") -> Iterator[None]:
        """Collect a problem raised in the block instead of raising it.

        Args:
            location: Prefix for messages that do not name a location.
        """
        try:
            yield
        except (ConfigError, DatasetNotFoundError, FormatError) as exc:
            self._problems.append(_located(exc, location))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._problems)

    def keep_broken(self, document: BrokenMetadataset, split_part: str) -> None:
        """Collect the problems of a document, and missing paths in one of its splits."""
        self._problems.append(ConfigError(document.message))
        for address, path in paths_in(document.raw, split_part):
            try:
                dataset_kind(absolute(path, document.folder))
            except (ConfigError, DatasetNotFoundError) as exc:
                self._problems.append(DatasetNotFoundError(f"{address}: {exc}"))

    def raise_all(self) -> None:
        """Raise all problems, if any, as one error.

        Raises:
            ConfigError: If problems have several types; a single type is raised as such.
        """
        if not self._problems:
            return
        if len(self._problems) == 1:
            raise self._problems[0]
        kinds = {type(problem) for problem in self._problems}
        kind = kinds.pop() if len(kinds) == 1 else ConfigError
        messages = dict.fromkeys(
            message for problem in self._problems for message in _messages(str(problem))
        )
        raise kind("\n".join(_in_order(messages)))


def _located(problem: Exception, location: str) -> Exception:
    if not location or str(problem).startswith(location) or _LOCATION.match(str(problem)):
        return problem
    located = type(problem)(f"{location}: {problem}")
    located.__cause__ = problem
    return located


def _messages(text: str) -> list[str]:
    """Split a text into messages: each begins with a location and may span several lines."""
    messages: list[str] = []
    for line in text.splitlines():
        if messages and not _LOCATION.match(line):
            messages[-1] += f"\n{line}"
        else:
            messages.append(line)
    return messages


def _in_order(messages: Iterable[str]) -> list[str]:
    """Sort messages by their location in each file, keeping the order of the files."""
    files: dict[str, int] = {}

    def location(message: str) -> tuple[int, ...]:
        match = _LOCATION.match(message)
        if match is None:
            return (len(files),)
        file, row, column = match.groups()
        return files.setdefault(file, len(files)), int(row), int(column)

    locations = {message: location(message) for message in messages}
    return sorted(locations, key=locations.__getitem__)
