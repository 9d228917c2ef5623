"""One loader for a replica of the model: one process loads, all get its batches.

The loading process takes events from its workers and passes them on as they were written: on the
same host a descriptor of the shared memory and the offsets in it, so nothing is copied or pickled
again; to other hosts the bytes, over torch.distributed, to one process there that passes them on.
If all processes of another host have one context-parallel rank, only its part is sent there.
Every process reads the same events, so positions and states are the same in all of them.

If tensors are broadcast to devices (see `DeviceBroadcast`), their receivers get events without the
content of tensors, in the same way.

If the loading process dies, the next one on its host continues from its own position; events are
numbered, so none comes twice. If it takes part in broadcasts, that is an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from energon.errors import ConfigError, WorkerError
from energon.loader.hosting import DeliveryOrder, close_all, deal_lanes
from energon.loader.lane_worker import Event, LaneWorker, SharedEvent, WorkerStatus, forget_in_forks
from energon.loader.memory import copy_tensor
from energon.loader.options import LoaderOptions
from energon.loader.replicas.context_parallel import ContextParallel
from energon.loader.replicas.peer import (
    PEER_POLL_SECONDS,
    EventReader,
    EventSlots,
    Passed,
    Peer,
    meet_peers,
)
from energon.loader.state import LanePosition
from energon.loader.transport.events import is_readable
from energon.loader.transport.slots import ALIGNMENT, LEASES, EventLayout
from energon.messages import counted
from energon.samples.collate import map_tensors
from energon.worker import DataNeed, Replica, WorkerConfig

logger = logging.getLogger("energon")

MAX_BEHIND = 32
"""How many batches a process may be behind before the loading one waits: pipeline stages take the
same batch one after the other."""
MAX_REMOTE = 4
"""How many batches may be under way to another host."""

_CLOSED, _LEFT_BEHIND = -1, -2


class _Form(NamedTuple):
    """As much of a batch as a process or a host needs.

    Args:
        needs_data: As in `ReplicaMember`.
        context_rank: The context rank whose part of each sequence is enough; None for all of it.
    """

    needs_data: DataNeed
    context_rank: int | None = None


_WHOLE = _Form(True)


class ReplicaWorker:
    """Hosts the lanes of a rank in whichever process of its replica loads.

    Args:
        config: The configuration of a rank in a replica, all of whose processes must call this at
            the same time.
        options: How lanes are hosted.
        make_workers: Returns the workers of the rank, in the process that loads.
    """

    def __init__(
        self,
        config: WorkerConfig,
        options: LoaderOptions,
        make_workers: Callable[[], Sequence[LaneWorker]],
    ) -> None:
        replica = config.replica
        if replica is None:
            raise ConfigError(f"{config} has no replica; create it with from_mesh or its like")
        self._replica = replica
        self._options = options
        self._make_workers = weakref.WeakMethod(make_workers)
        self._peers = meet_peers(replica)
        context = options.context_parallel
        # If the program gives the context rank, this process does not know those of the others.
        is_known = context is not None and context.rank is None
        self._context = context.of(replica) if context and is_known else None
        self._remote = _Remote(replica, self._context)
        self._source = replica.neighbors[0]
        self._workers: list[LaneWorker] = []
        self._hosts: dict[int, LaneWorker] = {}
        self._positions: Mapping[int, LanePosition] = {}
        self._order = DeliveryOrder({}, 1)
        self._lanes = 1
        self._generation = 0
        self._number = 0
        self._last: Passed | None = None
        self.slots = EventSlots()
        self._reader = EventReader(options, views=LEASES - 1)
        self._owner = os.getpid()
        self.shared: SharedEvent | None = None
        self.is_cut = False
        """Whether the latest batch has only the sequences of this context rank."""
        forget_in_forks(self)
        self.leave = weakref.finalize(self, _leave, replica.position, self._peers, self._remote)

    @property
    def _loads(self) -> bool:
        """Whether this process makes the batches of its host."""
        return self._source == self._replica.position and not self._remote.is_source

    def open(self, positions: Mapping[int, LanePosition], *, lanes: int) -> None:
        """Begin with these lanes, as all processes of the replica must."""
        if self._owner != os.getpid() or not self.leave.alive:
            raise WorkerError(
                "this loader is closed, or belongs to another process; build a new one in all "
                "processes of the replica"
            )
        self._positions, self._lanes = positions, lanes
        self._generation += 1
        self._number = 0
        if self._loads:
            self._open_workers()

    def _open_workers(self) -> None:
        if not self._workers and (make := self._make_workers()) is not None:
            self._workers += make()
        self._order = DeliveryOrder(
            {v: p.batches for v, p in self._positions.items() if not p.ended}, self._lanes
        )
        left = [lane for lane, position in self._positions.items() if not position.ended]
        self._hosts.clear()
        for worker, dealt in zip(self._workers, deal_lanes(left, len(self._workers)), strict=False):
            self._hosts |= dict.fromkeys(dealt, worker)
            worker.open({lane: self._positions[lane] for lane in dealt}, lanes=self._lanes)

    def take(self) -> Event:
        """Return the next event: from a worker, or as another process passes it on."""
        while True:
            if self._loads:
                event, self.is_cut = self._load(), False
                break
            passed = self._receive()
            if passed is not None:
                event, self.is_cut = self._read(passed), passed.is_cut
                break
        self._number += 1
        return _reduced(event, _Form(self._replica.own.needs_passed_on))

    def _load(self) -> Event:
        """Take the next event from a worker, and pass it on."""
        lane = self._order.lane
        if lane is None:
            raise WorkerError("all lanes have ended; please report this energon bug")
        worker = self._hosts[lane]
        try:
            event = worker.take()
        except Exception as error:
            self._pass_on(Event(lane, error=error), None)
            raise
        self._pass_on(event, worker.shared)
        if event.ended:
            self._order.drop()
        elif event.error is None:
            self._order.advance()
        return event

    def _pass_on(self, event: Event, shared: SharedEvent | None) -> None:
        """Send an event to all others: in order, so that the next one to load has it first."""
        skip_rows = tuple(self._positions[event.lane].skip_rows)
        passed = Passed(self._generation, self._number, skip_rows, None)
        forms: dict[_Form, Passed] = {}
        if shared is not None:
            forms[_WHOLE] = passed._replace(shared=self.slots.shared(event, shared))
        needed = {*(_Form(peer.needs_data) for peer in self._readers), *self._remote.forms}
        for form in needed - forms.keys():
            reduced, is_cut = _reduced(event, form), False
            if self._context is not None and form.context_rank is not None:
                # If that fails, every process gets the whole, and raises the error itself.
                with contextlib.suppress(Exception):
                    part = replace(self._context, rank=form.context_rank)(reduced.batch)
                    reduced, is_cut = reduced._replace(batch=part), True
            forms[form] = passed._replace(shared=self.slots.shared(reduced, None), is_cut=is_cut)
        for peer in self._readers:
            self._send(peer, forms[_Form(peer.needs_data)])
        self._remote.send(forms)

    @property
    def _readers(self) -> list[Peer]:
        """The processes on this host that this one passes events on to."""
        own = self._replica.position
        return [
            peer
            for at, peer in self._peers.items()
            if at > own and not peer.is_gone and not peer.is_left_behind
        ]

    def _send(self, peer: Peer, passed: Passed) -> None:
        """Send an event to a process, unless that has ended or hangs."""
        try:
            if self._waits_for(peer):
                peer.send(passed)
        except OSError as error:
            peer.leave()
            _lose(self._replica, peer.rank, error)

    def _waits_for(self, peer: Peer) -> bool:
        """Wait until a process is not too far behind; return False if that takes too long.

        Raises:
            OSError: If the process has ended.
        """
        peer.read_messages()
        limit = self._options.watchdog_timeout_seconds
        deadline = None if limit is None else time.monotonic() + limit
        while len(peer.behind) >= MAX_BEHIND:
            if deadline is not None and time.monotonic() > deadline:
                logger.warning(
                    "rank %d has been %s behind for %g s, and gets no more from now on",
                    peer.rank,
                    counted(MAX_BEHIND, "batch"),
                    limit,
                )
                # What it has not read stays as it is.
                peer.is_left_behind = True
                peer.send(Passed(_LEFT_BEHIND, 0, (), None))
                return False
            if is_readable(peer.channel, PEER_POLL_SECONDS):
                peer.read_messages()
                if peer.has_ended:
                    raise ConnectionError("it has ended")
        return True

    def _receive(self) -> Passed | None:
        """Return the next event of this generation; None if this process is to load from now on."""
        while True:
            if self._remote.is_source:
                self._reader.give_back(None)
                passed = self._remote.receive(self)
            else:
                source = self._peers[self._source]
                passed = self._reader.receive(source, is_first=self._number == 0)
            if passed is None:
                if self._succeed():
                    return None
                continue
            if passed.generation == _CLOSED:
                raise WorkerError(
                    f"rank {self._source_rank}, which loads for this one, has closed its loader; "
                    "all processes of a replica need the same number of batches"
                )
            if passed.generation == _LEFT_BEHIND:
                raise WorkerError(
                    f"this process took no batch for so long that rank {self._source_rank}, which "
                    "loads for it, passes on no more; raise watchdog_timeout_seconds, or resume "
                    "all processes from a saved state"
                )
            if passed.generation > self._generation:
                raise WorkerError(
                    f"rank {self._source_rank}, which loads for this one, has begun another loop; "
                    "all processes of a replica need the same loops, of the same length"
                )
            if (passed.generation, passed.number) == (self._generation, self._number):
                return passed
            if not self._remote.is_source:
                self._peers[self._source].release(passed.generation, passed.number)

    def _read(self, passed: Passed) -> Event:
        """Rebuild an event, and pass it on if this process is the first of its host."""
        shared = passed.shared
        if shared is None:
            raise WorkerError("an event has no content; please report this energon bug")
        self._positions[shared.layout.lane].skip_rows = passed.skip_rows
        if self._remote.is_source:
            for peer in self._readers:
                self._send(peer, passed)
        self._last = passed
        event, _ = self._reader.read(passed, shared)
        return event

    @property
    def _source_rank(self) -> int:
        members = self._replica.members
        return members[0 if self._remote.is_source else self._source].rank

    def _succeed(self) -> bool:
        """Read from the next process, as the source is gone; return whether it is this one."""
        lost = self._source_rank
        _check_replaceable(self._replica, lost)
        if self._remote.is_source:
            self._remote.is_source = False
        else:
            self._peers[self._source].leave()
            neighbors = self._replica.neighbors
            self._source = neighbors[neighbors.index(self._source) + 1]
        if not self._loads:
            return False
        logger.warning(
            "rank %d, which loaded for this one, has ended; rank %d continues in its place, with "
            "the same batches",
            lost,
            self._replica.own.rank,
        )
        if self._last is not None and self._last.generation == self._generation:
            for peer in self._readers:  # one of them may lack the last event
                self._send(peer, self._last)
        self._open_workers()
        return True

    @property
    def status(self) -> WorkerStatus:
        """Return the status of the process that loads."""
        if self._workers:
            return self._workers[0].status
        ready = not self._loads and not self._remote.is_source
        waiting = ready and is_readable(self._peers[self._source].channel, 0)
        return WorkerStatus(f"rank {self._source_rank} of the replica", None, int(waiting), None)

    def stats(self) -> dict[str, int]:
        """Return the counts of all workers here, and of batches that had to be copied."""
        totals = dict(self._reader.stats)
        for worker in self._workers:
            for name, number in worker.stats().items():
                totals[name] = totals.get(name, 0) + number
        return totals

    def arrived(self) -> Event | None:
        """Return None: the next event is not read ahead."""
        return None

    def stop(self) -> None:
        """Let the workers of this process end."""
        for worker in self._workers:
            worker.stop()

    def close(self) -> None:
        """End the workers of this process; the replica stays together until `leave`."""
        close_all(self._workers, None)
        self._hosts.clear()

    def forget(self) -> None:
        """Give up what a fork has inherited."""
        self.leave.detach()
        for peer in self._peers.values():
            peer.leave()


class _Remote:
    """The way of events to other hosts, or from another host.

    Args:
        replica: The processes of the replica.
        context: How sequences are divided among them; None if they are not.
    """

    def __init__(self, replica: Replica, context: ContextParallel | None) -> None:
        self._torch: Any = sys.modules["torch"]  # which has formed the replica
        self._replica = replica
        leaders, own = replica.leaders, replica.position
        self.is_source = own in leaders[1:]
        """Whether this process gets its events from another host."""
        self._targets = leaders[1:] if own == leaders[0] else []
        self._under_way: deque[tuple[list[Any], object]] = deque()
        is_whole = context is None or replica.device is not None
        self._cuts = not is_whole and replica.context_size > 1
        self.forms = [self._form_of(each) for each in self._targets]
        """For each of the other hosts, the most that a process there needs of a batch."""
        number = _loaders_of.get(replica, 0)
        _loaders_of[replica] = number + 1
        self._tag = number

    def _form_of(self, leader: int) -> _Form:
        host = self._replica.members[leader].host
        members = [member for member in self._replica.members if member.host == host]
        needs = (member.needs_passed_on for member in members)
        need = max(needs, key=(False, "shapes", True).index)
        ranks = {member.context_rank for member in members if member.needs_data}
        return _Form(need, ranks.pop() if self._cuts and len(ranks) == 1 else None)

    def send(self, forms: Mapping[_Form, Passed]) -> None:
        """Begin to send an event to the first process of each other host, in the form it needs."""
        for at, form in zip(list(self._targets), list(self.forms), strict=True):
            try:
                self._send(at, forms[form])
            except RuntimeError as error:
                index = self._targets.index(at)
                del self._targets[index], self.forms[index]
                _lose(self._replica, self._replica.members[at].rank, error)

    def _send(self, at: int, passed: Passed) -> None:
        torch = self._torch
        while len(self._under_way) >= MAX_REMOTE * len(self._targets):
            works, _ = self._under_way.popleft()
            for work in works:
                work.wait()
        layout, content = None, np.empty(0, np.uint8)
        if passed.shared is not None:
            layout, content = _flat(passed.shared)
        values = pickle.dumps((*passed._replace(shared=None), layout))
        parts = [
            torch.tensor([len(values), len(content)]),
            torch.frombuffer(bytearray(values), dtype=torch.uint8),
            *([torch.from_numpy(content)] if len(content) else []),
        ]
        rank = self._replica.members[at].rank
        group = self._replica.group
        works = [torch.distributed.isend(part, rank, group=group, tag=self._tag) for part in parts]
        self._under_way.append((works, (parts, passed.shared)))

    def receive(self, worker: ReplicaWorker) -> Passed | None:
        """Return the next event of the loading process; None if it is gone."""
        torch = self._torch
        rank, group = self._replica.members[0].rank, self._replica.group

        def read(tensor: Any) -> Any:
            torch.distributed.recv(tensor, rank, group=group, tag=self._tag)
            return tensor

        try:
            values_bytes, content_bytes = read(torch.empty(2, dtype=torch.int64)).tolist()
            values = read(torch.empty(values_bytes, dtype=torch.uint8)).numpy().tobytes()
            *head, layout = pickle.loads(values)
            passed = Passed(*head)
            if layout is None:
                return passed
            slot = worker.slots.take()
            if slot.capacity < content_bytes:
                slot.allocate(content_bytes)
            read(torch.frombuffer(slot.view[:content_bytes], dtype=torch.uint8))
            slot.position = content_bytes
        except RuntimeError as error:
            logger.warning("no batches come from rank %d any more: %s", rank, error)
            return None
        return passed._replace(shared=worker.slots.share(slot, layout))

    def close(self) -> None:
        """Tell the other hosts that no more events come."""
        self.send(dict.fromkeys(self.forms, Passed(_CLOSED, 0, (), None)))
        # They are not awaited: a process that asks for no more events does not receive this one.
        _unreceived.extend(self._under_way)
        self._targets, self.forms = [], []


_unreceived: list[object] = []
_loaders_of: weakref.WeakKeyDictionary[Replica, int] = weakref.WeakKeyDictionary()


def _reduced(event: Event, form: _Form) -> Event:
    """Return an event with as much of its batch as a process needs, its sequences whole."""
    if form.needs_data is True:
        return event
    batch = event.batch if form.needs_data else None
    if form.needs_data == "shapes":
        batch = map_tensors(batch, lambda tensor: tensor.to("meta"))
    return event._replace(batch=batch)


def _lose(replica: Replica, rank: int, error: Exception) -> None:
    """Continue without a process that has ended, if that is possible."""
    _check_replaceable(replica, rank)
    logger.warning("rank %d gets no batches any more: %s", rank, error)


def _check_replaceable(replica: Replica, lost: int) -> None:
    """Raise WorkerError if a process has ended that takes part in broadcasts to devices."""
    if any(member.source is not None for member in replica.members if member.rank == lost):
        raise WorkerError(
            f"rank {lost} has ended, and with device_broadcast=True the others cannot continue "
            "without it; resume all processes from a saved state"
        )


class DeviceBroadcast:
    """Delivers batches with their tensors on the device of this process, in one buffer.

    The source of a group copies the tensors of a batch there, and broadcasts the buffer. The others
    get the same batch with tensors on the device "meta", which say what the buffer contains.

    Args:
        replica: The processes that need the same batches.
        seconds: How long to wait for the others; None for the limit of torch.distributed, which
            also applies to NCCL: only the device waits there, not this process.
    """

    def __init__(self, replica: Replica, seconds: float | None) -> None:
        self._replica = replica
        self._seconds = seconds

    def __call__(self, batch: Any) -> Any:
        """Return `batch` with all tensors on the device.

        Raises:
            ConfigError: If it has tensors that are more than numbers in memory.
            WorkerError: If another process has ended, or takes no batch.
        """
        torch, device, own = sys.modules["torch"], self._replica.device, self._replica.own
        is_source, stop = own.source == own.rank, 0
        tensors, shapes, spans = [], [], []

        def add(tensor: Any) -> Any:
            nonlocal stop
            _check_strided(tensor, has_content=is_source)
            shape = tensor.to("meta")
            start = -(-stop // ALIGNMENT) * ALIGNMENT
            stop = start + shape.nbytes
            tensors.append(tensor)
            shapes.append(shape)
            spans.append(slice(start, stop))
            return tensor

        map_tensors(batch, add)

        def views(buffer: Any) -> list[Any]:
            parts = (buffer[span].view(s.dtype) for span, s in zip(spans, shapes, strict=True))
            return [p.as_strided(s.shape, s.stride()) for p, s in zip(parts, shapes, strict=True)]

        if is_source:
            buffer = torch.empty(stop, dtype=torch.uint8, pin_memory=device == "cuda")
            for view, tensor in zip(views(buffer), tensors, strict=True):
                copy_tensor(view, tensor)
            buffer = buffer.to(device, non_blocking=True)
        else:
            buffer = torch.empty(stop, dtype=torch.uint8, device=device)
        if stop and self._replica.device_group is not None:
            self._broadcast(buffer)
        received = iter(views(buffer))
        return map_tensors(batch, lambda old: next(received).requires_grad_(old.requires_grad))

    def _broadcast(self, buffer: Any) -> None:
        """Send the buffer to the others, or receive it."""
        options = sys.modules["torch"].distributed.BroadcastOptions()
        options.rootRank = 0
        limits = []
        if self._seconds is not None and self._replica.device == "cpu":
            limits.append(timedelta(seconds=self._seconds))
            # After a wait alone, the operation would go on, and the process could not exit before
            # the limit of the group, half an hour. Gloo of older versions of torch ignores this.
            options.timeout = limits[0]
        try:
            self._replica.device_group.broadcast([buffer], options).wait(*limits)
        except RuntimeError as error:
            raise WorkerError(
                f"the broadcast of a batch by rank {self._replica.own.source} has failed: a "
                "process of the replica has ended, or takes no batches; resume all processes from "
                "a saved state"
            ) from error


def _check_strided(tensor: Any, *, has_content: bool) -> None:
    """Raise ConfigError unless a tensor is no more than numbers in memory, or their shape."""
    torch = sys.modules["torch"]
    is_special = tensor.is_nested or tensor.is_quantized or tensor.is_meta == has_content
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or is_special:
        raise ConfigError(
            f"device_broadcast=True: found a {type(tensor).__name__} of layout {tensor.layout} on "
            f"device {tensor.device} in a batch, expected strided tensors; convert it in the "
            "encoder, or omit device_broadcast"
        )


def _flat(shared: SharedEvent) -> tuple[EventLayout, Any]:
    """Return an event as bytes, and where it is in them."""
    lane, start, stop, buffers = shared.layout
    end = max([stop, *(stop for _, stop in buffers)])
    if isinstance(shared.content, bytes):
        return shared.layout, np.frombuffer(bytearray(shared.content), np.uint8)
    moved = [(begin - start, finish - start) for begin, finish in buffers]
    return EventLayout(lane, 0, stop - start, moved), shared.content.view()[start:end]


def _leave(own: int, peers: Mapping[int, Peer], remote: _Remote) -> None:
    """Tell the others that this process passes on no more events."""
    for at, peer in peers.items():
        if at > own and not peer.is_gone:
            with contextlib.suppress(OSError):
                peer.send(Passed(_CLOSED, 0, (), None))
        peer.leave()
    with contextlib.suppress(Exception):  # the process group may be gone
        remote.close()
