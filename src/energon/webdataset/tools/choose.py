"""Choose and change samples: slices, fields, keys, order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from energon.errors import ConfigError, FieldAccessError
from energon.webdataset.running.place import Place
from energon.webdataset.stages.base import Context
from energon.webdataset.stages.shuffling import Shuffle

Sample = dict[str, Any]


def parse_slice(text: str | None) -> slice:
    """Return the slice that "start:stop:step" stands for; one number stands for one item.

    Raises:
        ConfigError: If it is none.
    """
    if not text:
        return slice(None)
    try:
        numbers = [int(part) if part else None for part in text.split(":")]
        if len(numbers) == 1 and numbers[0] is not None:
            return slice(numbers[0], numbers[0] + 1)
        chosen = slice(*numbers)
        islice((), chosen.start, chosen.stop, chosen.step)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"slice {text!r}: expected START:STOP:STEP or a number") from error
    return chosen


def sliced(items: Iterable[Any], chosen: slice) -> Iterator[Any]:
    """Yield the items of a slice."""
    return islice(items, chosen.start, chosen.stop, chosen.step)


def parse_fields(text: str | None) -> list[tuple[str, tuple[str, ...]]] | None:
    """Return new names and the old ones of which the first is taken: "jpg:png,jpeg txt".

    Raises:
        ConfigError: If a name is empty.
    """
    if text is None:
        return None
    fields = []
    for word in text.split():
        new, _, old = word.partition(":")
        names = tuple((old or new).split(","))
        if not new or not all(names):
            raise ConfigError(f"fields {text!r}: expected words like NAME or NEW:OLD,OTHER")
        fields.append((new, names))
    if not fields:
        raise ConfigError("fields: there are none")
    return fields


def with_fields(
    samples: Iterable[Sample], fields: Sequence[tuple[str, tuple[str, ...]]]
) -> Iterator[Sample]:
    """Yield samples with these fields only, under their new names.

    Raises:
        FieldAccessError: If a sample has none of the old ones.
    """
    for sample in samples:
        chosen: Sample = {"__key__": sample["__key__"]}
        for new, names in fields:
            found = next((name for name in names if name in sample), None)
            if found is None:
                raise FieldAccessError(
                    f"sample {sample['__key__']!r} has no {' or '.join(names)}; it has "
                    f"{', '.join(name for name in sample if not name.startswith('__'))}"
                )
            chosen[new] = sample[found]
        yield chosen


def with_keys(samples: Iterable[Sample], pattern: str) -> Iterator[Sample]:
    """Yield samples with new keys: `%` formats their number, `{key}` is the old one.

    Raises:
        ConfigError: If the pattern gives all the same key, or is none.
    """
    if pattern == "#":
        pattern = "%09d"
    numbered = "%" in pattern
    if numbered:
        _check_number_pattern(pattern)
    if not numbered and "{key}" not in pattern:
        raise ConfigError(
            f"key {pattern!r} is the same for all samples; expected one with %06d or {{key}}"
        )
    for number, sample in enumerate(samples):
        key = pattern % number if numbered else pattern
        yield {**sample, "__key__": key.replace("{key}", sample["__key__"])}


def _check_number_pattern(pattern: str) -> None:
    try:
        is_usable = pattern % 1 != pattern % 2
    except (TypeError, ValueError):
        is_usable = False
    if not is_usable:
        raise ConfigError(f"key {pattern!r}: expected one place for a number, like %06d")


def shuffled(samples: Iterable[Sample], size: int, seed: int) -> Iterator[Sample]:
    """Yield samples shuffled through a buffer; 0 keeps their order."""
    if not size:
        return iter(samples)
    return Shuffle(size, size).open(iter(samples), Context(Place(), seed))


def shuffled_list(items: Sequence[Any], seed: int) -> list[Any]:
    """Return items in random order."""
    copied = list(items)
    random.Random(seed).shuffle(copied)
    return copied


def interleaved(sources: Sequence[Iterator[Sample]], parallel: int) -> Iterator[Sample]:
    """Yield samples of some sources in turn, so many of which are open at a time."""
    waiting = iter(sources)
    turn = deque(islice(waiting, max(1, parallel)))
    while turn:
        source = turn.popleft()
        for sample in source:
            yield sample
            turn.append(source)
            break
        else:
            turn.extend(islice(waiting, 1))
