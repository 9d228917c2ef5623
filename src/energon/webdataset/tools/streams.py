"""Read, select, change and write streams of samples: what all tools have in common."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from energon.errors import ConfigError, FieldAccessError
from energon.formats.tar.sample_parser import StreamSample
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.reading.tar_samples import TarSamples
from energon.webdataset.running.place import Place
from energon.webdataset.shardlists import SimpleShardList
from energon.webdataset.stages.base import Context
from energon.webdataset.stages.shuffling import Shuffle
from energon.webdataset.writer import ShardWriter, TarWriter

Writer = TarWriter | ShardWriter

logger = logging.getLogger("energon")


@dataclass(frozen=True)
class Output:
    """The destination of samples.

    Args:
        target: Path or address, "-" for standard output; a pattern such as `x-%06d.tar` writes
            as many files as needed.
        maxcount: Maximum number of samples in a file.
        maxsize: Maximum size of a file in bytes.
        start: Number of the first file.
        index: Whether to write indexes next to local files.
        allow: "shell" permits an address that is a command.
    """

    target: str
    maxcount: int | None = None
    maxsize: float | None = None
    start: int = 0
    index: bool = False
    allow: Collection[str] = ()

    @property
    def is_pattern(self) -> bool:
        """Whether there may be several files."""
        return "%" in self.target and not self.target.startswith("pipe:")

    def open(self, post: Any = None) -> Writer:
        """Open it for writing; fields of samples are bytes, and keep their order."""
        options: dict[str, Any] = {
            "encoder": False,
            "sort_fields": False,
            "keep_meta": True,
            "allow": self.allow,
        }
        if not self.is_pattern:
            if self.maxcount is not None or self.maxsize is not None or post is not None:
                raise ConfigError(
                    f"{self.target!r} is one file; for several, name them like x-%06d.tar"
                )
            return TarWriter(self.target, index=self.index, **options)
        return ShardWriter(
            self.target,
            maxcount=self.maxcount or 100_000,
            maxsize=self.maxsize or 3e9,
            post=post,
            start_shard=self.start,
            index=self.index,
            **options,
        )


class SkipDamaged:
    """Continues after damaged shards, up to a limit.

    Args:
        limit: Maximum number of damaged shards.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0

    def __call__(self, exn: Exception) -> bool:
        """Return whether to continue; raise the error if there were too many."""
        self.count += 1
        if self.count > self.limit:
            raise exn
        logger.warning("skipped the rest of a shard: %s", exn)
        return True


def read_samples(
    inputs: Iterable[str],
    *,
    allow: Collection[str] = (),
    handler: Handler = reraise_exception,
    sizes: bool = False,
) -> Iterator[StreamSample]:
    """Yield the samples of tar files in order, with unchanged names; or only `sizes` of fields."""
    stage = TarSamples.configured(handler=handler, lowercase=False, allow=allow)
    stage = replace(stage, sizes=sizes)
    shards = iter([{"url": url} for url in inputs])
    return stage.open(shards, Context(Place()))


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the addresses given by patterns, folders and lists (`@file`)."""
    urls: list[str] = []
    for pattern in patterns:
        if pattern.startswith("@"):
            from energon.io.files import read_text

            lines = [line.strip() for line in read_text(pattern[1:]).splitlines()]
            urls += expand_inputs([line for line in lines if line and not line.startswith("#")])
        else:
            urls += SimpleShardList(pattern).urls
    return urls


def write_all(samples: Iterable[StreamSample], output: Output, post: Any = None) -> int:
    """Write all samples; return how many there were."""
    count = 0
    with output.open(post) as writer:
        for sample in samples:
            writer.write(sample)
            count += 1
    return count


def parse_slice(text: str | None) -> slice:
    """Return the slice "start:stop:step"; a single number selects one item.

    Raises:
        ConfigError: If it is invalid.
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
    """Return new names, each with its alternative old ones, from text like "jpg:png,jpeg txt".

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
        raise ConfigError("fields: expected at least one")
    return fields


def with_fields(
    samples: Iterable[StreamSample], fields: Sequence[tuple[str, tuple[str, ...]]]
) -> Iterator[StreamSample]:
    """Yield samples with these fields only, under their new names.

    Raises:
        FieldAccessError: If a sample has none of the old ones.
    """
    for sample in samples:
        chosen: StreamSample = {"__key__": sample["__key__"]}
        for new, names in fields:
            found = next((name for name in names if name in sample), None)
            if found is None:
                raise FieldAccessError(
                    f"sample {sample['__key__']!r} has no {' or '.join(names)}; it has "
                    f"{', '.join(name for name in sample if not name.startswith('__'))}"
                )
            chosen[new] = sample[found]
        yield chosen


def with_keys(samples: Iterable[StreamSample], pattern: str) -> Iterator[StreamSample]:
    """Yield samples with new keys: `%` formats their number, `{key}` is the old one.

    Raises:
        ConfigError: If the pattern is invalid, or yields the same key for all.
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


def shuffled(samples: Iterable[StreamSample], size: int, seed: int) -> Iterator[StreamSample]:
    """Yield samples shuffled through a buffer; 0 keeps their order."""
    if not size:
        return iter(samples)
    return Shuffle(size, size).open(iter(samples), Context(Place(), seed))


def shuffled_list(items: Sequence[Any], seed: int) -> list[Any]:
    """Return items in random order."""
    copied = list(items)
    random.Random(seed).shuffle(copied)
    return copied


def interleaved(sources: Sequence[Iterator[StreamSample]], parallel: int) -> Iterator[StreamSample]:
    """Yield samples from several sources in turn, at most `parallel` of them open."""
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
