"""Samples in, samples out: what all tools share."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from energon.errors import ConfigError
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.reading.tar_samples import TarSamples
from energon.webdataset.running.place import Place
from energon.webdataset.shardlists import SimpleShardList
from energon.webdataset.stages.base import Context
from energon.webdataset.writer import ShardWriter, TarWriter

Sample = dict[str, Any]
Writer = TarWriter | ShardWriter

logger = logging.getLogger("energon")


@dataclass(frozen=True)
class Output:
    """Where samples go.

    Args:
        target: Path or address, "-" for standard output; with a place for a number, like
            `x-%06d.tar`, as many files as are needed.
        maxcount: Most samples of a file.
        maxsize: Most bytes of a file.
        start: Number of the first file.
        index: Whether to write indexes beside local files.
        allow: "shell" lets the address be a command.
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
        """Begin to write; the fields of samples are bytes, and stay in their order."""
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
    """Goes on after damaged shards, up to a number of them.

    Args:
        limit: How many.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0

    def __call__(self, exn: Exception) -> bool:
        """Return whether to go on; raise the error if there were too many."""
        self.count += 1
        if self.count > self.limit:
            raise exn
        logger.warning("left out the rest of a shard: %s", exn)
        return True


def read_samples(
    inputs: Iterable[str],
    *,
    allow: Collection[str] = (),
    handler: Handler = reraise_exception,
    sizes: bool = False,
) -> Iterator[Sample]:
    """Yield the samples of tar files, names as they are, in order; or `sizes` of their fields."""
    stage = TarSamples.configured(handler=handler, lowercase=False, allow=allow)
    stage = replace(stage, sizes=sizes)
    shards = iter([{"url": url} for url in inputs])
    return stage.open(shards, Context(Place()))


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the addresses that patterns, folders and lists (`@file`) stand for."""
    urls: list[str] = []
    for pattern in patterns:
        if pattern.startswith("@"):
            from energon.io.files import read_text

            lines = [line.strip() for line in read_text(pattern[1:]).splitlines()]
            urls += expand_inputs([line for line in lines if line and not line.startswith("#")])
        else:
            urls += SimpleShardList(pattern).urls
    return urls


def write_all(samples: Iterable[Sample], output: Output, post: Any = None) -> int:
    """Write all samples; return how many there were."""
    count = 0
    with output.open(post) as writer:
        for sample in samples:
            writer.write(sample)
            count += 1
    return count
