"""Transform shards in parallel, resumably: filtering, augmentation, conversion.

Samples are changed by a command or a Python function. A shard appears only once it is complete, so
existing shards are finished.
"""

from __future__ import annotations

import os
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
from energon.formats.tar.sample_parser import StreamSample
from energon.io.atomic import temporary_folder
from energon.io.files import is_file
from energon.prepare.engines import Engine, run_batches
from energon.webdataset.tools.streams import (
    Output,
    parse_fields,
    read_samples,
    with_fields,
    write_all,
)

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

    def __post_init__(self) -> None:
        if (self.command is None) == (self.function is None):
            raise ConfigError("pass either a command or a function, not both")
        if self.threads < 1:
            raise ConfigError(f"threads must be 1 or more, got {self.threads}")

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
            said = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise SampleError(f"the command ended with status {done.returncode}: {said[-500:]}")
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
    found = list(result)
    if not all(isinstance(each, dict) for each in found):
        raise SampleError("the function has to return a sample (a dict), several, or None")
    return [{"__key__": f"{old['__key__']}/{n:06}", **each} for n, each in enumerate(found)]


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
            f"{len(inputs)} inputs and {len(outputs)} outputs, {len(set(outputs))} of them "
            "different; expected an output of its own for each input"
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
