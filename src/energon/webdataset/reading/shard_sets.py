"""Shards of several sources, in the proportions that a document says."""

from __future__ import annotations

import os
from bisect import bisect
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate, count
from typing import Any

from energon.webdataset.dataset_spec import DatasetSpec, LoadedSpec, SelectionSpec, load_spec
from energon.webdataset.shardlists import Shard, permuted
from energon.webdataset.stages.base import Context, Stage
from energon.webdataset.stages.draws import Draws


class MultiShardSample(Stage):
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
        spec = load_spec(fname, allow=allow)
        self.sources = [_shards(spec, number) for number in range(len(spec.urls))]
        self.urls = tuple(shard["url"] for source in self.sources for shard in source)
        self.content = spec.content
        self.is_endless = resampled or _weighted(spec)

    def __len__(self) -> int:
        return len(self.urls)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Shard]:
        if isinstance(self.content, SelectionSpec):
            return iter(self._selected(self.content, context))
        if self.is_endless:
            return self._drawn(self.content, context)
        return iter([shard for source in self.sources for shard in source])

    def describe(self) -> dict[str, Any]:
        return {"stage": "MultiShardSample", "spec": self.content.model_dump(mode="json")}

    def _drawn(self, content: DatasetSpec, context: Context) -> Iterator[Shard]:
        """Draw a source by its weight, then one of its shards."""
        draws = Draws(context.seed_of)
        weights = [
            len(shards) if each.weight is None else each.weight
            for each, shards in zip(content.dataset, self.sources, strict=True)
        ]
        bounds = list(accumulate(weights))
        for _ in count():
            place = bisect(bounds, draws.fraction() * bounds[-1])
            shards = self.sources[min(place, len(self.sources) - 1)]
            yield shards[draws.below(len(shards))]

    def _selected(self, content: SelectionSpec, context: Context) -> list[Shard]:
        """Return the shards of one epoch, the same ones for all workers."""
        chosen: list[Shard] = []
        for number, (each, shards) in enumerate(zip(content.datasets, self.sources, strict=True)):
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
