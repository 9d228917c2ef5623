"""Replicas whose loading processes share workers get the batches of plain loaders."""

import os
import signal
import tempfile
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from energon.loader.options import LoaderOptions
from energon.loader.savable import SavableDataLoader
from energon.worker import WorkerConfig
from tests.loader.fake_pipeline import FakePipeline
from tests.loader.replicas.ranks import everywhere, run_ranks
from tests.waiting import wait_for_end

torch = pytest.importorskip("torch")
LANES, WORKERS = 12, 2


def make(lane, row):
    """A batch with an array in shared memory, an array that is copied, and the process."""
    value = 1000 * lane + row
    return {"large": np.full(50_000, value), "small": np.full(3, value), "pid": os.getpid()}


def config_of(replicas, others, hosts=1):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (replicas, others), mesh_dim_names=("dp_shard", "tp"))
    host = f"host {mesh.get_local_rank('tp') * hosts // others}"
    return WorkerConfig.from_mesh(mesh, num_workers=WORKERS, lanes=LANES, host=host)


def loaders_of(config, make=make, **pipeline):
    """A loader with shared workers, and one whose rank is alone."""
    options = LoaderOptions(shared_workers="host")
    alone = replace(config, num_workers=0, replica=None)
    return (
        SavableDataLoader(FakePipeline(config, make, **pipeline), options=options),
        SavableDataLoader(FakePipeline(alone, make, **pipeline)),
    )


def check_equal(batches, expected):
    pids = set()
    for batch, other in zip(batches, expected, strict=False):
        assert (batch["large"] == other["large"]).all()
        assert (batch["small"] == other["small"]).all()
        pids.add(batch["pid"])
    return pids


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "others", "hosts"), [(4, 2, 1), (4, 2, 2), (4, 1, 1)])
def test_the_replicas_of_a_host_share_workers(tmp_path, monkeypatch, replicas, others, hosts):
    def work(rank):
        config = config_of(replicas, others, hosts)
        loader, expected = loaders_of(config)
        pids = set()
        for _ in range(25):
            pids |= check_equal(islice(loader, 1), expected)
            torch.distributed.barrier()
        workers = {pid for each in everywhere(pids) for pid in each}
        assert len(workers) == WORKERS
        if hosts == 1:  # those under way to another host are copied
            assert sum(everywhere(loader.stats()["batches_copied"])) == 0
        state = loader.save_state_rank()
        assert state == expected.save_state_rank()
        for resumed in (second := loaders_of(config)):
            resumed.restore_state_rank(state)
        check_equal(islice(second[0], 5), second[1])
        second[0].close()
        loader.close()
        torch.distributed.barrier()
        wait_for_end(workers)

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        run_ranks(work, replicas * others, tmp_path)
        assert os.listdir(folder) == []


@pytest.mark.slow
def test_passes_of_replicas_follow_each_other(tmp_path):
    def work(rank):
        config = config_of(2, 2)
        for restart in (False, True):
            loader, expected = loaders_of(config, rows=lambda lane: 2 + lane % 3, restart=restart)
            for _ in range(3):
                batches, others = list(loader), list(expected)
                assert len(batches) == len(others)
                check_equal(batches, others)
            loader.close()

    run_ranks(work, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1, 2, "worker"])
def test_all_others_continue_when_a_process_is_killed(tmp_path, killed):
    def work(rank):
        loader, expected = loaders_of(config_of(2, 2))
        (tmp_path / f"pids-{rank}").mkdir()

        def note(pids):
            for pid in pids:
                (tmp_path / f"pids-{rank}" / str(pid)).touch()

        pids = check_equal(islice(loader, 6), expected)
        note(pids)
        torch.distributed.barrier()
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if killed == "worker" and rank == 0:
            os.kill(min(pids), signal.SIGKILL)
        note(check_equal(islice(loader, 40), expected))
        loader.close()

    ranks = [] if killed == "worker" else [killed]
    run_ranks(work, 4, tmp_path, killed=ranks, together=False)
    workers = {int(path.name) for path in tmp_path.glob("pids-*/*")}
    wait_for_end(workers)


@pytest.mark.slow
def test_an_error_in_a_hook_is_raised_in_the_replica_of_its_lane(tmp_path):
    def work(rank):
        flag = tmp_path / "mended"

        def failing(lane, row):
            if (lane, row) == (1, 1) and not flag.exists():
                raise ValueError("broken hook")
            return make(lane, row)

        loader, expected = loaders_of(config_of(2, 2), make=failing)
        batches = LANES // 2
        check_equal(islice(loader, batches), expected)
        if rank >= 2:
            for _ in range(2):
                with pytest.raises(ValueError, match="broken hook"):
                    next(iter(loader))
        torch.distributed.barrier()
        flag.touch()
        check_equal(islice(loader, 2 * batches), expected)
        loader.close()

    run_ranks(work, 4, tmp_path)
