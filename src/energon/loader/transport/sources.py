"""Send the sources of samples by property.

One by one, pickling them takes as long as all else that a text sample costs. What they tell is
mostly the same for all of them, or known from the samples themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

from energon.samples.provenance import SampleSource, known_sources

Known = list[Any]
"""What is known of some sources. For each property, in the order of `known_source`, that is the
name of the column of their samples that has the values, or else a column of its own, of one value
if all sources share it."""

PackedSources = tuple[int, Sequence[int] | None, Known]
"""Tuples of sources: how many sources there are in total, how many are in each tuple (None: one),
and what is known of them."""

FEW_SOURCES = 4
"""Fewer of them pickle as quickly one by one."""

_NAMES = {1: "__key__", 2: "__restore_key__", 3: "__shard__"}
"""The properties that samples have as well."""


def pack_sources(
    column: Sequence[Any], samples: Mapping[str, Sequence[Any]]
) -> PackedSources | None:
    """Return the sources of samples in the form that is sent; None if they are anything else.

    Args:
        column: The sources of each sample.
        samples: The other columns of the samples, by name.
    """
    if not column or not all_are(tuple, column):
        return None
    counts: Sequence[int] | None = None
    try:
        sources = [source for (source,) in column]
    except ValueError:  # several of a sample, or none
        counts = [*map(len, column)]
        sources = [*chain.from_iterable(column)]
    known = _known(sources)
    if known is None:
        return None
    if counts is None:
        for at, name in _NAMES.items():
            if name in samples and _are_equal(known[at], samples[name]):
                known[at] = name
    return len(sources), counts, [c if type(c) is str else _shortened(c) for c in known]


def unpack_sources(
    packed: PackedSources, samples: Mapping[str, Sequence[Any]]
) -> list[tuple[SampleSource, ...]]:
    """Return the sources of each sample: what `pack_sources` was given."""
    count, counts, known = packed
    sources = known_sources([samples[c] if type(c) is str else c for c in known], count)
    if counts is None:
        return list(zip(sources))
    rest = iter(sources)
    return [tuple(islice(rest, each)) for each in counts]


class ReducedSources:
    """Stands for the sources of a batch in its pickle, where they come out again.

    Args:
        reduced: How to make them.
    """

    __slots__ = ("reduced",)

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def reduce_sources(sources: Any) -> ReducedSources | None:
    """Return the sources of a batch in columns; None for a form that pickles as it is.

    Args:
        sources: The sources of each sample in a list, or those of all samples in a tuple.
    """
    is_list = type(sources) is list
    packed = pack_sources(sources if is_list else (sources,), {})
    if packed is None or packed[0] < FEW_SOURCES:
        return None
    return ReducedSources((_sources_of_samples if is_list else _sources_of_batch, (packed,)))


def _sources_of_samples(packed: PackedSources) -> list[tuple[SampleSource, ...]]:
    return unpack_sources(packed, {})


def _sources_of_batch(packed: PackedSources) -> tuple[SampleSource, ...]:
    return unpack_sources(packed, {})[0]


def _known(sources: Sequence[Any]) -> Known | None:
    """Return the properties of sources, a column for each; None if some are of users."""
    if not sources or not all_are(SampleSource, sources):
        return None
    return list(zip(*[source._known for source in sources], strict=True))


def _shortened(column: Sequence[Any]) -> Sequence[Any]:
    first = column[0]
    return column[:1] if column[-1] == first and column.count(first) == len(column) else column


def _are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    try:
        return one == other
    except (TypeError, ValueError):  # arrays among them
        return False


def all_are(kind: type, values: Sequence[Any]) -> bool:
    """Return whether all values are of exactly this type."""
    return [*map(type, values)].count(kind) == len(values)
