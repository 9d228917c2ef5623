import faulthandler
import os

from energon.loader.transport.slots import Heartbeat, map_shared, seek_to_trace


def test_the_other_side_sees_where_work_is():
    page = Heartbeat.create()
    worker, parent = Heartbeat(map_shared(os.dup(page))), Heartbeat(map_shared(page))
    assert parent.lane_row is None
    assert parent.beats[0] == 0
    worker.enter(3)
    assert parent.lane_row is None
    assert parent.where == "between samples"
    worker.row(14, several=False)
    assert parent.lane_row == (3, 14)
    assert parent.where == "at lane 3 row 14"
    assert parent.beats[0] == 2
    before = parent.beats
    worker.next_row(15)
    assert (parent.lane_row, parent.beats != before) == ((3, 15), True)
    worker.row(12, several=True)
    assert parent.lane_row is None
    assert parent.where == "in a batch or pack that begins at lane 3 row 12"
    worker.leave()
    assert parent.lane_row is None


def test_shows_a_traceback_of_the_fault_handler():
    page = Heartbeat.create()
    parent = Heartbeat(map_shared(os.dup(page)))
    assert parent.traceback() == ""
    seek_to_trace(page)
    faulthandler.dump_traceback(page, all_threads=False)
    os.close(page)
    assert "test_shows_a_traceback_of_the_fault_handler" in parent.traceback()
