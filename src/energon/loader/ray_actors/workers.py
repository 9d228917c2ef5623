"""The actors of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import ray

from energon.loader.options import LoaderOptions
from energon.loader.pipeline import Pipeline
from energon.loader.ray_actors.actor import ActorSetup
from energon.loader.ray_actors.cluster import Cluster
from energon.loader.ray_actors.link import ActorLink
from energon.loader.ray_actors.pool import SharedPool, kind_of_actors
from energon.loader.ray_actors.supply import ActorSupply
from energon.loader.replaceable_worker import ReplaceableWorker
from energon.loader.transport.events import TellsTime
from energon.loader.transport.reports import explicit_levels
from energon.plan.randomness import derive_seed


def make_actor_workers(
    pipeline: Pipeline,
    actors: ActorSupply,
    options: LoaderOptions,
    *,
    names: Sequence[str],
    rebuilt: TellsTime | None = None,
) -> list[ReplaceableWorker]:
    """Return a worker in a Ray actor for each of `names`; it starts when it gets lanes.

    Args:
        pipeline: The pipeline that the lanes run.
        actors: Where the actors come from.
        options: How to host lanes.
        names: Names for messages.
        rebuilt: Called with the times at which rebuilding batches here began and ended.
    """
    content = actors.pickled(pipeline)
    cluster = Cluster(actors.workers, len(names))
    stored = cache(partial(ray.put, content))
    actors.keep(len(names))
    if actors.workers.pool is not None and actors.pool is None:
        size = actors.workers.num_actors or len(names)
        kind = kind_of_actors(pipeline, actors.workers, content)
        rank = pipeline.worker_config.rank
        actors.pool = SharedPool(actors.workers.pool, size, rank, kind=kind)

    def start(name: str, made: int) -> ActorLink:
        actor = actors.take(cluster)  # starts while Ray imports what storing needs
        setup = ActorSetup(
            name,
            derive_seed(pipeline.worker_config.seed_offset, "worker", name),
            options.kept_heap_bytes,
            explicit_levels(),
        )
        return ActorLink(
            actor, cluster, stored(), setup, options, pool=actors.pool, rebuilt=rebuilt
        )

    return [
        ReplaceableWorker(pipeline, options, name=name, start=partial(start, name))
        for name in names
    ]
