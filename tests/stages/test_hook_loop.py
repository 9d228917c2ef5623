from __future__ import annotations

from energon.stages.lane import HookLoop, Lane


class Rest:
    """No more samples; as soon as somebody asks for their number, the loop ends."""

    def __init__(self, loop):
        self.loop = loop

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration

    def __length_hint__(self):
        self.loop.__exit__()
        return 0


def test_a_profiler_may_look_at_a_loop_while_it_ends():
    """Profilers run in threads of their own, and a loop may end in the middle of what they do."""
    lane = Lane(0, 1)
    loop = HookLoop(lane)
    loop.keys = [(0, 0, 100 + number) for number in range(7)]
    loop.start, loop.finished = 100, 7
    loop.__enter__()
    loop.name, loop.rest = "encode_sample", Rest(loop)
    loop.update(lane.current)
    assert (lane.current.row, lane.current.address) == (106, (0, 0, 106))
