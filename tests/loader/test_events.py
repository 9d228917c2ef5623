import os
import pickle
import socket
import sys
import weakref

import numpy as np
import pytest

from energon.loader.lane_worker import Event
from energon.loader.processes import main
from energon.loader.processes.link import ProcessLink
from energon.loader.transport import events as transport
from energon.loader.transport.events import Outbox, is_readable, receive
from energon.loader.transport.slots import Heartbeat, SlotPool, map_shared, read_table
from tests.waiting import wait_until


class Parent:
    """Receives what an outbox sends; keeps every slot until told to free it."""

    def __init__(self):
        self.socket, there = socket.socketpair()
        self.socket.setblocking(False)
        self.pool = SlotPool(prefetch=4, max_bytes=1 << 30)
        self.holds = []
        self.outbox = Outbox(
            there, self.pool, wait=self.free, poll=lambda: None, hold=self.holds.append
        )
        self.memory = {}
        self.there = there

    def free(self):
        raise AssertionError("the outbox waits for a slot")

    def messages(self):
        """For each message, its events as (lane, batch, error)."""
        found = []
        while True:
            try:
                message = receive(self.socket)
            except BlockingIOError:
                return found
            if message.descriptors:
                self.memory[message.slot] = map_shared(message.descriptors[0])
            view = memoryview(self.memory[message.slot])
            layouts = read_table(view[message.start : message.stop])
            found.append([self.event(view, layout) for layout in layouts])

    def event(self, view, layout):
        assert all(start % transport.ALIGNMENT == 0 for start, _ in layout.buffers)
        buffers = [view[start:stop] for start, stop in layout.buffers]
        lane, batch, *_, error = pickle.loads(view[layout.start : layout.stop], buffers=buffers)
        return lane, batch, error


@pytest.fixture
def parent():
    parent = Parent()
    yield parent
    parent.socket.close()
    parent.there.close()


@pytest.fixture
def always_quick(monkeypatch):
    monkeypatch.setattr(transport, "BUNDLE_SECONDS", 100)
    monkeypatch.setattr(transport, "HELD_SECONDS", 100)


def test_the_first_event_is_sent_at_once(parent, always_quick):
    parent.outbox.put(Event(0, "a"))
    assert parent.messages() == [[(0, "a", None)]]


def test_nothing_of_a_batch_is_kept_once_it_is_sent(parent):
    """The next batch then reuses its memory."""
    batch = {"large": np.zeros(1 << 15), "small": np.zeros(3)}
    arrays = [weakref.ref(array) for array in batch.values()]
    parent.outbox.put(Event(0, batch))
    del batch
    assert [array() for array in arrays] == [None, None]


def test_small_events_travel_together_while_the_parent_is_busy(parent, always_quick):
    for number in range(5):
        parent.outbox.put(Event(number, number))
    parent.outbox.flush()
    sizes = [len(events) for events in parent.messages()]
    assert sizes == [1, 4]


def test_quick_events_wait_for_a_few_more_while_the_parent_waits(parent, always_quick):
    parent.outbox.put(Event(0))
    assert len(parent.messages()) == 1
    parent.pool.freed(0)
    for number in range(transport.FEW_EVENTS):
        assert not parent.messages()
        parent.outbox.put(Event(number))
    assert [len(events) for events in parent.messages()] == [transport.FEW_EVENTS]


def test_what_is_kept_can_be_sent_by_another_thread(parent, always_quick):
    for number in range(3):
        parent.outbox.put(Event(number))
    parent.outbox.flush_idle()
    assert [len(events) for events in parent.messages()] == [1, 2]


def test_a_parent_that_waits_gets_what_is_kept(parent, always_quick, monkeypatch):
    """From another thread: the one that makes batches may take long for the next."""
    monkeypatch.setattr(main, "_TICK_SECONDS", 1e3)
    monkeypatch.setattr(main, "_end_process", lambda code: None)
    ours, theirs = socket.socketpair()
    companion = main._Companion(theirs.fileno(), os.getppid())
    companion.outbox = parent.outbox
    companion.start()
    for number in range(2):
        parent.outbox.put(Event(number))
    assert parent.holds[-1]
    ours.send(b"?")
    wait_until(lambda: not parent.holds[-1])
    assert [len(events) for events in parent.messages()] == [1, 1]
    ours.close()
    companion.join()
    theirs.close()


@pytest.mark.parametrize("holds", [True, False])
def test_a_worker_is_asked_only_for_what_it_holds_back(holds):
    link = ProcessLink()
    link.heartbeat = Heartbeat(map_shared(Heartbeat.create()))
    link.heartbeat.hold(holds)
    link._channel, channel = socket.socketpair()
    link._lifeline, lifeline = socket.socketpair()
    assert not link._wait(0)
    assert is_readable(lifeline, 0) is holds
    for each in (link._channel, channel, link._lifeline, lifeline):
        each.close()


def test_events_wait_for_a_few_milliseconds_while_the_parent_waits(
    parent, always_quick, monkeypatch
):
    monkeypatch.setattr(transport, "HELD_SECONDS", 0)
    for number in range(2):
        parent.outbox.put(Event(number))
    assert [len(events) for events in parent.messages()] == [1]
    parent.pool.freed(0)
    parent.outbox.put(Event(2))
    assert [len(events) for events in parent.messages()] == [2]


class Node:
    def __init__(self, other=None):
        self.other = other


@pytest.mark.parametrize("nest", [lambda node: node, lambda node: [{"a": node}]])
def test_samples_that_hold_others_stay_the_same_objects(parent, nest):
    first = Node()
    second = Node(nest(first))
    first.other = second
    parent.outbox.put(Event(0, [first, second]))
    (((_, (one, two), _),),) = parent.messages()
    assert one.other is two
    assert nest(one) == two.other


def test_a_batch_of_many_objects_does_not_slow_down_later_ones(parent, always_quick):
    parent.outbox.put(Event(0, [str(number) for number in range(200_000)]))
    assert sys.getsizeof(parent.outbox._writer._pickler) < 1 << 16


def test_slow_events_go_alone(parent, monkeypatch):
    monkeypatch.setattr(transport, "BUNDLE_SECONDS", 0)
    for number in range(3):
        parent.outbox.put(Event(number))
    assert [len(events) for events in parent.messages()] == [1, 1, 1]


def test_big_events_go_alone(parent, always_quick):
    for number in range(3):
        parent.outbox.put(Event(number, bytes(transport.BUNDLE_BYTES)))
    assert [len(events) for events in parent.messages()] == [1, 1, 1]


def test_arrays_lie_aligned_behind_their_pickle(parent):
    batch = {"a": np.arange(5000), "b": np.ones(7001, np.uint8), "c": b"x"}
    parent.outbox.put(Event(0, batch))
    ((event,),) = parent.messages()
    assert all((event[1][key] == batch[key]).all() for key in "ab")


def test_a_batch_that_cannot_be_pickled_leaves_the_others_intact(parent, always_quick):
    for batch in ("first", "second", [np.zeros(5000), (n for n in ())], "last"):
        parent.outbox.put(Event(0, batch))
    parent.outbox.flush()
    events = [event for events in parent.messages() for event in events]
    assert [event[1] for event in events] == ["first", "second", None, "last"]
    assert "cannot pickle 'generator'" in events[2][2].summary


def test_what_is_dropped_is_not_sent(parent, always_quick):
    parent.outbox.put(Event(0, "a"))
    parent.outbox.put(Event(0, "b"))
    parent.outbox.drop()
    parent.outbox.flush()
    assert [events[0][1] for events in parent.messages()] == ["a"]
