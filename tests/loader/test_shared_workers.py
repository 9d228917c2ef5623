"""Ranks that share the workers of their host get the batches of ranks with workers of their own."""

import os
import shutil
import signal
import time
from itertools import islice

import numpy as np
import pytest

from energon.errors import ConfigError, WorkerError
from energon.loader.options import LoaderOptions
from energon.loader.savable import SavableDataLoader
from energon.worker import WorkerConfig
from tests.loader.fake_pipeline import FakePipeline
from tests.loader.replicas.ranks import everywhere, names, run_ranks
from tests.waiting import wait_until

torch = pytest.importorskip("torch")
LANES = 12


def make(lane, row):
    value = 1000 * lane + row
    return {"name": f"{lane}/{row}", "large": np.full(10_000, value), "pid": os.getpid()}


def loader_of(rank, ranks, make=make, *, workers=2, options=None, **pipeline):
    config = WorkerConfig(rank=rank, world_size=ranks, num_workers=workers, lanes=LANES)
    options = options or LoaderOptions(shared_workers="host" if workers else None)
    return SavableDataLoader(FakePipeline(config, make, **pipeline), options=options)


def plain(rank, ranks, make=make, **pipeline):
    return loader_of(rank, ranks, make, workers=0, **pipeline)


def check_equal(batches, expected):
    for batch, other in zip(batches, expected, strict=False):
        assert batch["name"] == other["name"]
        assert (batch["large"] == other["large"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hosts", "workers"), [(2, 1, 1), (4, 1, 3), (4, 2, 2)])
def test_all_ranks_get_the_batches_of_workers_of_their_own(
    tmp_path, monkeypatch, ranks, hosts, workers
):
    def work(rank):
        host = f"host {rank * hosts // ranks}"
        monkeypatch.setattr("energon.worker._this_host", lambda: host)
        loader, expected = loader_of(rank, ranks, workers=workers), plain(rank, ranks)
        kept, pids = [], set()
        for batch, other in zip(islice(loader, 20), expected, strict=False):
            pids.add(batch["pid"])
            check_equal([batch], [other])
            if len(kept) < 6:
                kept.append((batch, other))
        check_equal(*zip(*kept, strict=True))
        assert len({pid for each in everywhere(pids) for pid in each}) == hosts * workers
        state = loader.save_state_rank()
        assert state == expected.save_state_rank()
        second, third = loader_of(rank, ranks), plain(rank, ranks)
        for resumed in (second, third):
            resumed.restore_state_rank(state)
        check_equal(islice(second, 5), third)
        second.close()
        loader.close()

    run_ranks(work, ranks, tmp_path)


@pytest.mark.slow
def test_passes_that_end_on_each_rank_at_another_batch_follow_each_other(tmp_path):
    def work(rank):
        def rows(lane):
            return 3 + lane % 5

        for restart in (False, True):
            loader = loader_of(rank, 3, rows=rows, restart=restart)
            expected = plain(rank, 3, rows=rows, restart=restart)
            for _ in range(3):
                assert names(loader) == names(expected)
            loader.close()

    run_ranks(work, 3, tmp_path)


@pytest.mark.slow
def test_loops_that_only_some_ranks_run_wait_for_no_other(tmp_path):
    def work(rank):
        loader, expected = loader_of(rank, 2), plain(rank, 2)
        check_equal(islice(loader, 2), expected)
        torch.distributed.barrier()
        if rank == 1:
            check_equal(islice(loader, 40), expected)
        torch.distributed.barrier()
        check_equal(islice(loader, 10), expected)
        loader.close()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_begins_later_waits_for_no_other(tmp_path, first):
    def rows(lane):
        return 1 if lane % 4 < 2 else 9  # half of the lanes have ended when it begins

    def work(rank):
        loader, expected = loader_of(rank, 2, rows=rows), plain(rank, 2, rows=rows)
        if rank == first:
            check_equal(islice(loader, 10), expected)
            time.sleep(0.2)  # by now it has all batches that may be sent ahead
        torch.distributed.barrier()
        if rank != first:
            check_equal(islice(loader, 20), expected)
        torch.distributed.barrier()
        assert names(loader) == names(expected)
        loader.close()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(tmp_path):
    def work(rank):
        loader, expected = loader_of(rank, 2), plain(rank, 2)
        first = next(iter(loader))
        next(iter(expected))
        if rank == 0:
            os.kill(first["pid"], signal.SIGKILL)
        check_equal(islice(loader, 20), expected)
        assert sum(everywhere(loader.stats()["worker_deaths"])) == 1
        loader.close()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_the_others_go_on_when_a_rank_is_killed(tmp_path, killed):
    def work(rank):
        loader, expected = loader_of(rank, 3), plain(rank, 3)
        check_equal(islice(loader, 5), expected)
        torch.distributed.barrier()
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        check_equal(islice(loader, 30), expected)
        loader.close()

    run_ranks(work, 3, tmp_path, killed=[killed], together=False)


@pytest.mark.slow
def test_a_rank_that_stops_keeps_no_other_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr("energon.loader.shared_workers.LEAVE_OUT_SECONDS", 0.1)

    def work(rank):
        loader, expected = loader_of(rank, 2), plain(rank, 2)
        check_equal(islice(loader, 2), expected)
        pids = everywhere(os.getpid())
        if rank == 0:
            os.kill(pids[1], signal.SIGSTOP)
            check_equal(islice(loader, 40), expected)
            os.kill(pids[1], signal.SIGCONT)
        check_equal(islice(loader, 40), expected)
        torch.distributed.barrier()
        loader.close()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
def test_no_batch_is_made_twice_while_ranks_train_in_step(tmp_path, monkeypatch):
    monkeypatch.setattr("energon.loader.shared_workers.LEAVE_OUT_SECONDS", 0.05)
    monkeypatch.setattr("energon.loader.shared_workers.GATHER_SECONDS", 20)
    made = tmp_path / "made"

    def noted(lane, row):
        with open(made, "a") as file:
            file.write(f"{lane}/{row}\n")
        return make(lane, row)

    def work(rank):
        loader, expected = loader_of(rank, 2, noted), plain(rank, 2)
        for batch, other in zip(islice(loader, 8), expected, strict=False):
            check_equal([batch], [other])
            time.sleep(0.3)  # longer than a rank that takes nothing may keep others waiting
            torch.distributed.barrier()
        if rank == 0:
            shutil.copy(made, tmp_path / "made in step")
        torch.distributed.barrier()  # the first rank that leaves has those of the other made anew
        loader.close()

    run_ranks(work, 2, tmp_path)
    batches = (tmp_path / "made in step").read_text().split()
    assert len(batches) >= 16
    assert len(set(batches)) == len(batches)


@pytest.mark.slow
def test_an_exception_is_raised_in_the_rank_of_its_lane(tmp_path):
    def broken(lane, row):
        if (lane, row) == (1, 2):
            raise ValueError("broken")
        return make(lane, row)

    def work(rank):
        loader = loader_of(rank, 2, broken)
        expected = [f"{lane}/{row}" for row in range(4) for lane in range(rank, LANES, 2)]
        if rank == 1:
            assert names(islice(loader, 12)) == expected[:12]
            for _ in range(2):
                with pytest.raises(ValueError, match="broken"):
                    next(iter(loader))
        else:
            assert names(islice(loader, 24)) == expected
        torch.distributed.barrier()
        loader.close()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
def test_workers_that_keep_dying_end_the_run_of_all_ranks(tmp_path):
    def work(rank):
        own = os.getpid()

        def rows(lane):
            return 9 if os.getpid() == own else os._exit(3)

        loader = loader_of(rank, 2, rows=rows)
        with pytest.raises(WorkerError, match="exited with code 3"):
            list(islice(loader, 3))
        torch.distributed.barrier()
        loader.close()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
def test_a_rank_that_closes_its_loader_leaves_the_workers_to_the_next(tmp_path):
    def work(rank):
        loader, expected = loader_of(rank, 2), plain(rank, 2)
        check_equal(islice(loader, 3), expected)
        torch.distributed.barrier()
        if rank == 0:
            loader.close()
            (tmp_path / "closed").touch()
        else:
            wait_until((tmp_path / "closed").exists)
            check_equal(islice(loader, 30), expected)
            loader.close()

    run_ranks(work, 2, tmp_path)


def test_wrong_settings_are_named(tmp_path):
    def work(rank):
        with pytest.raises(ConfigError, match="num_workers=0"):
            loader_of(rank, 2, workers=0, options=LoaderOptions(shared_workers="host"))
        with pytest.raises(ConfigError, match="this is rank 3 of 4, but rank [01] of 2"):
            loader_of(3, 4)

    run_ranks(work, 2, tmp_path)
    for options in ({"shared_workers": "node"}, {"shared_workers": "host", "workers": "thread"}):
        with pytest.raises(ConfigError, match="'host' with worker processes"):
            LoaderOptions(**options)
    with pytest.raises(ConfigError, match="call init_process_group first"):
        loader_of(0, 2)
