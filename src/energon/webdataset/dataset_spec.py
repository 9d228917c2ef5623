"""Datasets as YAML documents: shards from several places, in proportions, with options.

    dataset:
      - shards: gs://bucket/scans-{000000..000033}.tar
        scaleprob: 0.3
      - shards: gs://bucket/photos-{000000..000022}.tar
        weight: 2
        extensions: nrm.jpg
        options: {language: en}

An older form, with `datasets` and what to draw of each in an epoch, is read, too:

    prefix: s3://
    datasets:
      - name: scans
        buckets: [bucket]
        shards: scans-{000000..000033}.tar
        choose: 10
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field, ValidationError

from energon.errors import ConfigError
from energon.formats.yaml import Map, load
from energon.io.address import join_address, parent_address, redact, scheme_of
from energon.io.files import read_bytes
from energon.metadataset.grammar_nodes import Node
from energon.metadataset.problems import explain
from energon.webdataset.urls import expand_urls

Names = str | list[str]
Fraction = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]

OPTION_NAMES = ("scale", "scaleprob")


class Source(Node):
    """Shards that belong together, and what is special about them."""

    shards: Names
    """Patterns of addresses; relative ones start from the folder of the document."""
    name: str | None = None
    weight: Number | None = None
    """Share of the shards that are drawn, relative to the other sources; None means as many as
    it has. If any source has a weight, shards are drawn at random, without end."""
    extensions: Names | None = None
    """The fields to read, with spaces or semicolons between them; None means all."""
    scale: tuple[float, float] | None = Field(default=None, strict=False)
    """For the program: found in `__options__` of the samples."""
    scaleprob: Fraction | None = None
    """For the program: found in `__options__` of the samples."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For the program: found in `__options__` of the samples."""

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The fields to read, in lower case, or None for all."""
        if self.extensions is None:
            return None
        text = self.extensions if isinstance(self.extensions, str) else " ".join(self.extensions)
        return tuple(text.lower().replace(";", " ").split())

    @property
    def sample_options(self) -> dict[str, Any]:
        """What samples get as `__options__`."""
        named = {name: getattr(self, name) for name in OPTION_NAMES}
        given = {name: value for name, value in named.items() if value is not None}
        if self.name is not None:
            given["name"] = self.name
        return {**given, **self.options}


class DatasetSpec(Node):
    """A document with `dataset`."""

    dataset: Annotated[list[Source], Field(min_length=1)]


class Selection(Node):
    """Shards of the older form, and how many of them make an epoch."""

    shards: Names
    name: str | None = None
    buckets: Names | None = None
    resample: Count | None = None
    """Draw so many, with replacement."""
    choose: Count | None = None
    """Draw so many, without replacement."""


class SelectionSpec(Node):
    """A document with `datasets`."""

    datasets: Annotated[list[Selection], Field(min_length=1)]
    prefix: str = ""
    buckets: Names | None = None


class LoadedSpec:
    """A document, and where it lies.

    Args:
        content: What it says.
        folder: What relative addresses start from.
    """

    def __init__(self, content: DatasetSpec | SelectionSpec, folder: str) -> None:
        self.content = content
        self.folder = folder

    @cached_property
    def urls(self) -> list[list[str]]:
        """The addresses of the shards of each source."""
        content = self.content
        if isinstance(content, DatasetSpec):
            return [self._expand(source.shards) for source in content.dataset]
        return [
            [
                url
                for bucket in _names(each.buckets or content.buckets or "")
                for shard in _names(each.shards)
                for url in self._expand(content.prefix + os.path.join(bucket, shard))
            ]
            for each in content.datasets
        ]

    def _expand(self, shards: Names) -> list[str]:
        patterns = [os.path.expanduser(each) for each in _names(shards)]
        return expand_urls([self._absolute(each) for each in patterns])

    def _absolute(self, pattern: str) -> str:
        is_relative = not (scheme_of(pattern) or pattern.startswith(("/", "pipe:", "$")))
        return join_address(self.folder, pattern) if is_relative else pattern


def load_spec(source: str | os.PathLike[str] | Mapping[str, Any]) -> LoadedSpec:
    """Return the document at an address, or a mapping like one.

    Raises:
        FormatError: If it is not YAML.
        ConfigError: If it breaks the grammar; names every place where it does.
    """
    if isinstance(source, Mapping):
        return LoadedSpec(_validate(source, "the description"), os.getcwd())
    address = os.fspath(source)
    origin = redact(address)
    raw = load(read_bytes(address), origin=origin)
    return LoadedSpec(_validate(raw, origin), parent_address(address))


def _validate(raw: Any, origin: str) -> DatasetSpec | SelectionSpec:
    if not isinstance(raw, Mapping) or not {"dataset", "datasets"} & set(raw):
        found = f"has {', '.join(map(str, raw))}" if isinstance(raw, Mapping) else f"is {raw!r:.60}"
        raise ConfigError(f"{origin}: {found}; wanted is a list of sources under `dataset:`")
    model = DatasetSpec if "dataset" in raw else SelectionSpec
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        described = explain(error, model, raw if isinstance(raw, Map) else dict(raw))
        raise ConfigError(described) from error


def _names(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
