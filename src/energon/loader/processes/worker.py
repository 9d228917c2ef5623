"""Worker processes on this machine."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial

from energon.io.threads import library_is_used_here
from energon.loader.options import LoaderOptions, logger
from energon.loader.pipeline import Pipeline
from energon.loader.processes.link import PickledPipeline, ProcessLink, check_not_exiting
from energon.loader.processes.main import InheritedPipeline, Setup
from energon.loader.processes.start import ForkServerError
from energon.loader.replaceable.worker import ReplaceableWorker, StartError
from energon.loader.transport.pickling import dump_pipeline, modules_named
from energon.loader.transport.received import TellsTime
from energon.loader.transport.slots import LEASES, SHARED_LEASES
from energon.messages import warn_once
from energon.plan.randomness import derive_seed


def make_process_workers(
    pipeline: Pipeline,
    options: LoaderOptions,
    *,
    names: Sequence[str],
    ranks: int = 1,
    rebuilt: TellsTime | None = None,
) -> list[ReplaceableWorker]:
    """Return a worker process for each of `names`; it starts when it gets lanes.

    Args:
        pipeline: The pipeline that the lanes run.
        options: How to host lanes.
        names: Names for messages.
        ranks: The number of ranks that share them.
        rebuilt: Called with the times at which rebuilding batches here began and ended.
    """
    is_shared = pipeline.worker_config.is_replicated or options.shared_workers is not None
    leases = max(LEASES, -(-SHARED_LEASES * ranks // len(names)))
    sent = _sent(pipeline, options, is_shared=is_shared)

    def start(name: str, made: int) -> ProcessLink:
        seed = derive_seed(pipeline.worker_config.seed_offset, "worker", name)
        setup = Setup.of_this_process(options, name=name, seed=seed, leases=leases, made=made)
        link = ProcessLink(rebuilt=rebuilt, leases=leases, is_shared=is_shared)
        try:
            link.start(setup, sent)
        except ForkServerError as error:
            check_not_exiting()
            raise StartError(str(error), was_killed=error.code == -signal.SIGKILL) from error
        return link

    return [
        ReplaceableWorker(pipeline, options, name=name, start=partial(start, name))
        for name in names
    ]


def _sent(
    pipeline: Pipeline, options: LoaderOptions, *, is_shared: bool
) -> PickledPipeline | InheritedPipeline:
    """Return the pipeline as workers get it, whose batches other processes may read."""
    method = options.start_method
    argument = getattr(pipeline, "start_method_argument", "start_method")
    advice = f"let them inherit it: {argument}='fork'"
    if method == "fork":
        if not library_is_used_here():
            return InheritedPipeline(pipeline, options.cache_pool, is_shared)
        method = "forkserver"
        advice = "start the workers before this process reads samples from an object store"
        warn_once(
            logger,
            "fork after reading",
            "this process has read samples from an object store, so it cannot be forked: the "
            "library that reads from stores has threads, which a fork lacks. Workers start from a "
            "fork server instead; they do not see what the program has set up since. Start them "
            "before reading samples in this process to have them forked, or pass "
            "%s='forkserver' to expect this",
            argument,
        )
    content = dump_pipeline((pipeline, options.cache_pool), advice=advice)
    return PickledPipeline(
        "spawn" if method == "spawn" else "forkserver", content, modules_named(content)
    )
