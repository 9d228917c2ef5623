"""The lanes of a rank in workers that all ranks of its host share.

One rank of each host, the first, runs the workers for all of them, in a thread (see `server.py`).
Every rank sends it the positions of its lanes, and gets their events through shared memory. If that
rank ends, the next one on the host continues in its place: each rank knows its own positions, and
sends them again.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Mapping, Sequence

from energon.errors import ConfigError, WorkerError
from energon.loader.lane_worker import Event, WorkerStatus
from energon.loader.options import LoaderOptions, logger
from energon.loader.replicas.peer import SOCKET_BYTES, Peer, meet_peers
from energon.loader.replicas.shared_events import EventReader
from energon.loader.shared_workers.server import MakeWorkers, Opening, WorkerServer
from energon.loader.state import LanePosition
from energon.loader.transport.forks import forget_in_forks
from energon.loader.transport.slots import SHARED_LEASES
from energon.loader.transport.wire import is_readable
from energon.replica import ranks_of_job
from energon.worker import WorkerConfig


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
        if config.is_replicated or not config.num_workers:
            reason = "num_workers=0" if not config.num_workers else "a replica of several processes"
            raise ConfigError(
                f"shared_workers='host' with {reason}: workers can be shared by data-parallel "
                "ranks of one process each, which need at least 1; omit shared_workers"
            )
        ranks = ranks_of_job("shared_workers='host'")
        if len(ranks.members) != config.world_size or ranks.own.rank != config.rank:
            raise ConfigError(
                f"shared_workers='host': this is rank {config.rank} of {config.world_size}, but "
                f"rank {ranks.own.rank} of {len(ranks.members)} of torch.distributed; ranks that "
                "share workers must be those of the process group"
            )
        self._make_workers = weakref.WeakMethod(make_workers)
        self._rank = config.rank
        self._peers = meet_peers(ranks)
        self._left = list(ranks.neighbors)
        self._servers: list[WorkerServer] = []
        self._reader = EventReader(options, views=SHARED_LEASES - 1, is_only=True)
        self._positions: Mapping[int, LanePosition] = {}
        self._lanes = 1
        self._pass = self._generation = self._number = 0
        self._owner = os.getpid()
        self.shared = None
        self.is_cut = False
        forget_in_forks(self)
        self.leave = weakref.finalize(self, _leave, self._peers, self._servers)
        if self._left[0] == self._rank:
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
        if self._left[0] == self._rank and not self._servers:
            self._serve()
        return self._peers[self._left[0]]

    def _serve(self) -> None:
        """Run the workers from now on."""
        own, end = socket.socketpair()
        for each in (own, end):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        others = {at: self._peers[at] for at in self._left if at != self._rank}
        clients = {self._rank: Peer(end, rank=self._rank, needs_data=True), **others}
        self._servers.append(WorkerServer(clients, self._pass, self._make_workers))
        self._peers[self._rank] = Peer(own, rank=self._rank, needs_data=True)

    def take(self) -> Event:
        """Return the next event."""
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
                return self._reader.read(passed, passed.shared)

    def _succeed(self) -> None:
        """Turn to the next rank of the host, as the one that ran the workers is gone."""
        lost = self._left.pop(0)
        self._peers[lost].leave()
        if not self._left or lost == self._rank:
            raise WorkerError(
                f"the workers that the ranks of this host share have ended with rank {lost}, and "
                "no rank is left to run them; the log of that rank says why. Build a new loader in "
                "all ranks, and restore a saved state"
            )
        logger.warning(
            "rank %d, which ran the workers of this host, has ended; rank %d continues in its "
            "place, with the same batches",
            lost,
            self._left[0],
        )

    @property
    def status(self) -> WorkerStatus:
        """Return the status of the workers of the host."""
        peer = self._peers.get(self._left[0])
        waiting = peer is not None and not peer.is_gone and is_readable(peer.channel, 0)
        name = f"the workers of the host, run by rank {self._left[0]}"
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


def _leave(peers: Mapping[int, Peer], servers: Sequence[WorkerServer]) -> None:
    """Let others take over the workers."""
    for server in servers:
        server.close()
    for peer in peers.values():
        peer.leave()
