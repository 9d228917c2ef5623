"""The shards of a dataset folder: find them, and index them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shlex import quote

from energon.errors import ConfigError, DatasetNotFoundError
from energon.messages import counted
from energon.metadataset.kind import advice
from energon.prepare.engines import Engine, run_batches
from energon.prepare.files import file_state, list_files
from energon.prepare.index.index import IndexedShard, IndexOptions, index_batch

COMPRESSED = (".tgz", ".tar.gz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
MAX_BATCH_SHARDS = 256
MIN_BATCH_BYTES = 16 << 20
BATCHES_PER_WORKER = 8
ALONE_SECONDS = 0.2
"""How long this process works alone: few shards are done before another could have started."""


def find_shards(dataset: Path) -> list[str]:
    """Return the paths of all shards below a folder, relative to it, sorted.

    Raises:
        DatasetNotFoundError: If there is no such folder, or no shard in it.
        ConfigError: If shards are compressed.
    """
    files = list_files(dataset)
    compressed = [name for name in files if name.endswith(COMPRESSED)]
    if compressed:
        target = dataset.resolve()
        raise ConfigError(
            f"{dataset}: {counted(len(compressed), 'shard is', 'shards are')} compressed, e.g. "
            f"{compressed[0]}; samples of such cannot be read one by one. Rewrite them as plain "
            "shards with\n\n"
            f"    energon pack {quote(str(dataset))} "
            f"{quote(str(target.with_name(target.name + '_tar')))}"
        )
    found = [name for name in files if name.endswith(".tar")]
    if not found:
        raise DatasetNotFoundError(
            f"{dataset}: there is no .tar file in this folder or below: it {advice(str(dataset))}"
        )
    return found


def index_shards(
    dataset: Path,
    shards: Sequence[str],
    *,
    engine: Engine,
    options: IndexOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[IndexedShard]:
    """Index all shards, and yield them in order.

    Args:
        dataset: Folder of the dataset.
        shards: Paths below it.
        engine: Where to do it.
        options: How to do it.
        progress: Called with the number of shards that are done, and of all.

    Raises:
        FormatError: If a shard is damaged.
    """
    batches = _batches(dataset, shards, engine)
    ready: dict[int, list[IndexedShard]] = {}
    done = 0
    following = 0
    for number, indexed in _run(str(dataset), batches, engine, options):
        ready[number] = indexed
        done += len(indexed)
        progress(done, len(shards))
        while following in ready:
            yield from ready.pop(following)
            following += 1


def _run(
    dataset: str, batches: list[list[str]], engine: Engine, options: IndexOptions
) -> Iterator[tuple[int, list[IndexedShard]]]:
    alone = 0
    if engine.name == "local":
        stop = time.monotonic() + ALONE_SECONDS
        while alone < len(batches) and time.monotonic() < stop:
            yield alone, index_batch(dataset, batches[alone], options)
            alone += 1
    if alone < len(batches):
        rest = ((dataset, batch, options) for batch in batches[alone:])
        for number, indexed in run_batches(engine, index_batch, rest):
            yield number + alone, indexed


def _batches(dataset: Path, shards: Sequence[str], engine: Engine) -> list[list[str]]:
    """Return runs of shards that take about as long as each other."""
    sizes = [file_state(dataset / shard).size for shard in shards]
    limit = max(MIN_BATCH_BYTES, sum(sizes) // (BATCHES_PER_WORKER * engine.num_workers))
    batches: list[list[str]] = []
    filled = 0
    for shard, size in zip(shards, sizes, strict=True):
        if not batches or filled + size > limit or len(batches[-1]) == MAX_BATCH_SHARDS:
            batches.append([])
            filled = 0
        batches[-1].append(shard)
        filled += size
    return batches
