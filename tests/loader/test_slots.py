from array import array

import pytest

from energon.loader.transport.slots import (
    LEASES,
    SMALL_SLOT,
    SMALLEST_SLOT,
    Slot,
    SlotPool,
)


class Waited(Exception):
    pass


def no_wait():
    raise Waited


def pool(prefetch=2, max_bytes=1 << 30):
    return SlotPool(prefetch=prefetch, max_bytes=max_bytes)


def send_one(slots, size=100, wait=no_wait):
    slot = slots.take(wait)
    slot.write(bytes(size))
    slots.sent(slot)
    return slot


def test_a_slot_keeps_what_is_written_when_it_grows():
    slot = Slot(0)
    slot.write(b"abc")
    slot.write(bytes(SMALLEST_SLOT))
    slot.align(64)
    slot.write(array("q", [1, 2]))
    assert bytes(slot.view[:3]) == b"abc"
    assert slot.capacity == 2 * SMALLEST_SLOT
    assert slot.position % 64 == 16
    slot.release()


def test_memory_is_announced_once_each_time_it_changes():
    slot = Slot(0)
    slot.write(b"abc")
    assert len(slot.announce()) == 1
    assert slot.announce() == ()
    slot.write(bytes(SMALLEST_SLOT))
    assert len(slot.announce()) == 1
    slot.release()


@pytest.mark.parametrize(("size", "most"), [(100, 4), (SMALL_SLOT, 4), (SMALL_SLOT + 1, 2)])
def test_no_more_than_prefetch_are_on_their_way_or_twice_as_many_small_ones(size, most):
    slots = pool(prefetch=2)
    first = send_one(slots, size)
    for _ in range(most - 1):
        send_one(slots, size)
    with pytest.raises(Waited):
        slots.take(no_wait)
    slots.freed(first.index)
    assert slots.take(no_wait) is first


def test_leased_slots_do_not_count_as_on_their_way():
    slots = pool(prefetch=1)
    for _ in range(LEASES):
        slots.leased(send_one(slots, SMALL_SLOT + 1).index)
    send_one(slots, SMALL_SLOT + 1)
    with pytest.raises(Waited):
        slots.take(no_wait)


def test_the_slot_used_last_comes_first():
    slots = pool(prefetch=3)
    indices = [send_one(slots).index for _ in range(3)]
    for index in indices:
        slots.freed(index)
    assert slots.take(no_wait).index == indices[-1]


def test_memory_is_bounded():
    slots = pool(prefetch=4, max_bytes=3 * SMALLEST_SLOT)
    for _ in range(3):
        send_one(slots, SMALLEST_SLOT)
    with pytest.raises(Waited):
        slots.take(no_wait)


def test_a_bound_never_stops_the_last_slot():
    """If the trainer looks into all slots there are, no message would come to wait for."""
    slots = pool(prefetch=1, max_bytes=1)
    slots.leased(send_one(slots).index)
    slots.leased(send_one(slots).index)
    assert slots.take(no_wait).index == 2


def test_memory_for_one_huge_batch_is_given_back():
    slots = pool(prefetch=1)
    slots.freed(send_one(slots, 64 * SMALLEST_SLOT).index)
    for _ in range(200):
        slots.freed(send_one(slots).index)
    assert slots.take(no_wait).capacity <= 4 * SMALLEST_SLOT


def test_a_slot_that_was_not_sent_can_be_put_back():
    slots = pool(prefetch=1)
    slot = slots.take(no_wait)
    slots.put_back(slot)
    assert slots.take(no_wait) is slot
