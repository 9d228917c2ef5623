from hypothesis import given
from hypothesis import strategies as st

from energon.loader.hosting import DeliveryOrder


def delivered(order, count):
    lanes = []
    for _ in range(count):
        lanes.append(order.lane)
        order.advance()
    return lanes


@given(st.dictionaries(st.integers(0, 7), st.integers(0, 9), min_size=1))
def test_delivers_in_ascending_global_number(batches):
    done = dict(batches)
    numbers = []
    for lane in delivered(DeliveryOrder(batches, 8), 30):
        numbers.append(done[lane] * 8 + lane)
        done[lane] += 1
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(numbers)


def test_leaves_out_a_lane_that_ended():
    order = DeliveryOrder({0: 0, 1: 0, 2: 0}, 3)
    order.advance()
    order.drop()
    assert delivered(order, 4) == [2, 0, 2, 0]


def test_names_no_lane_when_all_have_ended():
    order = DeliveryOrder({1: 4}, 3)
    order.drop()
    assert order.lane is None


def test_catches_up_lanes_that_are_behind():
    assert delivered(DeliveryOrder({0: 2, 1: 0}, 2), 5) == [1, 1, 0, 1, 0]
