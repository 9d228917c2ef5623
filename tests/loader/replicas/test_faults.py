"""Ctrl-C and a small /dev/shm, with replicas, with shared workers, and with both."""

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from energon.loader.options import LoaderOptions
from energon.loader.savable import SavableDataLoader
from energon.worker import WorkerConfig
from tests.loader.fake_pipeline import FakePipeline
from tests.loader.replicas.ranks import run_ranks
from tests.waiting import wait_for_end

torch = pytest.importorskip("torch")
LANES = 4
WAYS = pytest.mark.parametrize("way", ["replicas", "shared workers", "both"])
CLONE_NEWNS = 0x20000


def make(lane, row):
    return {"name": f"{lane}/{row}", "large": np.full(1_000_000, 100 * lane + row)}


def config_of(way):
    """The configuration of a process of two ranks, of two replicas, or of one replica."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {"replicas": (1, 2), "shared workers": (2, 1), "both": (2, 2)}[way]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "tp"))
    return WorkerConfig.from_mesh(mesh, num_workers=2, lanes=LANES)


def loader_of(config, way):
    options = LoaderOptions(shared_workers=None if way == "replicas" else "host")
    return SavableDataLoader(FakePipeline(config, make), options=options)


def plain(config):
    """The loader of a rank that is alone."""
    alone = replace(config, num_workers=0, replica=None)
    return SavableDataLoader(FakePipeline(alone, make))


def number_of_ranks(way):
    return 4 if way == "both" else 2


@pytest.mark.slow
@WAYS
def test_ctrl_c_ends_all_processes_and_leaves_a_state_to_continue_from(tmp_path, monkeypatch, way):
    def work(rank):
        config = config_of(way)
        loader = loader_of(config, way)
        order = [batch["name"] for batch in islice(plain(config), 60)]
        delivered = [batch["name"] for batch in islice(loader, 3)]
        pids = [None] * number_of_ranks(way)
        torch.distributed.all_gather_object(pids, os.getpid())

        def loop():
            for batch in loader:
                delivered.append(batch["name"])
                if rank == 0 and len(delivered) == 10:
                    workers = [pid for each in pids for pid in children_of(each)]
                    (tmp_path / "workers").write_text(" ".join(map(str, workers)))
                    for pid in [*workers, *reversed(pids)]:  # as a terminal does
                        os.kill(pid, signal.SIGINT)
                time.sleep(0.01)

        with loader, pytest.raises(KeyboardInterrupt):
            loop()
        start = len(delivered)
        assert delivered == order[:start]
        resumed = plain(config)
        resumed.restore_state_rank(loader.save_state_rank())
        name = next(iter(resumed))["name"]
        assert name in order[start : start + 2]  # it may have come right after a batch

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        run_ranks(work, number_of_ranks(way), tmp_path)
        assert os.listdir(folder) == []
    workers = [int(pid) for pid in (tmp_path / "workers").read_text().split()]
    assert workers
    wait_for_end(workers)


def children_of(pid):
    texts = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for text in texts for child in text.split()]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount; this works in `unshare -rm`")
@WAYS
def test_batches_may_be_larger_than_dev_shm(tmp_path, way):
    def work(rank):
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        for command in (
            ["mount", "--make-rprivate", "/"],
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", "/dev/shm"],
        ):
            subprocess.run(command, check=True)
        config = config_of(way)
        loader = loader_of(config, way)
        for batch, other in zip(islice(loader, 12), plain(config), strict=False):
            assert (batch["large"] == other["large"]).all()
        assert os.listdir("/dev/shm") == []
        torch.distributed.barrier()
        loader.close()

    run_ranks(work, number_of_ranks(way), tmp_path)
