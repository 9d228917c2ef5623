"""The lanes of a rank in workers that all ranks of its host share.

One rank of each host, the first, runs the workers for all of them, in a thread (`WorkerServer`).
Every rank sends it the positions of its lanes, and gets their events through shared memory. If that
rank ends, the next one on the host continues in its place: each rank knows its own positions, and
sends them again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from energon.errors import ConfigError, WorkerError
from energon.loader.hosting import RankStream, close_all
from energon.loader.lane_worker import Event, LaneWorker, SharedEvent, WorkerStatus, forget_in_forks
from energon.loader.options import LoaderOptions, logger
from energon.loader.replicas.peer import (
    SOCKET_BYTES,
    EventReader,
    EventSlots,
    Passed,
    Peer,
    meet_peers,
)
from energon.loader.state import LanePosition
from energon.loader.transport.events import is_readable
from energon.loader.transport.slots import leases_of_rank
from energon.worker import Replica, WorkerConfig, initialized_distributed, members_of


class SharedWorkers:
    """Hosts the lanes of a rank in the workers of its host.

    Args:
        config: The configuration of the rank; all ranks of the job must call this together.
        options: How lanes are hosted.
        make_workers: Returns the workers of the host, in the rank that runs them.
    """

    def __init__(
        self,
        config: WorkerConfig,
        options: LoaderOptions,
        make_workers: MakeWorkers,
    ) -> None:
        if not config.num_workers:
            raise ConfigError(
                "shared_workers='host' with num_workers=0: ranks can share one or more workers; "
                "omit shared_workers"
            )
        ranks = _ranks_of(config)
        self._make_workers = weakref.WeakMethod(make_workers)
        self._ranks = [member.rank for member in ranks.members]
        self._own = ranks.position
        self._peers = meet_peers(ranks)
        self._left = list(ranks.neighbors)
        self._servers: list[WorkerServer] = []
        self._leases = leases_of_rank(config)
        self._reader = EventReader(options, views=self._leases - 1)
        self._positions: Mapping[int, LanePosition] = {}
        self._lanes = 1
        self._pass = self._generation = self._number = 0
        self._owner = os.getpid()
        self.shared: SharedEvent | None = None
        forget_in_forks(self)
        self.leave = weakref.finalize(self, _leave, self._peers, self._servers)
        if self._left[0] == self._own:
            self._serve()

    def open(self, positions: Mapping[int, LanePosition], *, lanes: int) -> None:
        """Begin with these lanes."""
        if self._owner != os.getpid() or not self.leave.alive:
            raise WorkerError(
                "this loader is closed, or belongs to another process; build a new one in all "
                "ranks of the host"
            )
        self._positions, self._lanes = positions, lanes
        self._ask()

    def _ask(self) -> None:
        """Send the positions to the rank that runs the workers."""
        while True:
            self._generation += 1
            self._number = 0
            opening = Opening(self._pass, self._generation, self._lanes, dict(self._positions))
            try:
                return self._source.open(opening)
            except OSError:
                self._succeed()

    @property
    def _source(self) -> Peer:
        """The rank that runs the workers, which may be this one."""
        if self._left[0] == self._own and not self._servers:
            self._serve()
        return self._peers[self._left[0]]

    def _serve(self) -> None:
        """Run the workers from now on."""
        own, end = socket.socketpair()
        for each in (own, end):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        rank = self._ranks[self._own]
        others = [self._peers[at] for at in self._left if at != self._own]
        clients = [Peer(end, rank=rank, needs_data=True), *others]
        self._servers.append(
            WorkerServer(clients, self._pass, self._make_workers, leases=self._leases)
        )
        self._peers[self._own] = Peer(own, rank=rank, needs_data=True)

    def take(self) -> Event:
        """Return the next event."""
        self.shared = None
        while True:
            source = self._source
            self._reader.give_back(source)
            if not is_readable(source.channel, 0):
                source.wait_for(self._number)
            passed = self._reader.receive(source, is_first=self._number == 0)
            if passed is None:
                self._succeed()
                self._ask()
            elif (passed.generation, passed.number) != (self._generation, self._number):
                source.release(passed.generation, passed.number)
            elif passed.shared is not None:
                self._number += 1
                self._positions[passed.shared.layout.lane].skip_rows = passed.skip_rows
                event, self.shared = self._reader.read(passed, passed.shared)
                return event

    def _succeed(self) -> None:
        """Turn to the next rank of the host, as the one that ran the workers is gone."""
        lost = self._left.pop(0)
        self._peers[lost].leave()
        rank = self._ranks[lost]
        if not self._left or lost == self._own:
            raise WorkerError(
                f"the workers that the ranks of this host share have ended with rank {rank}, and "
                "no rank is left to run them; the log of that rank says why. Build a new loader in "
                "all ranks, and restore a saved state"
            )
        logger.warning(
            "rank %d, which ran the workers of this host, has ended; rank %d continues in its "
            "place, with the same batches",
            rank,
            self._ranks[self._left[0]],
        )

    @property
    def status(self) -> WorkerStatus:
        """Return the status of the workers of the host."""
        peer = self._peers.get(self._left[0])
        waiting = peer is not None and not peer.is_gone and is_readable(peer.channel, 0)
        name = f"the workers of the host, run by rank {self._ranks[self._left[0]]}"
        return WorkerStatus(name, None, int(waiting), None)

    def stats(self) -> dict[str, int]:
        """Return the counts of this rank, and of the workers if it runs them."""
        totals = dict(self._reader.stats)
        for server in self._servers:
            for name, number in server.stats().items():
                totals[name] = totals.get(name, 0) + number
        return totals

    def arrived(self) -> Event | None:
        """Return None: the next event is not read ahead."""
        return None

    def stop(self) -> None:
        """Do nothing: other ranks may need the workers."""

    def close(self) -> None:
        """Let the next lanes to be opened be of another pass; the workers run until `leave`."""
        self._pass += 1
        for server in self._servers:
            server.own_pass = self._pass

    def forget(self) -> None:
        """Give up what a fork has inherited."""
        self.leave.detach()
        for peer in self._peers.values():
            peer.leave()


def _ranks_of(config: WorkerConfig) -> Replica:
    """Return the processes of the job that load, with their hosts, and the position of this one.

    Raises:
        ConfigError: If torch.distributed is not initialized, or has other ranks.
    """
    distributed = initialized_distributed("shared_workers='host'")
    if config.replica is not None:
        return members_of(config.data_parallel_group, config.replica.own.host)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if (rank, size) != (config.rank, config.world_size):
        raise ConfigError(
            f"shared_workers='host': this is rank {config.rank} of {config.world_size}, but rank "
            f"{rank} of {size} of torch.distributed; ranks that share workers must be those of the "
            "process group, or come from WorkerConfig.from_mesh or its like"
        )
    return members_of(distributed.new_group(backend="gloo"))


def _leave(peers: Mapping[int, Peer], servers: Sequence[WorkerServer]) -> None:
    """Let others take over the workers."""
    for server in servers:
        server.close()
    for peer in peers.values():
        peer.leave()


LEAVE_OUT_SECONDS = 1.0
"""How long another rank waits for one that takes none; then the others continue without it."""
GATHER_SECONDS = 0.1
"""How long to wait for the ranks that have not begun yet when one begins: to open more lanes drops
all batches that were made ahead."""
SERVER_POLL_SECONDS = 0.05
SERVER_CLOSE_SECONDS = 5.0


MakeWorkers = Callable[[int], Sequence[LaneWorker]]
"""Returns the workers that as many ranks share."""


class Opening(NamedTuple):
    """The lanes that a rank wants from now on.

    Args:
        number_of_pass: The pass over the data, for which workers have a pipeline.
        generation: How often the rank has opened lanes.
        lanes: How many lanes the run has.
        positions: Where its lanes continue.
    """

    number_of_pass: int
    generation: int
    lanes: int
    positions: dict[int, LanePosition]


@dataclass
class _Client:
    """A rank, as the server knows it.

    Args:
        peer: The connection to it.
        opening: The lanes that are open for it.
        number: The number of its next event.
        is_stalled: Whether it takes no batches, so that the others do not wait for it.
        has_failed: Whether its last event was an error, after which it may open lanes again.
    """

    peer: Peer
    opening: Opening | None = None
    number: int = 0
    is_stalled: bool = False
    has_failed: bool = False

    @property
    def asks(self) -> bool:
        """Whether it wants other lanes than those that are open."""
        return self.peer.opening is not self.opening

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        return self.peer.has_ended or self.peer.is_gone

    @property
    def is_waiting(self) -> bool:
        """Whether it has taken all batches that it was sent, and waits for another."""
        return self.peer.waits_for == self.number and not (self.is_gone or self.is_stalled)

    def has_batches_left(self, number_of_pass: int) -> bool:
        """Whether it may want more batches of a pass."""
        opening = self.peer.opening
        if self.is_gone or opening is None or opening.number_of_pass != number_of_pass:
            return False
        if self.has_failed and not self.asks:
            return False
        return not all(position.ended for position in opening.positions.values())


@dataclass
class _Passing:
    """A worker whose events are passed on as they are taken."""

    worker: LaneWorker
    pass_on: Callable[[Event, SharedEvent | None], None]
    shared: SharedEvent | None = field(default=None, init=False)

    def open(self, positions: Mapping[int, LanePosition], *, lanes: int) -> None:
        self.worker.open(positions, lanes=lanes)

    def take(self) -> Event:
        event = self.worker.take()
        self.pass_on(event, self.worker.shared)
        return event

    def arrived(self) -> Event | None:
        return None

    @property
    def status(self) -> WorkerStatus:
        return self.worker.status

    def stats(self) -> dict[str, int]:
        return self.worker.stats()

    def stop(self) -> None:
        self.worker.stop()

    def close(self) -> None:
        self.worker.close()


class WorkerServer:
    """Takes the batches of all ranks of a host from workers, and passes each to its rank.

    Batches are made in the global order. A rank that ends, or takes no batches, does not keep the
    others waiting.

    Args:
        ranks: Connections to the ranks.
        own_pass: The pass that this rank is in.
        make_workers: Returns the workers, with the pipeline of the pass that this rank is in.
        leases: How many slots a rank may hold.
    """

    def __init__(
        self,
        ranks: Sequence[Peer],
        own_pass: int,
        make_workers: weakref.WeakMethod[MakeWorkers],
        *,
        leases: int,
    ) -> None:
        self._clients = [_Client(peer) for peer in ranks]
        self._leases = leases
        self.own_pass = own_pass
        """The pass whose pipeline `make_workers` uses; changed by this rank as it moves on."""
        self._make_workers = make_workers
        self._workers: list[LaneWorker] = []
        self._slots = EventSlots()
        self._stream: RankStream | None = None
        self._owners: dict[int, _Client] = {}
        self._pass = -1
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="energon workers", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        """Return the counts of all workers."""
        totals: dict[str, int] = {}
        for worker in list(self._workers):
            for name, number in worker.stats().items():
                totals[name] = totals.get(name, 0) + number
        return totals

    def close(self) -> None:
        """End the workers after the present batch; other ranks notice that the server is gone."""
        self._is_closing = True
        if self._thread is not threading.current_thread():
            self._thread.join(SERVER_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._step()
        except Exception:
            if not self._is_closing:
                logger.exception("the workers that the ranks of this host share have ended")
        finally:
            close_all(self._workers, None)
            for client in self._clients:
                client.peer.leave()

    def _step(self) -> None:
        """Pass on a batch, open lanes, or wait for either."""
        self._read_messages()
        resumes = self._resumes()
        lane = None if self._stream is None else self._stream.lane
        owner = None if lane is None else self._owners[lane]
        if owner is None or owner.asks or owner.is_gone or resumes or self._is_asked:
            if not self._reopen():
                self._wait(SERVER_POLL_SECONDS)
        elif len(owner.peer.behind) < self._leases or self._catches_up(owner):
            self._take()

    @property
    def _is_asked(self) -> bool:
        """Whether a rank wants other lanes of this pass than those that are open."""
        return any(client.asks and client.has_batches_left(self._pass) for client in self._clients)

    def _read_messages(self) -> None:
        for client in self._clients:
            if not client.is_gone:
                client.peer.read_messages()

    def _wait(self, seconds: float) -> None:
        """Wait for messages."""
        channels = [client.peer.channel for client in self._clients if not client.is_gone]
        if channels:
            is_readable(channels[0], seconds, *channels[1:])
        else:
            self._is_closing = True

    def _resumes(self) -> bool:
        """Return whether a rank that took no batches takes them again."""
        waiting = [each for each in self._clients if each.is_stalled]
        awake = [each for each in waiting if len(each.peer.behind) < self._leases]
        for client in awake:
            client.is_stalled = False
        return bool(awake)

    def _catches_up(self, client: _Client) -> bool:
        """Wait until a rank has taken batches.

        If others wait for theirs meanwhile, it is left out for now. Usually all take their batches
        in the same steps of the training, however long these are.
        """
        since: float | None = None
        while len(client.peer.behind) >= self._leases and not (client.is_gone or client.asks):
            if self._is_asked:
                return False
            now = time.monotonic()
            if not any(each.is_waiting for each in self._owners.values()):
                since = None
            elif since is None:
                since = now
            if self._is_closing or (since is not None and now - since > LEAVE_OUT_SECONDS):
                client.is_stalled = True
                self._reopen()
                return False
            self._wait(SERVER_POLL_SECONDS)
            self._read_messages()
        return not (client.is_gone or client.asks)

    def _reopen(self) -> bool:
        """Open the lanes that the ranks want now; return whether there are any.

        A pass begins when no rank needs batches of the one before, and this rank is in it, which
        has its pipeline.
        """
        if any(client.asks for client in self._clients):
            self._gather()
        clients = [client for client in self._clients if not client.is_gone]
        if not any(client.has_batches_left(self._pass) for client in clients):
            wanted = any(client.has_batches_left(self.own_pass) for client in clients)
            if not wanted or self.own_pass == self._pass:
                return self._open([])
            close_all(self._workers, None)
            self._pass = self.own_pass
        return self._open(
            [
                client
                for client in clients
                if client.has_batches_left(self._pass) and not client.is_stalled
            ]
        )

    def _gather(self) -> None:
        """Wait a moment for the ranks that have not begun yet."""
        deadline = time.monotonic() + GATHER_SECONDS
        while time.monotonic() < deadline and not self._is_closing:
            waited_for = [each for each in self._clients if not each.is_gone]
            if all(client.asks for client in waited_for):
                break
            self._wait(GATHER_SECONDS / 10)
            self._read_messages()

    def _open(self, clients: Sequence[_Client]) -> bool:
        """Let the workers host the lanes of these ranks."""
        self._stream, self._owners = None, {}
        positions: dict[int, LanePosition] = {}
        lanes = 1
        for client in clients:
            begins = client.asks
            if begins:
                client.opening = client.peer.opening
                client.number, client.has_failed = 0, False
            if client.opening is not None:
                lanes = client.opening.lanes
                # A rank that goes on knows already which of its lanes have ended.
                own = {v: p for v, p in client.opening.positions.items() if begins or not p.ended}
                positions |= own
                self._owners |= dict.fromkeys(own, client)
        if not positions or self._is_closing:
            return False
        make = self._make_workers()
        if make is None:  # the loader is gone
            self._is_closing = True
            return False
        if not self._workers:
            self._workers += make(len(self._clients))
        passing = [_Passing(worker, self._pass_on) for worker in self._workers]
        self._stream = RankStream(passing, dict(sorted(positions.items())), lanes=lanes)
        return True

    def _take(self) -> None:
        """Take the next batch from its worker, which passes it on."""
        stream = self._stream
        if stream is None or stream.lane is None:
            return
        owner = self._owners[stream.lane]
        try:
            stream.next_batch()
        except StopIteration:
            self._stream = None
        except Exception as error:
            self._stream = None
            if not owner.has_failed:  # so the worker has, and will make no more batches
                for lane, client in self._owners.items():
                    if not client.has_failed:
                        self._pass_on(Event(lane, error=error), None)
                close_all(self._workers, None)

    def _pass_on(self, event: Event, shared: SharedEvent | None) -> None:
        """Send an event to the rank of its lane, unless that has ended or wants others."""
        client = self._owners[event.lane]
        client.has_failed = event.error is not None
        if client.opening is None or client.is_gone or client.asks:
            return
        position = client.opening.positions[event.lane]
        passed = Passed(
            client.opening.generation,
            client.number,
            tuple(position.skip_rows),
            self._slots.shared(event, shared),
        )
        client.number += 1
        try:
            client.peer.send(passed)
        except OSError:
            client.peer.has_ended = True
