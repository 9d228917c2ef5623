"""Pipelines over the sources of a document, mixed sample by sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from energon.errors import ConfigError
from energon.webdataset.compat import WebDataset
from energon.webdataset.dataset_spec import DatasetSpec, load_spec
from energon.webdataset.mix import RandomMix


def mixture(
    spec: str | os.PathLike[str] | Mapping[str, Any],
    *,
    prepare: Callable[[WebDataset, dict[str, Any]], Any] | None = None,
    longest: bool = False,
    seed: int | None = None,
    **options: Any,
) -> RandomMix:
    """Return a pipeline that draws each sample from one of the sources of a document.

    Unlike `WebDataset(document)`, which mixes shards, this has a pipeline for each source, so
    that weights are shares of samples, and sources may be prepared differently.

    Args:
        spec: Address of a YAML document, or a mapping like one; see `dataset_spec`. Sources
            without a weight have as much of it as they have shards.
        prepare: Called with the dataset of each source and its options (`scale`, ...); returns
            what to mix.
        longest: Whether to go on with the others when one source has ended.
        seed: See `DataPipeline`.
        options: Arguments of `WebDataset`, like `resampled=True` for mixtures without end.

    Raises:
        ConfigError: If the document breaks the grammar, or is one of the older form.
    """
    loaded = load_spec(spec, allow=options.get("allow", ()))
    if not isinstance(loaded.content, DatasetSpec):
        raise ConfigError("documents with `datasets` choose shards: use WebDataset(document)")
    parts, weights = [], []
    for source, urls in zip(loaded.content.dataset, loaded.urls, strict=True):
        one = {"dataset": [{**_entry(source), "shards": urls}]}
        dataset = WebDataset(one, seed=seed, **options)
        parts.append(dataset if prepare is None else prepare(dataset, source.sample_options))
        weights.append(float(len(urls)) if source.weight is None else source.weight)
    return RandomMix(parts, weights, longest, seed=seed)


def _entry(source: Any) -> dict[str, Any]:
    """Return a source as a document says it, without its weight."""
    entry: dict[str, Any] = source.model_dump(exclude={"weight", "shards"}, exclude_none=True)
    return entry
