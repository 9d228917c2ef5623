"""One actor, as seen from the training process."""

from __future__ import annotations

import contextlib
import pickle
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from energon.errors import ConfigError
from energon.loader.lane_worker import LanesToOpen
from energon.loader.options import LoaderOptions
from energon.loader.ray_actors.actor import (
    ActorAddress,
    ActorSetup,
    Look,
    Parcel,
    own_versions,
    take_page,
)
from energon.loader.ray_actors.cluster import Cluster
from energon.loader.ray_actors.pool import SharedPool
from energon.loader.replaceable_worker import Ending
from energon.loader.transport.events import (
    RebuildClock,
    Received,
    TellsTime,
    UnreadEvent,
    rebuild_event,
)
from energon.loader.transport.reports import RecordLines
from energon.loader.transport.slots import LEASES, PAGE_BYTES, SMALL_SLOT, Heartbeat

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
        place = f"on {address.host} (process {address.pid})"
        if page is None:
            self.ending = Ending(f"was lost with its node {address.host}", was_killed=True)
            return
        self._page[: len(page)] = page
        if self.heartbeat.traceback():
            self.ending = Ending(f"crashed {place}", was_killed=False)
        else:
            cause = f"was killed {place} (the system does this when memory runs out)"
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
