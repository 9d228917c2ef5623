"""Make shards of shards, many at a time and resumable: filters, augmentation, conversion.

As a shard is there only when it is complete, those that are there are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from energon.errors import ConfigError
from energon.io.files import is_file
from energon.prepare.engines import Engine, run_batches


def map_shards(
    function: Callable[[str, str], Any],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    engine: Engine | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> list[str]:
    """Call a function with each input and its output, and return the outputs that were made.

    Interrupted, by kill -9 too, it continues with the next call where it was.

    Args:
        function: Reads the shard at its first argument, and writes that at its second one, like
            with `TarWriter`. It has to be importable by the processes that run it.
        inputs: Addresses of shards.
        outputs: The same number of addresses.
        engine: Where to run: processes of this machine, Dask, or Ray; None means processes.
        overwrite: Whether to rewrite shards that exist.
        progress: Called with how many are done, and how many there are.

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
