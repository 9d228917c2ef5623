"""Mix the items of several pipelines, or of one pipeline for each source of a document."""

from __future__ import annotations

import os
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from energon.errors import ConfigError
from energon.webdataset.compat import FluidInterface, WebDataset
from energon.webdataset.dataset_spec import load_spec
from energon.webdataset.pipeline import DataPipeline, as_stage
from energon.webdataset.stages.base import (
    ALL_SPLITS,
    Context,
    SplitAxis,
    Stage,
    StageIterator,
    State,
    close,
    load_state,
    state_of,
)
from energon.webdataset.stages.shuffling import Draws

_END = object()


class MixingStage(Stage):
    """Opens a pipeline for each dataset, and yields an item of one of them at a time."""

    def __init__(self, datasets: Sequence[Any], longest: bool) -> None:
        if not datasets:
            raise ConfigError("there is nothing to mix: the list of datasets is empty")
        self.datasets = datasets
        self.longest = longest

    @property
    def weights(self) -> list[float] | None:
        """The relative frequency of each dataset; None takes them in turn."""
        return None

    @property
    def is_random(self) -> bool:
        return any(getattr(dataset, "is_random", False) for dataset in self.datasets)

    @property
    def generators(self) -> Sequence[random.Random]:
        return [generator for part in self.parts for generator in part.generators]

    @property
    def splits(self) -> frozenset[SplitAxis]:
        return ALL_SPLITS.intersection(*(part.splits for part in self.parts))

    @property
    def parts(self) -> tuple[Stage, ...]:
        """The datasets as stages."""
        return tuple(as_stage(dataset, is_source=True) for dataset in self.datasets)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return _MixIterator(self, context)

    def describe(self) -> dict[str, Any]:
        parts = [part.describe() for part in self.parts]
        return {"stage": type(self).__name__, "parts": parts, "longest": self.longest}


class RoundRobinStage(MixingStage):
    """Takes an item of each dataset in turn."""


class RandomMixStage(MixingStage):
    """Draws each item from a dataset chosen at random."""

    is_random = True

    def __init__(
        self, datasets: Sequence[Any], probs: Sequence[float] | None, longest: bool
    ) -> None:
        super().__init__(datasets, longest)
        self.probs = probs

    @property
    def weights(self) -> list[float]:
        """The relative frequency of each dataset.

        Raises:
            ConfigError: If the weights are invalid.
        """
        number = len(self.datasets)
        weights = [1.0] * number if self.probs is None else [float(prob) for prob in self.probs]
        if len(weights) != number or min(weights, default=1) < 0 or not any(weights):
            raise ConfigError(
                f"RandomMix of {number} datasets got probs={self.probs}; expected a number of 0 "
                "or more for each, and one above 0"
            )
        return weights

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "weights": self.weights}


class _MixIterator(StageIterator):
    """The items of several parts, in turn or drawn by weight."""

    def __init__(self, stage: MixingStage, context: Context) -> None:
        nothing: Iterator[Any] = iter(())
        self._stage = stage
        self._parts = [part.open(nothing, context.at(n)) for n, part in enumerate(stage.parts)]
        self._weights = stage.weights
        # Parts that are never drawn do not keep the mixture going.
        weights = self._weights or [1.0] * len(self._parts)
        self._activate([part for part, weight in enumerate(weights) if weight > 0])
        self._draws = Draws(context.seed_of)
        self._turn = 0
        super().__init__()

    def _activate(self, parts: list[int]) -> None:
        """Choose among these parts from now on."""
        self._active = parts
        if self._weights is not None:
            self._bounds = list(accumulate(self._weights[part] for part in parts))

    def _run(self) -> Iterator[Any]:
        items = [iter(part) for part in self._parts]
        while self._active:
            number = self._choose()
            item = next(items[self._active[number]], _END)
            if item is not _END:
                self._turn = (number + 1) % len(self._active)
                yield item
            elif self._stage.longest:
                self._activate(self._active[:number] + self._active[number + 1 :])
            else:
                return

    def _choose(self) -> int:
        """Return the number of the next part among the active ones."""
        if self._weights is None:
            return self._turn % len(self._active)
        drawn = bisect(self._bounds, self._draws.fraction() * self._bounds[-1])
        return min(drawn, len(self._bounds) - 1)

    def state_dict(self) -> State:
        parts = [state_of(part) for part in self._parts]
        drawn = {} if self._weights is None else self._draws.state_dict()
        return {"parts": parts, "active": list(self._active), "turn": self._turn, **drawn}

    def load_state_dict(self, state: State) -> None:
        for part, saved in zip(self._parts, state["parts"], strict=True):
            load_state(part, saved)
        self._activate(list(state["active"]))
        self._turn = state.get("turn", 0)
        if self._weights is not None:
            self._draws.load_state_dict(state)

    def close(self) -> None:
        super().close()
        for part in self._parts:
            close(part)


def _of_stage(name: str) -> Any:
    """Return a property that is an attribute of the stage of a mixture."""
    return property(
        lambda mix: getattr(mix.pipeline[0], name),
        lambda mix, value: setattr(mix.pipeline[0], name, value),
    )


class _Mix(DataPipeline, FluidInterface):
    """A pipeline whose first stage mixes datasets; programs may change its attributes."""

    datasets = _of_stage("datasets")
    longest = _of_stage("longest")


class RandomMix(_Mix):
    """The items of several datasets, each drawn from one chosen at random.

    The choices are a function of the seed.

    Args:
        datasets: Pipelines, or any iterables.
        probs: The relative frequency of each; None for equal ones. A dataset with 0 is never
            read.
        longest: Whether to continue with the others when one has ended; otherwise the mixture ends.
        seed: See `DataPipeline`.

    Raises:
        ConfigError: If the weights are invalid.

    Example:
        >>> mixed = RandomMix([range(3), range(10, 13)], probs=[1, 2], longest=True)
        >>> sorted(mixed)
        [0, 1, 2, 10, 11, 12]
    """

    probs = _of_stage("probs")

    def __init__(
        self,
        datasets: Sequence[Any],
        probs: Sequence[float] | None = None,
        longest: bool = False,
        seed: int | None = None,
    ) -> None:
        stage = RandomMixStage(datasets, probs, longest)
        stage.weights  # noqa: B018 - raises if they are invalid
        super().__init__(stage, seed=seed)


class RoundRobin(_Mix):
    """The items of several datasets, one from each in turn.

    Args:
        datasets: Pipelines, or any iterables.
        longest: Whether to continue with the others when one has ended; otherwise the mixture ends.
        seed: See `DataPipeline`.

    Example:
        >>> list(RoundRobin([range(3), "ab"], longest=True))
        [0, 'a', 1, 'b', 2]
    """

    def __init__(
        self, datasets: Sequence[Any], longest: bool = False, seed: int | None = None
    ) -> None:
        super().__init__(RoundRobinStage(datasets, longest), seed=seed)


def random_samples(
    sources: Sequence[Any], probs: Sequence[float] | None = None, longest: bool = False
) -> Iterator[Any]:
    """Yield the items of several iterables, each drawn from one chosen at random."""
    return iter(RandomMix(sources, probs, longest))


def round_robin_shortest(*sources: Any) -> Iterator[Any]:
    """Yield an item of each iterable in turn, until one ends."""
    return iter(RoundRobin(sources))


def round_robin_longest(*sources: Any) -> Iterator[Any]:
    """Yield an item of each iterable in turn, until all have ended."""
    return iter(RoundRobin(sources, longest=True))


def mixture(
    spec: str | os.PathLike[str] | Mapping[str, Any],
    *,
    prepare: Callable[[WebDataset, dict[str, Any]], Any] | None = None,
    longest: bool = False,
    seed: int | None = None,
    **options: Any,
) -> RandomMix:
    """Return a pipeline that draws each sample from one of the sources of a document.

    Unlike `WebDataset(document)`, which mixes shards, this opens a pipeline for each source, so
    that weights are shares of samples and each source can be processed differently.

    Args:
        spec: Address of a YAML document, or an equivalent mapping; see `dataset_spec`. The
            weight of a source defaults to its number of shards.
        prepare: Called with the dataset of each source and its options (`scale`, ...); returns
            the pipeline to mix.
        longest: Whether to continue with the others when one source has ended.
        seed: See `DataPipeline`.
        options: Arguments of `WebDataset`, such as `resampled=True` for an endless mixture.

    Raises:
        ConfigError: If the document is invalid, or has the older form.

    Example:
        >>> sources = {"dataset": [{"shards": "photos/shard-0.tar"}]}
        >>> len(list(mixture(sources)))
        10
    """
    loaded = load_spec(spec, allow=options.get("allow", ()))
    if loaded.content.is_selection:
        raise ConfigError("documents with `datasets` choose shards: use WebDataset(document)")
    parts, weights = [], []
    for source, urls in zip(loaded.content.groups, loaded.urls, strict=True):
        entry = source.model_dump(exclude={"weight", "shards"}, exclude_none=True)
        dataset = WebDataset({"dataset": [{**entry, "shards": urls}]}, seed=seed, **options)
        parts.append(dataset if prepare is None else prepare(dataset, source.sample_options))
        weights.append(float(len(urls)) if source.weight is None else source.weight)
    return RandomMix(parts, weights, longest, seed=seed)
