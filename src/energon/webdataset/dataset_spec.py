"""Datasets as YAML documents: shards from several places, in proportions, with options.

    dataset:
      - shards: gs://bucket/scans-{000000..000033}.tar
        scaleprob: 0.3
      - shards: gs://bucket/photos-{000000..000022}.tar
        weight: 2
        extensions: nrm.jpg
        options: {language: en}

An older form, with `datasets` and the number of shards to draw from each, is also supported:

    prefix: s3://
    datasets:
      - name: scans
        buckets: [bucket]
        shards: scans-{000000..000033}.tar
        choose: 10
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, ValidationError

from energon.errors import ConfigError
from energon.formats.meta.yaml import MarkedMap, load
from energon.io.address import is_remote, join_address, parent_address, redact, scheme_of
from energon.io.files import read_document
from energon.limits import LISTED_SHARDS
from energon.metadataset.grammar import Node
from energon.metadataset.problems import explain
from energon.webdataset.reading.urls import check_variables, expand_urls

Names = Annotated[
    Annotated[list[str], Tag("<list>")] | Annotated[str, Tag("<text>")],
    Discriminator(lambda raw: "<list>" if isinstance(raw, list) else "<text>"),
]
Fraction = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]

OPTION_NAMES = ("scale", "scaleprob")


class ShardGroup(Node):
    """Shards that belong together, and their options."""

    shards: Names
    """Patterns of addresses; relative ones start from the folder of the document."""
    name: str | None = None
    weight: Number | None = None
    """Relative share of the drawn shards; None for the number of its shards. If any source has a
    weight, shards are drawn at random, without end."""
    extensions: Names | None = None
    """The fields to read, separated by spaces or semicolons; None for all."""
    scale: tuple[float, float] | None = Field(default=None, strict=False)
    """For the program: found in `__options__` of the samples."""
    scaleprob: Fraction | None = None
    """For the program: found in `__options__` of the samples."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For the program: found in `__options__` of the samples."""

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The fields to read, in lower case; None for all."""
        if self.extensions is None:
            return None
        text = self.extensions if isinstance(self.extensions, str) else " ".join(self.extensions)
        return tuple(text.lower().replace(";", " ").split())

    @property
    def sample_options(self) -> dict[str, Any]:
        """The `__options__` of its samples."""
        named = {name: getattr(self, name) for name in OPTION_NAMES}
        given = {name: value for name, value in named.items() if value is not None}
        if self.name is not None:
            given["name"] = self.name
        return {**given, **self.options}


class DatasetSpec(Node):
    """A document with `dataset`.

    Example:
        >>> source = {"shards": "a-{0..9}.tar", "weight": 2}
        >>> spec = DatasetSpec.model_validate({"dataset": [source]})
        >>> spec.dataset[0].weight
        2.0
    """

    is_selection: ClassVar[bool] = False

    dataset: Annotated[list[ShardGroup], Field(min_length=1)]

    @property
    def groups(self) -> list[Any]:
        """The sources."""
        return self.dataset

    @property
    def is_weighted(self) -> bool:
        """Whether shards are drawn by weight, without end."""
        return any(source.weight is not None for source in self.dataset)

    def patterns(self) -> Iterator[Iterable[str]]:
        """Yield the patterns of each source."""
        return (_names(source.shards) for source in self.dataset)


class ShardSelection(Node):
    """Shards in the older form, and how many of them make up an epoch."""

    shards: Names
    name: str | None = None
    buckets: Names | None = None
    resample: Count | None = None
    """Number of shards to draw with replacement."""
    choose: Count | None = None
    """Number of shards to draw without replacement."""


class SelectionSpec(Node):
    """A document with `datasets`."""

    is_selection: ClassVar[bool] = True
    is_weighted: ClassVar[bool] = False

    datasets: Annotated[list[ShardSelection], Field(min_length=1)]
    prefix: str = ""
    buckets: Names | None = None

    @property
    def groups(self) -> list[Any]:
        """The sources."""
        return self.datasets

    def patterns(self) -> Iterator[Iterable[str]]:
        """Yield the patterns of each source, one for each of its buckets.

        They are made one by one: a short document may list more than memory holds.
        """
        for source in self.datasets:
            buckets, shards = _names(source.buckets or self.buckets or ""), _names(source.shards)
            yield (self.prefix + os.path.join(*pair) for pair in product(buckets, shards))


@dataclass(frozen=True)
class LoadedSpec:
    """A document, and the addresses of the shards of each source."""

    content: DatasetSpec | SelectionSpec
    urls: list[list[str]]

    @property
    def shards(self) -> list[list[dict[str, Any]]]:
        """The shards of each source, with its options and the fields to read."""
        return [
            [{"url": url, **_entries(source)} for url in urls]
            for source, urls in zip(self.content.groups, self.urls, strict=True)
        ]


def _entries(source: Any) -> dict[str, Any]:
    """Return the options and the fields of a source, as entries of each of its shards."""
    if isinstance(source, ShardSelection):
        return {}
    entries = {"options": source.sample_options or None, "fields": source.fields}
    return {name: value for name, value in entries.items() if value is not None}


def load_spec(
    source: str | os.PathLike[str] | Mapping[str, Any], *, allow: Collection[str] = ()
) -> LoadedSpec:
    """Return the document at an address, or in a mapping, with the shards that it lists.

    Args:
        source: Its address, or its content.
        allow: "env" lets addresses in it refer to environment variables.

    Raises:
        FormatError: If it is not YAML.
        ConfigError: If it is invalid, with every problem; or lists more than `LISTED_SHARDS`.
        SecurityError: If it refers to the environment without permission.

    Example:
        >>> load_spec({"dataset": [{"shards": "s3://bucket/{a,b}.tar"}]}).urls
        [['s3://bucket/a.tar', 's3://bucket/b.tar']]
    """
    if isinstance(source, Mapping):
        raw, origin, folder, remote = source, "the description", os.getcwd(), False
    else:
        address = os.fspath(source)
        folder, origin, remote = parent_address(address), redact(address), is_remote(address)
        raw = load(read_document(address), origin=origin)
    content = _validate(raw, origin)
    count = sum(getattr(each, "resample", None) or 0 for each in content.groups)
    urls: list[list[str]] = []
    for patterns in content.patterns():
        urls.append([])
        for pattern in patterns:
            check_variables(pattern, origin=origin, allow=allow, is_remote=remote)
            expanded = expand_urls(_absolute(os.path.expanduser(pattern), folder))
            count += len(expanded)
            if count > LISTED_SHARDS.value:
                raise ConfigError(
                    f"{origin}: beyond {LISTED_SHARDS.value:,} {LISTED_SHARDS.meaning}; "
                    f"{LISTED_SHARDS.hint}"
                )
            urls[-1] += expanded
    return LoadedSpec(content, urls)


def _absolute(pattern: str, folder: str) -> str:
    is_relative = not (scheme_of(pattern) or pattern.startswith(("/", "pipe:", "$")))
    return join_address(folder, pattern) if is_relative else pattern


def _validate(raw: Any, origin: str) -> DatasetSpec | SelectionSpec:
    if not isinstance(raw, Mapping) or not {"dataset", "datasets"} & set(raw):
        content = f"is {raw!r:.60}"
        if isinstance(raw, Mapping):
            content = f"has {', '.join(map(str, raw))}"
        raise ConfigError(f"{origin}: {content}; expected a list of sources under `dataset:`")
    model = DatasetSpec if "dataset" in raw else SelectionSpec
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        described = explain(error, model, raw if isinstance(raw, MarkedMap) else dict(raw))
        raise ConfigError(described) from error


def _names(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
