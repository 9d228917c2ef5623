from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import DecodeError, StateError
from energon.plan.dealt import Deal, DealtPlan
from energon.samples.crude import UnreadableSample
from energon.stages.hooks.failures import Tolerance
from energon.stages.hooks.hook import SKIPPED, Hook
from energon.stages.lane import MAX_BLOCK_BYTES, MAX_PLANNED_ROWS, BuiltBlock, Host, Lane
from energon.stages.read import ReadDataset, raise_unreadable
from energon.testing import check_resume
from tests.stages.numbers import NumberPlan, NumberReader, numbers, taken


def test_resumes_at_every_position():
    assert [sample["n"] for sample in check_resume(numbers(60))] == list(range(0, 60, 2))


@given(
    takes=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 50)), min_size=1, max_size=20),
    skipped=st.frozensets(st.integers(0, 1700), max_size=20),
)
def test_takes_of_any_size_give_the_same_stream(takes, skipped):
    expected = [row for row in range(-(-5_000 // 3)) if row not in skipped]
    iterator = numbers(5_000).open(Lane(1, 3, skip_rows=skipped))
    begin = 0
    for count, put_back in takes:
        samples, rows = iterator.take(count)
        assert list(rows) == expected[begin : begin + len(rows)]
        assert [sample["n"] for sample in samples] == [3 * row + 1 for row in rows]
        assert samples or begin == len(expected)
        kept = max(0, len(rows) - put_back)
        if kept < len(rows):
            iterator.put_back(samples[kept:], rows[kept:])
            assert iterator.row == iterator.state_dict()["row"] == rows[kept]
        begin += kept


def test_a_take_beyond_the_end_gives_what_is_left():
    iterator = numbers(10).open(Lane(0, 2))
    assert len(taken(iterator, 100)) == 5
    assert iterator.take(1)[0] == []
    with pytest.raises(StopIteration):
        next(iterator)


@dataclass(frozen=True)
class DamagedReader(NumberReader):
    """Cannot read three samples of every seven."""

    def read(self, rows):
        samples = super().read(rows).samples(0, len(rows.leaf))
        return BuiltBlock(
            [
                UnreadableSample({**sample, "__key__": ""}, DecodeError("damaged"))
                if self.is_bad(sample)
                else sample
                for sample in samples
            ]
        )

    @staticmethod
    def is_bad(sample):
        return sample["n"] % 7 in (0, 5, 6)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_samples_that_cannot_be_read_are_skipped_and_counted_however_they_are_taken(counts):
    stage = replace(numbers(300), reader=DamagedReader())
    iterators = [stage.open(Lane(0, 1)) for _ in range(3)]
    expected = [{"n": n, "__restore_key__": (0, 0, n)} for n in range(300)]
    expected = [sample for sample in expected if not DamagedReader.is_bad(sample)]
    by_take, by_item, put_back = ([] for _ in range(3))
    for count in counts:
        for iterator, outputs in ((iterators[0], by_take), (iterators[2], put_back)):
            samples, places = iterator.take(count)
            assert list(places) == [sample["n"] for sample in samples]
            outputs += samples
        by_item += [sample for _, sample in zip(range(count), iterators[1], strict=False)]
        if half := len(samples) // 2:
            iterators[2].put_back(samples[-half:], places[-half:])
            del put_back[-half:]
    for iterator, outputs in zip(iterators, (by_take, by_item, put_back), strict=True):
        assert outputs == expected[: len(outputs)]
        bad = [n for n in range(iterator.row) if DamagedReader.is_bad({"n": n})]
        counted = iterator.lane.counts["failed"]
        assert counted >= len(bad) if outputs is put_back else counted == len(bad)


def test_samples_that_can_be_read_are_resumed_and_restored_among_those_that_cannot():
    stage = replace(numbers(300), reader=DamagedReader())
    check_resume(stage)
    readable = {"n": 1, "__restore_key__": (0, 0, 1)}
    assert stage.read_again(Lane(0, 1), [1, 7]) == [readable, SKIPPED]
    with pytest.raises(DecodeError, match="damaged"):
        stage.restore(Lane(0, 1), (0, 0, 7))


def test_a_run_tolerates_samples_that_cannot_be_read_while_others_can():
    """Three in a row fail, but readable ones count between them."""
    check = Hook("read", raise_unreadable, Tolerance(4, untried=4))
    stage = replace(numbers(7_000), reader=DamagedReader(), check=check)
    assert len(taken(stage.open(Lane(0, 1)), 4_000)) == 4_000


def test_the_first_block_is_as_small_as_asked_and_blocks_grow():
    dataset = numbers(None)
    iterator = dataset.open(Lane(0, 1))
    for _ in range(1000):
        iterator.take(32)
    reads = dataset.reader.reads
    assert reads[0] == 32
    assert reads == sorted(reads)
    assert reads[-1] == MAX_PLANNED_ROWS


def test_blocks_are_bounded_by_bytes():
    dataset = numbers(None, mean_sample_bytes=MAX_BLOCK_BYTES / 4)
    iterator = dataset.open(Lane(0, 1))
    assert [sample["n"] for sample in taken(iterator, 30)] == list(range(30))
    assert max(dataset.reader.reads) == 4


def test_refuses_the_state_of_another_stage():
    with pytest.raises(StateError, match="another pipeline"):
        numbers(5).open(Lane(0, 1), {"place": 3})


@dataclass(frozen=True)
class WatchedPlan(NumberPlan):
    """Notes which rows were planned together."""

    planned: list[np.ndarray] = field(default_factory=list)

    def numbers(self, lane, rows):
        self.planned.append(rows)
        return super().numbers(lane, rows)


LANES, BATCH = 6, 4


def lanes_of_a_stream(total=None, *, streams=1, parts=1):
    """Lanes that share a stream of numbers, and their reader."""
    reader = NumberReader()
    plan = DealtPlan(WatchedPlan(streams, total), Deal(LANES * streams, streams, BATCH, parts))
    host = Host()
    lanes = [Lane(number, plan.lanes, host=host) for number in range(plan.lanes)]
    for lane in lanes:
        lane.reading.plan = plan
    stage = ReadDataset(lambda _: plan, reader)
    return lanes, [stage.open(lane) for lane in lanes], reader


@pytest.mark.parametrize(("streams", "parts"), [(1, 1), (2, 2)])
def test_lanes_that_one_worker_hosts_are_read_together(streams, parts):
    """Of two streams, each batch of 8 has two parts, and is read like a batch of 8."""
    lanes, iterators, reader = lanes_of_a_stream(streams=streams, parts=parts)
    for part in range(4000):
        number, batch = part % len(lanes), part // parts
        numbers_of_part = [sample["n"] for sample in taken(iterators[number], BATCH)]
        if parts == 1:
            first = batch * BATCH
        else:
            first = batch // 2 * 2 * BATCH + part % 2 * BATCH
        assert [n // streams for n in numbers_of_part] == [*range(first, first + BATCH)]
        lanes[number].current.count_batch()
    assert len(reader.reads) < 40


@pytest.mark.parametrize("own", [range(0, 2 * LANES, 2), range(1, 2 * LANES, 4), [2, 3, 6]])
def test_a_worker_reads_and_plans_its_lanes_of_streams_together(own):
    """After a resume on more workers, or with batches of parts: each has some lanes of a stream."""
    lanes, iterators, _ = lanes_of_a_stream(streams=2, parts=2)
    for number in {*range(len(lanes))} - {*own}:
        iterators[number] = None
    planned = lanes[0].reading.plan.plan.planned
    for turn in range(1000):
        if turn == 10:  # the first blocks are small, and planned before it is known who takes turns
            planned.clear()
        for number in own:
            found = [sample["n"] for sample in taken(iterators[number], BATCH)]
            stream, place = number // 2 % 2, number // 4 * 2 + number % 2
            row = (turn * LANES + place) * BATCH
            assert found == [2 * each + stream for each in range(row, row + BATCH)]
            lanes[number].current.count_batch()
    assert 0 < len(planned) < 20


@given(st.lists(st.integers(0, LANES - 1), min_size=300, max_size=300), st.integers(1, 2 * BATCH))
def test_lanes_of_a_stream_that_do_not_take_turns_get_their_own_samples(order, count):
    lanes, iterators, _ = lanes_of_a_stream()
    rows = [0] * LANES
    for number in order:
        found = [sample["n"] for sample in taken(iterators[number], count)]
        turns = [divmod(row, BATCH) for row in range(rows[number], rows[number] + count)]
        assert found == [(turn * LANES + number) * BATCH + within for turn, within in turns]
        rows[number] += count
        lanes[number].current.count_batch()


@given(
    total=st.integers(0, 900),
    more=st.dictionaries(st.integers(0, 200), st.integers(-BATCH + 1, 2 * BATCH), max_size=3),
)
def test_lanes_that_fall_out_of_turn_and_come_to_an_end_get_their_own_samples(total, more):
    lanes, iterators, _ = lanes_of_a_stream(total)
    rows, found = [0] * LANES, []
    batch = 0
    while len(found) < total:
        number = batch % LANES
        # A lane that skips samples takes more of them for a batch.
        count = BATCH + more.get(batch, 0)
        samples = [sample["n"] for sample in taken(iterators[number], count)]
        turns = [divmod(row, BATCH) for row in range(rows[number], rows[number] + count)]
        own = [(turn * LANES + number) * BATCH + within for turn, within in turns]
        assert samples == [each for each in own if each < total]
        rows[number] += len(samples)
        found += samples
        lanes[number].current.count_batch()
        batch += 1
    assert sorted(found) == [*range(total)]
    assert all(iterator.take(1)[0] == [] for iterator in iterators)
