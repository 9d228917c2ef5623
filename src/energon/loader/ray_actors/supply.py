"""The actors of a rank that host no lanes yet: started ahead, or handed over by other ranks."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from energon.errors import ConfigError, WorkerError
from energon.loader.options import LoaderOptions, RayWorkers
from energon.loader.pipeline import Pipeline
from energon.loader.transport.pickling import dump_pipeline, modules_named

if TYPE_CHECKING:
    from energon.loader.ray_actors.cluster import Cluster
    from energon.loader.ray_actors.pool import SharedPool


class ActorSupply:
    """Actors for the lanes of a rank.

    Importing modules takes most of the time until an actor makes its first batch. So actors start
    when the loader is built, and import while the program sets up its model and restores a state.

    Args:
        workers: The actors that are wanted.
        options: How lanes are hosted.
    """

    def __init__(self, workers: RayWorkers, options: LoaderOptions) -> None:
        self.workers = workers
        self._options = options
        self._ahead: deque[Any] = deque()
        self._connection = "", ""
        """Identifies the connection to Ray with which they were started."""
        self.pool: SharedPool | None = None
        """The pool that other ranks share; None if there is none, or no lanes were hosted yet."""

    @property
    def has_cluster(self) -> bool:
        """Whether this process is connected to a cluster."""
        ray = sys.modules.get("ray")
        return ray is not None and ray.is_initialized()

    def start_ahead(self, pipeline: Pipeline[Any], number: int) -> None:
        """Start actors before it is known where lanes continue.

        Args:
            pipeline: The pipeline that the lanes run, of which only the modules are imported.
            number: How many actors to start.
        """
        from energon.loader.ray_actors.actor import LaneActor
        from energon.loader.ray_actors.cluster import Cluster

        with suppress(ConfigError, WorkerError):  # raised with the first batch
            modules = modules_named(self.pickled(pipeline))
            cluster = Cluster(self.workers, max(1, number))
            self._connection = _connection()
            for _ in range(number):
                actor = cluster.start_actor(LaneActor)
                actor.preload.remote(modules)
                self._ahead.append(actor)

    def pickled(self, pipeline: Pipeline[Any]) -> bytes:
        """Return the pickled pipeline and its cache pool."""
        advice = "use worker processes, which inherit it: start_method='fork'"
        return dump_pipeline((pipeline, self._options.cache_pool), advice=advice)

    def take(self, cluster: Cluster) -> Any:
        """Return an actor that hosts no lanes; start one if there is none."""
        from energon.loader.ray_actors.actor import LaneActor

        if self.pool is not None and (handed_over := self.pool.next_handed_over()) is not None:
            return handed_over
        if self._ahead and self._connection != _connection():
            self._ahead.clear()  # they ended with the connection
        return self._ahead.popleft() if self._ahead else cluster.start_actor(LaneActor)

    def keep(self, number: int) -> None:
        """End the actors started ahead beyond this number: Ray ends those without a handle."""
        while len(self._ahead) > number:
            self._ahead.pop()


def _connection() -> tuple[str, str]:
    """Identify the connection of this process to Ray: clusters number their jobs from 1."""
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()
