"""Shards of several sources, in the proportions that a document says."""

from __future__ import annotations

import os
from bisect import bisect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import Any

from energon.errors import ConfigError
from energon.webdataset.dataset_spec import DatasetSpec, LoadedSpec, SelectionSpec, load_spec
from energon.webdataset.running.place import current_place
from energon.webdataset.shardlists import Shard, ShardSource, permuted
from energon.webdataset.stages.base import Context
from energon.webdataset.stages.draws import Draws


@dataclass
class MSSource:
    """One source of a document, as programs see it.

    Attributes:
        name: Its name.
        perepoch: How many shards an epoch takes of it; -1 for all.
        resample: How many it draws, with replacement; -1 for none.
        urls: Its shards.
    """

    name: str = ""
    perepoch: int = -1
    resample: int = -1
    urls: list[str] = field(default_factory=list)


class MultiShardSample(ShardSource):
    """Gives the shards of a document: all of them once in a pass, or drawn at random without end.

    They are drawn if the document gives weights, or if that is asked for. Samples have what the
    document says of their source as `__options__`.

    Args:
        fname: Address of a YAML document, or a mapping like one, see `dataset_spec`.
        resampled: Whether to draw at random.
        allow: "env" lets addresses in it read variables of the environment.
    """

    def __init__(
        self,
        fname: str | os.PathLike[str] | Mapping[str, Any],
        resampled: bool = False,
        allow: Collection[str] = (),
    ) -> None:
        self.allow = allow
        self._resampled = resampled
        self._seed: int | None = None
        self.parse_spec(fname)

    def parse_spec(self, fname: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        """Take the sources from another document."""
        spec = load_spec(fname, allow=self.allow)
        self._shards = [_shards(spec, number) for number in range(len(spec.urls))]
        self.urls = [shard["url"] for source in self._shards for shard in source]
        self.content = spec.content
        self.is_endless = self._resampled or _weighted(spec)

    @property
    def sources(self) -> list[MSSource]:
        """The sources of the document."""
        content = self.content
        listed = content.datasets if isinstance(content, SelectionSpec) else content.dataset
        return [
            MSSource(
                name=getattr(source, "name", None) or "",
                perepoch=getattr(source, "choose", None) or -1,
                resample=getattr(source, "resample", None) or -1,
                urls=[shard["url"] for shard in shards],
            )
            for source, shards in zip(listed, self._shards, strict=True)
        ]

    def set_epoch(self, seed: int) -> None:
        """Let what is chosen and drawn be a function of `seed`, on all ranks."""
        self._seed = seed

    def get_shards_for_epoch(self) -> list[str]:
        """Return the shards of the next pass by itself, without counting it.

        Raises:
            ConfigError: If they are drawn without end.
        """
        if self.is_endless:
            raise ConfigError("the shards of an epoch have no end: they are drawn by weight")
        context = Context(current_place(), epoch=self.epoch + 1)
        return [shard["url"] for shard in self.open(iter(()), context)]

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Shard]:
        if self._seed is not None:
            context = replace(context, seed=self._seed)
        if isinstance(self.content, SelectionSpec):
            return iter(self._selected(self.content, context))
        if self.is_endless:
            return self._drawn(self.content, context)
        return iter([shard for source in self._shards for shard in source])

    def describe(self) -> dict[str, Any]:
        return {"stage": "MultiShardSample", "spec": self.content.model_dump(mode="json")}

    def _drawn(self, content: DatasetSpec, context: Context) -> Iterator[Shard]:
        """Draw a source by its weight, then one of its shards."""
        draws = Draws(context.seed_of)
        weights = [
            len(shards) if each.weight is None else each.weight
            for each, shards in zip(content.dataset, self._shards, strict=True)
        ]
        bounds = list(accumulate(weights))
        for _ in count():
            place = bisect(bounds, draws.fraction() * bounds[-1])
            shards = self._shards[min(place, len(self._shards) - 1)]
            yield shards[draws.below(len(shards))]

    def _selected(self, content: SelectionSpec, context: Context) -> list[Shard]:
        """Return the shards of one epoch, the same ones for all workers."""
        chosen: list[Shard] = []
        for number, (each, shards) in enumerate(zip(content.datasets, self._shards, strict=True)):
            seed = context.seed_of("source", number, shared=True)
            if each.resample is not None:
                draws = Draws(lambda block, seed=seed: seed + block)  # type: ignore[misc]
                chosen += [shards[draws.below(len(shards))] for _ in range(each.resample)]
            else:
                chosen += permuted(shards, seed)[: each.choose]
        return permuted(chosen, context.seed_of("order", shared=True))


def _shards(spec: LoadedSpec, number: int) -> list[Shard]:
    urls = spec.urls[number]
    if isinstance(spec.content, SelectionSpec):
        return [{"url": url} for url in urls]
    source = spec.content.dataset[number]
    about: Shard = {"options": source.sample_options} if source.sample_options else {}
    if source.fields is not None:
        about["fields"] = source.fields
    return [{"url": url, **about} for url in urls]


def _weighted(spec: LoadedSpec) -> bool:
    content = spec.content
    return isinstance(content, DatasetSpec) and any(
        source.weight is not None for source in content.dataset
    )
