"""The state of one rank of several: what it says, and when it is enough for all of them."""

from __future__ import annotations

import json
import logging
from collections import Counter
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
from energon.loader.state import merge_states
from tests.datasets import make_crude
from tests.effort import mixed

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


WINDOWS = [{}, {"shuffle_buffer_size": 10}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "ranks", "count"),
    mixed(WINDOWS, [(2, 2), (3, 1), (4, 6), (12, 4)], [0, 1, 3, 7]),
)
def test_the_state_of_any_rank_restores_all(root, settings, ranks, count):
    before, after = ranks
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


@pytest.mark.slow
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
    with pytest.raises(
        StateError, match=r"the state of rank 0 of 2 covers .* are missing; .*redist"
    ):
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
    assert f"len(loader) = {length} batches" in warning
    assert f"virtual_epoch_length={length} to get_train_dataset" in warning


@pytest.mark.parametrize("settings", [{"virtual_epoch_length": 3}, {"repeat": False}])
def test_loops_that_end_say_nothing(root, caplog, settings):
    (loader,) = open_ranks(root, 1, **settings)
    assert [len(list(loader)) for _ in range(3)] == [len(loader)] * 3
    assert not warnings_in(caplog)


def open_from_rank_files(root, states, world_size, encoder=Keys, *, lanes=None, **settings):
    """Open the ranks of a run as trainers do that save one file a rank; others take one of them."""
    loaders = []
    for rank in range(world_size):
        config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0, lanes=lanes)
        dataset = get_train_dataset(
            root, worker_config=config, batch_size=4, task_encoder=encoder(), **settings
        )
        loaders.append(get_savable_loader(dataset))
        loaders[-1].restore_state_rank(json.loads(json.dumps(states[rank % len(states)])))
    return loaders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "ranks", "count"),
    mixed(WINDOWS, [(3, 5), (4, 1), (2, 12), (4, 7), (12, 9)], [0, 1, 3, 7]),
)
def test_rank_files_restore_any_number_of_ranks_exactly(root, settings, ranks, count):
    before, after = ranks
    whole = steps(open_ranks(root, 1, **settings), before * count + 5 * after)
    ranks = open_ranks(root, before, **settings)
    steps(ranks, count)
    states = [rank.save_state_rank() for rank in ranks]
    again = open_from_rank_files(root, states, after, **settings)
    # The first batch of each rank is its first one after those delivered.
    turn = before * count
    streams = [iter(loader) for loader in again]
    found = [next(streams[g % after]) for g in range(turn, turn + 4 * after)]
    assert found == whole[turn : turn + 4 * after]
    # From then on, such a run is saved and restored like any other.
    state = merge_states([loader.save_state_rank() for loader in again])
    (one,) = open_ranks(root, 1, state=state, **settings)
    turn += 4 * after
    assert steps([one], after) == whole[turn : turn + after]


def samples_of(batches):
    return Counter(sample for batch in batches for sample in parts(batch))


def parts(value):
    """Yield the samples in a batch of packs or samples: their key with the epoch and ordinal."""
    if isinstance(value, tuple):
        yield tuple(value[1][:3]), value[0]
    else:
        for each in value:
            yield from parts(each)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "ranks"),
    mixed([Skips, Groups, Yields, Packs], [(4, 3), (3, 4), (2, 5), (4, 8)]),
)
def test_rank_files_of_uneven_batches_restore_to_within_a_batch(root, encoder, ranks, caplog):
    before, after = ranks
    packing = {"packing_buffer_size": 6} if encoder is Packs else {}
    ranks = open_ranks(root, before, encoder, **packing)
    delivered = samples_of(steps(ranks, 40))
    states = [rank.save_state_rank() for rank in ranks]
    caplog.clear()
    again = open_from_rank_files(root, states, after, encoder, **packing)
    fits = LANES % after == 0 and after % before == 0
    assert warnings_of_ranks(caplog) == (0 if fits else after)
    # All ranks have their own samples, and few were delivered before the run was saved.
    later = samples_of(steps(again, 60))
    assert max(later.values()) == 1
    batch = 8 if encoder is Packs else 4
    assert (later & delivered).total() <= batch * LANES
    if encoder is not Groups:  # in which samples wait for others of their group
        epochs = Counter(epoch for (_, epoch, _), _ in (later | delivered))
        before = max(epoch for (_, epoch, _), _ in delivered)
        size = 49 if encoder is Skips else 50
        missed = sum(size - epochs[epoch] for epoch in range(before + 1))
        assert 0 <= missed <= batch * LANES


def warnings_of_ranks(caplog):
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return sum("energon checkpoint redist --new-world-size" in text for text in texts)


def test_the_state_of_another_rank_of_as_many_ranks_is_refused(root):
    ranks = open_ranks(root, 2, Skips)
    steps(ranks, 20)
    (_, other) = open_ranks(root, 2, Skips)
    with pytest.raises(StateError, match="state of rank 0 of 2 covers .* are missing"):
        other.restore_state_rank(ranks[0].save_state_rank())


@pytest.mark.parametrize("after", [1, 4])
def test_a_virtual_epoch_continues_from_the_file_of_one_rank(root, after):
    settings = {"virtual_epoch_length": 10}
    ranks = open_ranks(root, 2, **settings)
    assert {len(list(loader)) for loader in ranks} == {10}
    steps(ranks, 3)
    states = [rank.save_state_rank() for rank in ranks]
    again = open_from_rank_files(root, states, after, **settings)
    merged = open_ranks(root, after, state=states, **settings)
    assert [len(list(loader)) for loader in again] == [len(list(loader)) for loader in merged]
    assert {len(list(loader)) for loader in again} == {10}


def test_a_new_mix_needs_the_states_of_all_ranks(root):
    def blend(weight):
        blended = [{"path": str(root), "weight": 1}, {"path": str(root), "weight": weight}]
        return {"splits": {"train": {"blend": blended}}}

    ranks = open_ranks(blend(1), 4, Skips)
    steps(ranks, 9)
    state = ranks[0].save_state_rank()
    (one,) = open_ranks(blend(2), 1, Skips)
    with pytest.raises(StateError, match="are missing"):
        one.restore_state_rank(state, strict=["mix"])
