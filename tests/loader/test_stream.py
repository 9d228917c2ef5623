from contextlib import suppress

import pytest

from energon.loader.hosting import InlineWorker, RankStream, deal_lanes
from energon.loader.options import LoaderOptions
from energon.loader.state import LanePosition
from tests.loader.fake_pipeline import fake, in_order


def stream(workers, lanes=5, rows=2):
    positions = {lane: LanePosition() for lane in range(lanes)}
    hosts = [InlineWorker(fake(rows=rows), LoaderOptions()) for _ in range(workers)]
    return RankStream(hosts, positions, lanes=lanes)


def drain(batches):
    found = []
    with suppress(StopIteration):
        while True:
            found.append(batches.next_batch())
    assert all(position.ended for position in batches.positions.values())
    return found


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_order_does_not_depend_on_who_hosts(workers):
    assert drain(stream(workers)) == in_order(5, 2)


def test_moves_positions_on():
    batches = stream(2)
    for _ in range(7):
        batches.next_batch()
    assert [position.batches for position in batches.positions.values()] == [2, 2, 1, 1, 1]
    assert batches.positions[0].saved_state() == {"row": 2}


def test_every_worker_has_a_lane():
    assert deal_lanes(range(3), 8) == [range(0, 3, 8), range(1, 3, 8), range(2, 3, 8)]
    assert [list(dealt) for dealt in deal_lanes(range(5), 2)] == [[0, 2, 4], [1, 3]]


def test_virtual_epochs_end_after_their_batches_wherever_they_began():
    batches = stream(2)
    batches.positions[0].epoch_batches = 1
    epochs = RankStream(
        [InlineWorker(fake(rows=2), LoaderOptions())], batches.positions, lanes=5, epoch_length=3
    )
    ends = []
    for _ in range(8):
        epochs.next_batch()
        ends.append(epochs.epoch_is_over)
    assert ends == [False, True, False, False, True, False, False, True]
