"""The state of one rank of several: what it says, and when it is enough for all of them."""

from __future__ import annotations

import json
import logging
from itertools import islice
from threading import get_ident

import pytest

from energon import (
    DefaultTaskEncoder,
    SkipSample,
    StateError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon import messages as once
from tests.datasets import make_crude
from tests.effort import some

LANES = 12


class Keys(DefaultTaskEncoder):
    decoder = None

    def encode_sample(self, sample):
        return sample["__key__"], sample["__restore_key__"]

    def batch(self, samples):
        return samples


class Skips(Keys):
    def encode_sample(self, sample):
        if sample["__key__"] == "s3":
            raise SkipSample
        return super().encode_sample(sample)


class Groups(Keys):
    def batch_group_criterion(self, sample):
        return len(sample[0]), None


class Yields(Keys):
    def encode_sample(self, sample):
        yield super().encode_sample(sample)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("ranks") / "ds", [30, 20])


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(once, "_given", {})


class Packs(Keys):
    def select_samples_to_pack(self, samples):
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples):
        return samples


def strings_in(value):
    if isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from strings_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from strings_in(each)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("encoder", [Keys, Skips, Groups, Yields, Packs])
def test_states_hold_no_documents_in_strings(root, encoder):
    packing = {"packing_buffer_size": 6} if encoder is Packs else {}
    first, second = open_ranks(root, 2, encoder, **packing)
    for loader in (first, second):
        list(islice(loader, 5))
    for state in (first.state_dict(), first.save_state_rank(), second.state_dict()):
        for text in strings_in(json.loads(json.dumps(state))):
            assert not text.lstrip().startswith(("{", "[")), text


def open_ranks(root, world_size, encoder=Keys, *, state=None, **settings):
    loaders = []
    for rank in range(world_size):
        lanes = LANES if state is None else None
        config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0, lanes=lanes)
        dataset = get_train_dataset(
            root, worker_config=config, batch_size=4, task_encoder=encoder(), **settings
        )
        loaders.append(get_savable_loader(dataset))
        if state is not None:
            loaders[-1].load_state_dict(json.loads(json.dumps(state)))
    return loaders


def steps(loaders, count):
    streams = [iter(loader) for loader in loaders]
    return [next(stream) for _ in range(count) for stream in streams]


@pytest.mark.parametrize("settings", [{}, {"shuffle_buffer_size": 10}])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 1), (4, 6), (12, 4)])
@pytest.mark.parametrize("count", some([0, 1, 3, 7], 2))
def test_the_state_of_any_rank_restores_all(root, settings, before, after, count):
    whole = steps(open_ranks(root, 1, **settings), before * count + 24)
    ranks = open_ranks(root, before, **settings)
    assert steps(ranks, count) == whole[: before * count]
    turn = before * count
    for state in (ranks[0].state_dict(), ranks[-1].save_state_rank()):
        again = open_ranks(root, after, state=state, **settings)
        streams = [iter(loader) for loader in again]
        found = [next(streams[g % after]) for g in range(turn, turn + 24)]
        assert found == whole[turn : turn + 24]


def test_a_restored_run_tells_all_lanes_again(root):
    whole = steps(open_ranks(root, 1), 40)
    ranks = open_ranks(root, 2)
    steps(ranks, 4)
    again = open_ranks(root, 4, state=ranks[1].state_dict())
    steps(again, 3)
    (last,) = open_ranks(root, 1, state=again[2].state_dict())
    assert steps([last], 20) == whole[20:40]


@pytest.mark.parametrize("encoder", [Skips, Groups, Yields])
def test_where_batches_differ_the_state_of_one_rank_is_not_enough(root, encoder, caplog):
    ranks = open_ranks(root, 2, encoder)
    steps(ranks, 40)
    states = [rank.state_dict() for rank in ranks for _ in range(2)]
    records = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    (warning,) = (text for text in records if "state_dict()" in text)
    assert "lanes of that rank only, of 2 ranks" in warning
    assert "torch.distributed.checkpoint" in warning
    assert "save_state_global()" in warning
    with pytest.raises(StateError, match=r"are missing; .* \(this is that of rank 0 of 2\)"):
        open_ranks(root, 1, encoder, state=states[0])
    open_ranks(root, 1, encoder, state=[states[0], states[-1]])
    open_ranks(root, 2, encoder, state=[states[0], states[-1]])


def test_no_rank_tells_all_lanes_after_ranks_went_on_in_the_middle_of_a_turn(root):
    (one,) = open_ranks(root, 1)
    steps([one], 9)
    ranks = open_ranks(root, 6, state=one.save_state_global())
    assert [rank.save_state_rank()["covers"]["alone"] for rank in ranks] == [False] * 6
    with pytest.raises(StateError, match="are missing"):
        open_ranks(root, 1, state=ranks[0].state_dict())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_global_restore_takes_the_state_of_one_rank_too(root, rank):
    whole = steps(open_ranks(root, 1), 12)
    ranks = open_ranks(root, 2)
    steps(ranks, 2)
    again = open_ranks(root, 4)
    for loader in again:
        loader.restore_state_global(ranks[rank].state_dict())
    assert steps(again, 2) == whole[4:12]


def test_says_that_lanes_of_others_were_told_by_one_rank(root, caplog):
    ranks = open_ranks(root, 2)
    steps(ranks, 2)
    state = ranks[0].state_dict()
    # Threads of earlier tests may still warn that their servers are gone.
    assert not [record for record in caplog.records if record.thread == get_ident()]
    open_ranks(root, 1, state=state)
    assert "from the state of rank 0 of 2" in caplog.text


def test_the_state_of_all_ranks_names_none(root):
    (one,) = open_ranks(root, 1)
    assert "covers" not in one.save_state_rank()
    ranks = open_ranks(root, 2)
    states = [rank.save_state_rank() for rank in ranks]
    assert [state["covers"]["rank"] for state in states] == [0, 1]
    open_ranks(root, 1, state=states)


@pytest.mark.parametrize("damage", [{"rank": 1}, {"world_size": 3}, {"rank": "x"}, {"alone": 1}])
def test_a_mark_that_does_not_fit_is_none(root, damage):
    state = open_ranks(root, 2)[0].save_state_rank()
    state["covers"] |= damage
    with pytest.raises(StateError, match=r"are missing; pass a global state or the states of all"):
        open_ranks(root, 1, state=state)


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if "len(loader)" in r.getMessage()]


def test_a_loop_that_passes_the_length_of_the_loader_says_so_once(root, caplog):
    (loader,) = open_ranks(root, 1)
    length = len(loader)
    for _ in range(3):
        assert len(list(islice(loader, length))) == length
    assert not warnings_in(caplog)
    for _ in range(2):
        steps([loader], length + 1)
    (warning,) = warnings_in(caplog)
    assert f"the {length} batches of len(loader)" in warning
    assert f"virtual_epoch_length={length} to get_train_dataset" in warning


@pytest.mark.parametrize("settings", [{"virtual_epoch_length": 3}, {"repeat": False}])
def test_loops_that_end_say_nothing(root, caplog, settings):
    (loader,) = open_ranks(root, 1, **settings)
    assert [len(list(loader)) for _ in range(3)] == [len(loader)] * 3
    assert not warnings_in(caplog)
