"""The actors of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import ray

from energon.loader.options import LoaderOptions, RayWorkers
from energon.loader.pipeline import Pipeline
from energon.loader.ray_actors.actor import ActorSetup, LaneActor
from energon.loader.ray_actors.cluster import Cluster
from energon.loader.ray_actors.link import ActorLink
from energon.loader.replaceable.worker import ReplaceableWorker
from energon.loader.transport.pickling import dump_pipeline
from energon.loader.transport.received import TellsTime
from energon.loader.transport.reports import explicit_levels
from energon.plan.randomness import derive_seed


def make_actor_workers(
    pipeline: Pipeline,
    workers: RayWorkers,
    options: LoaderOptions,
    *,
    names: Sequence[str],
    rebuilt: TellsTime | None = None,
) -> list[ReplaceableWorker]:
    """Return a worker in a Ray actor for each of `names`; it starts when it gets lanes.

    Args:
        pipeline: The pipeline that the lanes run.
        workers: The actors.
        options: How to host lanes.
        names: Names for messages.
        rebuilt: Called with the times at which rebuilding batches here began and ended.
    """
    advice = "use worker processes, which inherit it: start_method='fork'"
    content = dump_pipeline((pipeline, options.cache_pool), advice=advice)
    cluster = Cluster(workers, len(names))
    stored = cache(partial(ray.put, content))

    def start(name: str, made: int) -> ActorLink:
        actor = cluster.start_actor(LaneActor)  # starts while Ray imports what storing needs
        setup = ActorSetup(
            name,
            derive_seed(pipeline.worker_config.seed_offset, "worker", name),
            options.kept_heap_bytes,
            explicit_levels(),
        )
        return ActorLink(actor, cluster, stored(), setup, options, rebuilt=rebuilt)

    return [
        ReplaceableWorker(pipeline, options, name=name, start=partial(start, name))
        for name in names
    ]
