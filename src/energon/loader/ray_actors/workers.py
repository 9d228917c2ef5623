"""The Ray actors of a rank: started ahead, linked to the training process, and replaced."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from energon.errors import ConfigError, WorkerError
from energon.loader.lane_worker import LanesToOpen, Pipeline
from energon.loader.options import LoaderOptions, RayWorkers, logger
from energon.loader.ray_actors.actor import (
    ActorAddress,
    ActorSetup,
    Look,
    Parcel,
    own_versions,
    take_page,
)
from energon.loader.ray_actors.pool import SharedPool, kind_of_actors
from energon.loader.replaceable_worker import Ending, ReplaceableWorker
from energon.loader.transport.events import (
    RebuildClock,
    Received,
    TellsTime,
    UnreadEvent,
    rebuild_event,
)
from energon.loader.transport.pickling import dump_pipeline, modules_named
from energon.loader.transport.reports import RecordLines, explicit_levels
from energon.loader.transport.slots import LEASES, PAGE_BYTES, SMALL_SLOT, Heartbeat
from energon.plan.randomness import derive_seed

HEAD_CHECK_SECONDS = 5.0
HEAD_PATIENCE_SECONDS = 20.0
"""How long the head node may be gone, to be restarted: Ray ends this process after 60 seconds."""
HEAD_ANSWER_SECONDS = 5.0
STORE_SHARE = 0.5
"""How much of an object store the batches under way to a rank may fill; what the trainer and the
hooks hold needs the rest."""


class Cluster:
    """A Ray cluster, to which this process is connected.

    Args:
        workers: The actors that are wanted of it.
        num_actors: How many of them this rank has.

    Raises:
        WorkerError: If no cluster answers.
    """

    def __init__(self, workers: RayWorkers, num_actors: int) -> None:
        _connect(workers.address)
        self._workers = workers
        self._head = ray.get_runtime_context().gcs_address
        self._checked_at = self._answered_at = time.monotonic()
        stores = [
            node["Resources"]["object_store_memory"]
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"] and "object_store_memory" in node["Resources"]
        ]
        self.bytes_per_actor = int(STORE_SHARE * min(stores, default=1 << 30) / num_actors)
        """How many bytes of batches an actor may have under way."""

    def start_actor(self, kind: type) -> Any:
        """Start an actor of this class."""
        options: dict[str, Any] = {
            "num_cpus": self._workers.num_cpus,
            "max_restarts": 0,
            # Not within the placement group of the training program, which has no room for them.
            "scheduling_strategy": "DEFAULT",
            "concurrency_groups": {"control": 1},
        }
        if self._workers.resources:
            options["resources"] = dict(self._workers.resources)
        if self._workers.runtime_env:
            options["runtime_env"] = dict(self._workers.runtime_env)
        return ray.remote(**options)(kind).remote()

    def run_on(
        self, node: str, function: Callable[..., Any], *arguments: Any, timeout: float
    ) -> Any:
        """Return the result of a function on a node; None if that fails, or the node is gone."""
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        try:
            return ray.get(task.remote(*arguments), timeout=timeout)
        except (RayError, OSError):
            return None

    def check_head(self) -> None:
        """Raise WorkerError if the head node has been gone for too long."""
        now = time.monotonic()
        if now - self._checked_at < HEAD_CHECK_SECONDS:
            return
        try:
            _call(self._head)
            self._answered_at = now
        except OSError as error:
            gone = now - self._answered_at
            logger.warning("the head node of Ray at %s does not answer: %s", self._head, error)
            if gone >= HEAD_PATIENCE_SECONDS:
                raise WorkerError(
                    f"the head node of Ray at {self._head} has been gone for {gone:.0f} s, and Ray "
                    "will end this process soon; save loader.state_dict() now, and resume from it "
                    "on another cluster or with worker processes"
                ) from error
        self._checked_at = time.monotonic()


def _connect(address: str | None) -> None:
    """Connect this process to a cluster, unless it is connected."""
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", connected):
            raise WorkerError(
                f"this process is connected to the Ray cluster at {connected}, not to that at "
                f"{address}; omit address, or call ray.shutdown() first"
            )
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address is not None and ":" in address:
            _call(address)  # Ray itself would retry for many minutes
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise WorkerError(
            f"no Ray cluster answers at {address or 'this machine'}: {error}; start one with "
            "`ray start --head`, pass its address to RayWorkers, and if it requires a token, set "
            "RAY_AUTH_MODE=token"
        ) from error


def _call(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), HEAD_ANSWER_SECONDS).close()


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


LOOK_SECONDS = 1.0
"""How often an actor is asked what it is doing while batches come."""
STACK_SECONDS = 2.0
PAGE_SECONDS = 15.0
"""How long to wait for the page of an actor that died: a process must start on its node."""
_DECAY = 0.98


class ActorLink:
    """An actor that hosts lanes, and the parcels it was asked for.

    Args:
        actor: The actor.
        cluster: The cluster.
        content: The pickled pipeline and cache pool, in Ray's object store.
        setup: How the actor sets itself up.
        options: How lanes are hosted.
        pool: To which the actor is offered when it is given up; None ends it.
        rebuilt: Called with the times at which rebuilding events here began and ended.
    """

    def __init__(
        self,
        actor: Any,
        cluster: Cluster,
        content: Any,
        setup: ActorSetup,
        options: LoaderOptions,
        *,
        pool: SharedPool | None = None,
        rebuilt: TellsTime | None = None,
    ) -> None:
        self._actor = actor
        self._pool = pool
        self._cluster = cluster
        self._prefetch = options.prefetch_factor
        self._max_bytes = min(options.shared_memory_bytes, cluster.bytes_per_actor)
        self.rebuilding = RebuildClock(rebuilt)
        self.num_copied = 0
        self._page = bytearray(PAGE_BYTES)
        self.heartbeat = Heartbeat(self._page)
        self.heartbeat.leave()
        self._records = RecordLines()
        self._leases: weakref.WeakSet[_ViewedBatch] = weakref.WeakSet()
        self._generation = 0
        self._parcels: deque[Future[Parcel]] = deque()
        self._parcel_bytes = 0.0
        self._has_ended = True
        self._look: Future[Look] | None = None
        self._looked_at = 0.0
        self.ending: Ending | None = None
        prepared = actor.prepare.remote(own_versions(), pickle.dumps(setup), content)
        self._address: Future[ActorAddress] = prepared.future()

    @property
    def pid(self) -> None:
        """None: its process is not one of this machine, as far as is known here."""

    @property
    def is_connected(self) -> bool:
        """Whether the actor runs, as far as is known."""
        return self._actor is not None and self.ending is None

    @property
    def has_events(self) -> bool:
        """Whether a parcel is waiting to be received."""
        return bool(self._parcels) and self._parcels[0].done()

    def open(self, opening: LanesToOpen) -> None:
        """Let the actor host other lanes; parcels of earlier lanes are dropped."""
        self._generation += 1
        self._parcels.clear()
        self._has_ended = False
        self._actor.open.remote(self._generation, opening)
        self._ask()

    def receive(self, timeout: float) -> Received | None:
        """Return the next events, [] if none come within `timeout` seconds, None after death."""
        self._cluster.check_head()
        self.tick()
        self._ask()
        if not self._parcels:
            return []
        try:
            parcel = self._parcels[0].result(timeout)
        except FutureTimeoutError:
            self._look_now()
            return []
        except RayError as error:
            self._end(error)
            return None
        self._parcels.popleft()
        self._saw(parcel.look)
        size = len(parcel.head) + sum(each.nbytes for each in parcel.buffers)
        self._parcel_bytes = max(size, self._parcel_bytes * _DECAY)
        if parcel.ended:
            self._has_ended = True
            self._parcels.clear()
        self._ask()
        return self._events(parcel)

    def tick(self) -> None:
        """Read what the actor has logged, and ask where it is, unless that was done just now."""
        self._cluster.check_head()
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._look_now()

    def traceback(self) -> str:
        """Return the stack of the thread that makes batches; "" if the actor does not answer."""
        try:
            look: Look = ray.get(self._actor.look.remote(True), timeout=STACK_SECONDS)
        except RayError:
            return ""
        self._saw(look)
        self.heartbeat.leave_traceback(look.stack)
        return look.stack

    def disconnect(self) -> None:
        """Ask Ray to end the actor, without waiting."""
        if self._actor is not None:
            if self.ending is None:
                self._take_last_look()
            with contextlib.suppress(Exception):  # Ray may have been shut down
                ray.kill(self._actor)
        self._actor = None
        self._parcels.clear()

    kill = disconnect

    def close(self) -> None:
        """Give the actor up: other ranks of a shared pool may have it, otherwise it ends."""
        if self._pool is not None and self.is_connected:
            self._actor.open.remote(self._generation + 1, LanesToOpen(1, {}))  # no more batches
            if self._take_last_look():
                self._pool.offer(self._actor, self._actor.clear.remote())
                self._actor = None
        self.disconnect()

    def _ask(self) -> None:
        """Ask for as many parcels as may be under way."""
        while not self._has_ended and len(self._parcels) < self._most_parcels:
            self._parcels.append(self._actor.parcel.remote(self._generation).future())

    @property
    def _most_parcels(self) -> int:
        most = self._prefetch * (2 if self._parcel_bytes <= SMALL_SLOT else 1)
        if self._parcel_bytes:
            most = min(most, max(1, int(self._max_bytes // self._parcel_bytes)))
        return most

    def _events(self, parcel: Parcel) -> Received:
        """Return the events of a parcel, whose arrays are views of Ray's object store."""
        if not parcel.buffers:
            data = memoryview(parcel.head)
            return [UnreadEvent(self.rebuilding, data, each) for each in parcel.layouts]
        begun = time.perf_counter()
        head = memoryview(parcel.head)
        *before, last = parcel.layouts
        events = [rebuild_event(each.lane, head[each.start : each.stop], []) for each in before]
        buffers = self._buffers(parcel.buffers)
        events.append(rebuild_event(last.lane, head[last.start : last.stop], buffers))
        self.rebuilding.count(begun)
        return events

    def _buffers(self, buffers: Sequence[Any]) -> list[Any]:
        """Return buffers that programs may write to: views, unless too many are viewed already."""
        if len(self._leases) >= LEASES:
            self.num_copied += 1
            return [bytearray(each) for each in buffers]
        lease = _ViewedBatch()
        self._leases.add(lease)
        return [np.asarray(_Writable(each, lease)) for each in buffers]

    def _look_now(self) -> None:
        """Read the last answer of the actor, and ask again."""
        look = self._look
        if look is not None and not look.done():
            return
        self._looked_at = time.monotonic()
        if look is not None:
            with contextlib.suppress(RayError):  # noticed when a parcel is waited for
                self._saw(look.result())
        self._look = None if self._actor is None else self._actor.look.remote(False).future()

    def _take_last_look(self) -> bool:
        """Read what the actor has logged; return whether it answers."""
        with contextlib.suppress(Exception):
            self._saw(ray.get(self._actor.leave.remote(), timeout=STACK_SECONDS))
            return True
        return False

    def _saw(self, look: Look) -> None:
        self._records.feed(look.records)
        page = bytearray(look.page)
        if Heartbeat(page).beats[0] >= self.heartbeat.beats[0]:  # parcels wait, looks do not
            self._page[: len(page)] = page

    def _end(self, error: RayError) -> None:
        """Find out how the actor ended."""
        self.heartbeat.leave()
        if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
            raise ConfigError(f"a Ray actor cannot host lanes: {error.cause}") from error
        try:
            address = self._address.result(0)
        except (FutureTimeoutError, RayError):
            first, *rest = str(error).splitlines()
            reason = next((line for line in rest if line.startswith("The actor")), first)
            if "failed to import" in reason or "ModuleNotFoundError" in str(error):
                raise ConfigError(
                    f"energon cannot be imported in a Ray actor: {error}; install "
                    f"energon-loader=={own_versions()['energon-loader']} on all machines of the "
                    "cluster, or name it in RayWorkers(runtime_env=...)"
                ) from error
            self.ending = Ending(f"died while it started ({reason})", was_killed=True)
            return
        page = self._cluster.run_on(address.node, take_page, address.page, timeout=PAGE_SECONDS)
        host = f"on {address.host} (process {address.pid})"
        if page is None:
            self.ending = Ending(f"was lost with its node {address.host}", was_killed=True)
            return
        self._page[: len(page)] = page
        if self.heartbeat.traceback():
            self.ending = Ending(f"crashed {host}", was_killed=False)
        else:
            cause = f"was killed {host} (the system does this when memory runs out)"
            self.ending = Ending(cause, was_killed=True)


class _ViewedBatch:
    """Refers to the buffers of one batch, as long as something views them."""


class _Writable:
    """Memory of Ray's object store to which programs may write.

    Ray marks it as read-only because other processes may have the same object. Those of parcels
    are for one process, and are mapped for writing.
    """

    def __init__(self, array: Any, lease: _ViewedBatch) -> None:
        self.array = array
        self.lease = lease
        data = array.ctypes.data, False
        self.__array_interface__ = {
            "data": data,
            "shape": array.shape,
            "typestr": "|u1",
            "version": 3,
        }


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
