import inspect
import json
from dataclasses import fields
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, SkipSample, StateError
from energon.loader.options import LoaderOptions
from energon.loader.savable import SavableDataLoader, get_loader, get_savable_loader
from energon.loader.state import merge_states
from energon.loader.state_files import redistribute
from tests.effort import mixed
from tests.loader.fake_pipeline import FakeBatches, FakePipeline, fake


def loaders(world_size, *, workers=0, lanes=None, **kwargs):
    return [
        SavableDataLoader(
            fake(workers=workers, lanes=lanes, rank=rank, world_size=world_size, **kwargs)
        )
        for rank in range(world_size)
    ]


def take(ranks, count, start=0):
    """Batches `start` to `start + count` of all ranks, in the order of the run."""
    iterators = [iter(rank) for rank in ranks]
    return [next(iterators[i % len(ranks)]) for i in range(start, start + count)]


def skip_some(lane, row):
    if (lane * 7 + row * 3) % 5 == 0:
        raise SkipSample
    return lane, row


divisors = st.sampled_from([1, 2, 3, 4, 6, 12])


@settings(max_examples=50)
@given(divisors, divisors, divisors, st.integers(0, 30), st.integers(0, 30))
def test_resumes_exactly_on_any_topology(first, second, third, count, more):
    """Twice, the second time perhaps before every lane has emitted."""
    total = 12 * 8
    expected = take(loaders(1, lanes=12, make=skip_some), total)
    ranks = loaders(first, lanes=12, make=skip_some)
    seen = take(ranks, count)
    for world_size, step in ((second, more), (third, total - count - more)):
        states = [json.loads(json.dumps(rank.save_state_rank())) for rank in ranks]
        ranks = loaders(world_size, make=skip_some)
        for rank in ranks:
            rank.restore_state_global(states)
        seen += take(ranks, step, start=len(seen))
    assert seen == expected


def test_saving_right_after_restoring_gives_the_same_state():
    (loader,) = loaders(1, lanes=4)
    take([loader], 6)
    state = loader.save_state_global()
    (resumed,) = loaders(1)
    resumed.restore_state_global(state)
    assert resumed.save_state_global() == state


def test_refuses_other_lanes_than_those_of_the_state():
    (loader,) = loaders(1, lanes=6)
    with pytest.raises(StateError, match=r"saved with 6 lanes.*lanes=4"):
        loaders(1, lanes=4)[0].restore_state_global(loader.save_state_global())


def test_refuses_a_world_size_that_does_not_divide_the_lanes():
    (loader,) = loaders(1, lanes=6)
    with pytest.raises(ConfigError, match="6 lanes can't be divided evenly among 4 ranks"):
        loaders(4)[0].restore_state_global(loader.save_state_global())


def test_a_rank_state_of_another_world_size_is_not_enough():
    states = [rank.save_state_rank() for rank in loaders(2, lanes=4)]
    with pytest.raises(StateError, match="lanes 1, 3 are missing"):
        loaders(1)[0].restore_state_rank(states[0])


def test_a_rank_without_a_state_begins_at_the_beginning():
    (loader,) = loaders(1)
    loader.restore_state_rank(None)
    assert take([loader], 3) == take(loaders(1), 3)
    with pytest.raises(StateError, match="before the first batch"):
        loader.restore_state_rank(None)


def test_restores_only_before_the_first_batch():
    (loader,) = loaders(1)
    state = loader.save_state_rank()
    take([loader], 1)
    with pytest.raises(StateError, match="has delivered 1 batch"):
        loader.restore_state_rank(state)


def test_a_difference_is_named_unless_it_is_let_through(caplog):
    saved = loaders(1, print_of={"batch_size": 4, "data": {"a": 3}})[0].save_state_rank()
    now = {"batch_size": 8, "data": {"a": 3}}
    with pytest.raises(StateError, match="batch_size: saved 4, now 8"):
        loaders(1, print_of=now)[0].restore_state_rank(saved)
    loaders(1, print_of=now)[0].restore_state_rank(saved, strict=["batch_size"])
    assert "batch_size: saved 4, now 8" in caplog.text


def test_progress_in_the_epoch_survives_another_world_size():
    ranks = loaders(2, lanes=4, virtual_epoch_length=6)
    take(ranks, 8)
    resumed = loaders(1, virtual_epoch_length=12)[0]
    resumed.restore_state_global([rank.save_state_rank() for rank in ranks])
    assert len(list(resumed)) == 4
    assert len(list(resumed)) == 12


def test_a_state_saved_at_the_last_batch_begins_the_next_epoch():
    (loader,) = loaders(1, virtual_epoch_length=3)
    take([loader], 3)
    (resumed,) = loaders(1, virtual_epoch_length=3)
    resumed.restore_state_rank(loader.save_state_rank())
    assert list(resumed) == [(0, 3), (0, 4), (0, 5)]


def states_after(*steps):
    ranks = loaders(len(steps), lanes=2 * len(steps))
    for rank, count in zip(ranks, steps, strict=True):
        take([rank], count)
    return json.loads(json.dumps([rank.save_state_rank() for rank in ranks]))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((5, 4, 5), "rank 0 after 5 batches, rank 1 after 4 batches, rank 2 .*; rank 0 and rank 2"),
        ((4, 6, 4), "rank 1 is ahead"),
        ((0, 1), "rank 0 after 0 batches, rank 1 after 1 batch; rank 1 is ahead"),
        ((9, 2), "rank 0 is ahead"),
    ],
)
def test_rank_states_of_different_steps_are_refused(steps, message, caplog):
    states = states_after(*steps)
    merged = merge_states(states)
    for number in (1, len(steps)):
        with pytest.raises(StateError, match=f"different steps: .*{message}"):
            loaders(number)[0].restore_state_global(states)
        with pytest.raises(StateError, match="different steps"):
            loaders(number)[0].load_state_dict(states)
        with pytest.raises(StateError, match=r"different steps: lanes .* after \d+ batch"):
            loaders(number)[0].restore_state_global(merged)
    with pytest.raises(StateError, match="different steps"):
        redistribute(merged, 1)
    # Where that is wanted, no batch is lost or given twice.
    for strict in (False, ["steps"]):
        again = loaders(len(steps))
        for rank, count in zip(again, steps, strict=True):
            rank.restore_state_global(states, strict=strict)
            assert list(islice(rank, 9)) == list(islice(states_of_rank(rank), count, count + 9))
        assert "each lane continues from where it was" in caplog.text


def states_of_rank(loader):
    config = loader.worker_config
    return loaders(config.world_size, lanes=2 * config.world_size)[config.rank]


@pytest.mark.parametrize("steps", [(5, 5, 5), (5, 5, 4), (5, 4, 4), (1, 0, 0), (0, 0, 0)])
def test_rank_states_between_two_steps_are_one_state(steps):
    states = states_after(*steps)
    (loader,) = loaders(1)
    loader.restore_state_global(states)
    whole = loaders(1, lanes=6)[0]
    assert list(islice(loader, 9)) == list(islice(whole, sum(steps), sum(steps) + 9))


def test_lanes_that_have_ended_are_not_behind():
    ranks = loaders(2, lanes=4, rows=lambda lane: (1, 5, 2, 9)[lane])
    assert [len(list(islice(rank, 8))) for rank in ranks] == [3, 8]
    (loader,) = loaders(1, rows=lambda lane: (1, 5, 2, 9)[lane])
    loader.restore_state_global([rank.save_state_rank() for rank in ranks])
    assert len(list(loader)) == 6


ENDS = {
    "training that ends": {"rows": 3},
    "lanes of different length": {"rows": lambda lane: lane % 3},
    "validation": {"rows": 3, "restart": True},
    "validation with a limit": {"rows": 9, "restart": True, "virtual_epoch_length": 4},
}


RANKS = [(1, 1), (2, 2), (1, 2), (2, 1)]
"""How many ranks save a state, and how many continue from it."""


@pytest.mark.parametrize(("kind", "ranks_of"), mixed([*ENDS], RANKS))
def test_a_state_of_the_end_of_a_pass_begins_the_next_one(kind, ranks_of):
    before, after = ranks_of
    ranks = loaders(before, lanes=4, **ENDS[kind])
    passes = [list(rank) for rank in ranks]
    states = json.loads(json.dumps([rank.save_state_rank() for rank in ranks]))
    # The loaders that saved continue in the same way.
    assert [list(rank) for rank in ranks] == passes
    again = loaders(after, **ENDS[kind])
    for rank in again:
        rank.restore_state_global(states)
    whole = [list(rank) for rank in loaders(after, lanes=4, **ENDS[kind])]
    assert [list(rank) for rank in again] == whole
    assert [list(rank) for rank in again] == whole


@pytest.mark.parametrize(("kind", "ranks_of"), mixed([*ENDS, "hooks that skip"], RANKS))
def test_a_state_of_the_last_batch_begins_the_next_pass(kind, ranks_of):
    before, after = ranks_of
    pipeline = ENDS.get(kind, {"rows": 6, "make": skip_some})
    whole = [list(rank) for rank in loaders(after, lanes=4, **pipeline)]
    ranks = loaders(before, lanes=4, **pipeline)
    for rank, other in zip(ranks, loaders(before, lanes=4, **pipeline), strict=True):
        batches = list(other)
        assert list(islice(rank, len(batches))) == batches
    states = json.loads(json.dumps([rank.save_state_rank() for rank in ranks]))
    again = loaders(after, **pipeline)
    for rank in again:
        rank.restore_state_global(states)
    assert [list(rank) for rank in again] == whole
    assert [list(rank) for rank in again] == whole


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_that_is_through_before_others_does_not_begin_anew(count):
    lengths = {"rows": lambda lane: (1, 4, 1, 4)[lane]}
    ranks = loaders(2, lanes=4, **lengths)
    assert [len(list(islice(rank, count))) for rank in ranks] == [2, count]
    states = [rank.save_state_rank() for rank in ranks]
    again = loaders(2, **lengths)
    for rank in again:
        rank.restore_state_global(states)
    assert [len(list(rank)) for rank in again] == [0, 8 - count]
    assert [len(list(rank)) for rank in again] == [2, 8]


@pytest.mark.parametrize("kind", ENDS)
def test_a_state_within_a_pass_gives_the_rest_of_it(kind):
    (loader,) = loaders(1, lanes=4, **ENDS[kind])
    whole = list(loader)
    (loader,) = loaders(1, lanes=4, **ENDS[kind])
    seen = take([loader], len(whole) - 2)
    (resumed,) = loaders(1, **ENDS[kind])
    resumed.restore_state_rank(json.loads(json.dumps(loader.save_state_rank())))
    assert seen + list(resumed) == whole
    assert list(resumed) == whole


@pytest.mark.parametrize("getter", [get_savable_loader, get_loader])
def test_every_argument_of_a_getter_has_an_effect(getter):
    """Arguments that only programs for other packages pass belong to the names of those."""
    taken = {"dataset", "worker_config"}
    assert inspect.signature(getter).parameters.keys() - taken <= {
        option.name for option in fields(LoaderOptions)
    }


class HalfDone(FakePipeline):
    """Continues from the row after the one that failed, unless it is restored."""

    def open_lane(self, lane, state):
        batches = super().open_lane(lane, state)
        batches.__class__ = HalfDoneBatches
        return batches


class HalfDoneBatches(FakeBatches):
    def __next__(self):
        row = self.next_row
        try:
            return super().__next__()
        except ValueError:
            self.next_row = row + 1
            raise


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_after_a_failure_is_that_of_the_last_batch(workers):
    def fail(lane, row):
        if row == 3:
            raise ValueError("three")
        return lane, row

    with SavableDataLoader(HalfDone(fake(workers=workers).worker_config, fail)) as loader:
        with pytest.raises(ValueError, match="three"):
            list(loader)
        positions = loader.save_state_rank()["positions"]
    assert positions["0"] == {"batches": 3, "epoch_batches": 3, "state": {"row": 3}}
