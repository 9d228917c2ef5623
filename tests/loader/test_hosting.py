from time import perf_counter

from energon.loader.hosting import LaneHost
from energon.loader.monitoring.accounts import FIRST_CALLS, BatchClock, Spent, account
from energon.loader.state import LanePosition
from energon.stages.lane import Host
from tests.loader.fake_pipeline import fake


class Recorder:
    def __init__(self):
        self.steps = []

    def enter(self, lane):
        self.steps.append(("enter", lane))

    def row(self, row, several):
        self.steps.append(("batch" if several else "row", row))

    def next_row(self, row):
        self.row(row, several=False)

    def leave(self):
        self.steps.append("leave")


def host(lanes=4, hosted=(1, 3), watch=None, rows=2, **positions):
    starts = {lane: LanePosition() for lane in hosted} | positions.get("at", {})
    return LaneHost(fake(rows=rows), starts, lanes=lanes, watch=watch)


def test_leaves_rows_out_and_goes_on_counting():
    at = {1: LanePosition(skip_rows=(0,), counts={"samples": 5})}
    event = next(host(at=at))
    assert event.batch == (1, 1)
    assert event.counts == {"skipped": 1, "samples": 6}


def test_times_are_sent_only_with_batches_that_add_some(monkeypatch):
    monkeypatch.setattr("energon.loader.monitoring.accounts.FIRST_CALLS", 1)
    monkeypatch.setattr("energon.loader.monitoring.accounts.SHARE", 1e-12)
    read = account(Spent("read"))
    at = {1: LanePosition(times={read: 5})}
    batches = host(hosted=(1,), at=at, rows=9)
    assert next(batches).times is None  # the first batch is not measured
    times = next(batches).times
    assert times[account(Spent("batches"))] > 0
    assert times[read] >= 5
    assert next(batches).times is None


def test_tells_where_it_is():
    watch = Recorder()
    next(host(watch=watch))
    assert watch.steps == [("enter", 1), ("row", 0), "leave"]


def test_opens_a_lane_when_it_is_its_turn():
    opened = []

    class Counting(type(fake())):
        def open_lane(self, lane, state):
            opened.append(lane.number)
            return super().open_lane(lane, state)

    batches = LaneHost(
        Counting(fake().worker_config), {0: LanePosition(), 1: LanePosition()}, lanes=2
    )
    next(batches)
    assert opened == [0]


def test_measured_batches_without_hooks_pause_measuring():
    clock, measured = BatchClock(Host()), 0
    while clock.due_at <= perf_counter() and measured < FIRST_CALLS:
        clock.begin()
        clock.end()
        measured += 1
    assert 0 < measured < FIRST_CALLS / 2
    assert clock.due_at < perf_counter() + 1
