"""The tools behind `energon tar`: read, select, change and write streams of samples.

`map_shards` transforms shards in parallel and resumably, by a command or a Python function. A shard
appears only once it is complete, so existing shards are finished.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from energon.arguments import load_named
from energon.errors import ConfigError, SampleError
from energon.formats.tar.parser import StreamSample
from energon.io.atomic import temporary_folder
from energon.io.files import is_file
from energon.prepare.engines import Engine, run_batches
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.reading.tar_samples import TarSamples
from energon.webdataset.running.worker_info import WorkerInfo
from energon.webdataset.shardlists import SimpleShardList
from energon.webdataset.stages.base import Context
from energon.webdataset.stages.mapping import Rename
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
        if not self.target:
            raise ConfigError("the output has an empty path; name a file, or - for standard output")
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
    stage = TarSamples.configured(handler=handler, lowercase=False, allow=allow, sizes=sizes)
    shards = iter([{"url": url} for url in inputs])
    return stage.open(shards, Context(WorkerInfo()))


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
    return map(Rename({"__key__": ("__key__",), **dict(fields)}, keep=False), samples)


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
    return Shuffle(size, size).open(iter(samples), Context(WorkerInfo(), seed))


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


OnError = Literal["stop", "skip", "keep"]

PREFIX = "sample"


@dataclass(frozen=True)
class Change:
    """A change of the samples of a shard. Can be sent to other processes.

    Args:
        command: Run for each sample, in a folder with its fields as files `sample.FIELD` and its
            key as `sample.__key__`. The files that exist afterwards are the new sample.
        function: "module:name" of a function that takes a sample, and returns one, several, or
            None; instead of a command.
        many: Whether the command writes several samples, as `sample-000000.FIELD` and so on.
        on_error: What to do with a sample that fails: "stop", "skip" it, or "keep" it unchanged.
        threads: Number of commands that run at the same time for a shard.
        fields: See `parse_fields`; applied first.
        index: Whether to write indexes next to local files.
        allow: "shell" permits addresses that are commands.
    """

    command: str | None = None
    function: str | None = None
    many: bool = False
    on_error: OnError = "stop"
    threads: int = 1
    fields: str | None = None
    index: bool = False
    allow: Collection[str] = ()

    def __call__(self, source: str, target: str) -> int:
        """Change the samples of a shard; return how many the new one has."""
        samples: Iterator[StreamSample] = read_samples([source], allow=self.allow)
        fields = parse_fields(self.fields)
        if fields is not None:
            samples = with_fields(samples, fields)
        output = Output(target, index=self.index, allow=self.allow)
        return write_all(self.changed(samples), output)

    def changed(self, samples: Iterable[StreamSample]) -> Iterator[StreamSample]:
        """Yield the new samples, in the order of the old ones."""
        change = self._change()
        for old, result in _mapped(change, samples, self.threads):
            try:
                yield from result()
            except Exception as error:
                if self.on_error == "stop":
                    raise SampleError(f"sample {old['__key__']!r}: {error}") from error
                if self.on_error == "keep":
                    yield old

    def _change(self) -> Callable[[StreamSample], list[StreamSample]]:
        if self.command is not None:
            command, many = self.command, self.many
            return lambda sample: run_command(command, sample, many=many)
        function = load_named("function", self.function or "")
        return lambda sample: _as_list(function(dict(sample)), sample)


def run_command(command: str, sample: StreamSample, *, many: bool = False) -> list[StreamSample]:
    """Run a user's command in a folder with the fields of a sample; return the new samples.

    Raises:
        SampleError: If it fails, or leaves no sample.
    """
    with temporary_folder("proc") as folder:
        _write_fields(folder, sample)
        done = subprocess.run(
            command, shell=True, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True
        )
        if done.returncode:
            output = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise SampleError(f"the command ended with status {done.returncode}: {output[-500:]}")
        return _read_many(folder, sample) if many else [_read_fields(folder, PREFIX, sample)]


def _mapped(
    change: Callable[[StreamSample], list[StreamSample]],
    samples: Iterable[StreamSample],
    threads: int,
) -> Iterator[tuple[StreamSample, Callable[[], list[StreamSample]]]]:
    """Yield each sample with a handle of its result, in order, running some ahead of time."""
    if threads == 1:
        for sample in samples:
            yield sample, lambda sample=sample: change(sample)  # type: ignore[misc]
        return
    items = iter(samples)
    with ThreadPoolExecutor(threads, "energon-proc") as pool:

        def begin(sample: StreamSample) -> tuple[StreamSample, Future[list[StreamSample]]]:
            return sample, pool.submit(change, sample)

        running = deque(map(begin, islice(items, 2 * threads)))
        while running:
            sample, future = running.popleft()
            running.extend(map(begin, islice(items, 1)))
            yield sample, future.result


def _as_list(result: Any, old: StreamSample) -> list[StreamSample]:
    """Return the samples that a function has returned."""
    if result is None:
        return []
    if isinstance(result, dict):
        return [{"__key__": old["__key__"], **result}]
    samples = list(result)
    if not all(isinstance(sample, dict) for sample in samples):
        raise SampleError("the function has to return a sample (a dict), several, or None")
    return [{"__key__": f"{old['__key__']}/{n:06}", **sample} for n, sample in enumerate(samples)]


def _write_fields(folder: Path, sample: StreamSample) -> None:
    (folder / f"{PREFIX}.__key__").write_bytes(os.fsencode(sample["__key__"]))
    for name, content in sample.items():
        if not name.startswith("__"):
            # A field contains no slash, so the file is in the folder.
            (folder / f"{PREFIX}.{name}").write_bytes(content)


def _read_fields(
    folder: Path, prefix: str, old: StreamSample, key: str | None = None
) -> StreamSample:
    fields = {
        path.name[len(prefix) + 1 :]: path.read_bytes()
        for path in sorted(folder.glob(f"{prefix}.*"))
    }
    named = fields.pop("__key__", None)
    if not fields:
        raise SampleError(f"the command left no files {prefix}.*")
    if named is not None and (key is None or prefix != PREFIX):
        key = os.fsdecode(named).strip()
    return {"__key__": key or old["__key__"], **fields}


def _read_many(folder: Path, old: StreamSample) -> list[StreamSample]:
    prefixes = sorted({path.name.partition(".")[0] for path in folder.glob(f"{PREFIX}-*.*")})
    return [
        _read_fields(folder, prefix, old, f"{old['__key__']}/{prefix[len(PREFIX) + 1 :]}")
        for prefix in prefixes
    ]


def map_shards(
    function: Callable[[str, str], Any],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    engine: Engine | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> list[str]:
    """Call a function with each input and its output, and return the outputs that were written.

    After an interruption, even by kill -9, the same call continues where it stopped.

    Args:
        function: Reads the shard at its first argument and writes the one at its second, as with
            `TarWriter`. The processes that run it must be able to import it.
        inputs: Addresses of shards.
        outputs: The same number of addresses.
        engine: Where to run: processes of this machine, Dask, or Ray; None for processes.
        overwrite: Whether to rewrite existing shards.
        progress: Called with the number of finished shards, and the total.

    Raises:
        ConfigError: If the lists differ in length, or name a shard twice.
    """
    if len(inputs) != len(outputs) or len(set(outputs)) < len(outputs):
        raise ConfigError(
            f"expected one distinct output per input, got {len(set(outputs))} for {len(inputs)}"
        )
    todo = [
        (source, target)
        for source, target in zip(inputs, outputs, strict=True)
        if overwrite or not is_file(target)
    ]
    made = []
    done = len(inputs) - len(todo)
    progress(done, len(inputs))
    for number, _ in run_batches(engine or Engine(), function, todo):
        made.append(todo[number][1])
        done += 1
        progress(done, len(inputs))
    return made
