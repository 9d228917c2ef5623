"""Tensors of batches are broadcast to the devices of a replica: as a plain loader makes them."""

import os
import signal
from functools import partial
from itertools import islice
from math import prod

import numpy as np
import pytest

from energon.errors import ConfigError, WorkerError
from energon.loader.options import LoaderOptions
from energon.loader.replicas.context_parallel import ContextParallel
from energon.loader.savable import SavableDataLoader
from energon.worker import Replica, ReplicaMember, WorkerConfig
from tests.loader.fake_pipeline import FakePipeline
from tests.loader.replicas.ranks import check_need, everywhere, names, run_ranks
from tests.waiting import wait_until

torch = pytest.importorskip("torch")
DIMS = ("dp_shard", "pp", "cp", "tp")
LANES = 12
NCCL = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
"""Asking whether CUDA is available would initialize it, and forks could not use it."""


def make(lane, row):
    """A nested batch with strings, whose size varies, and which has empty tensors."""
    length, value = 8 * (row % 3), 100 * lane + row
    return {
        "name": f"{lane}/{row}",
        "tokens": torch.arange(2 * length).reshape(2, length) + value,
        "bounds": torch.tensor([0, length]),
        "nested": [
            {"texts": ["a", "b" * row], "mask": torch.ones(row % 2, 3, dtype=torch.bool)},
            (torch.tensor(value + 0.5, dtype=torch.bfloat16), np.arange(row)),
        ],
        "large": torch.full((20_000 * (row % 2), 2), value),
        "columns": torch.arange(12.0).reshape(3, 4).t() + value,
        "learned": torch.ones(3, requires_grad=True),
    }


def config_of(sizes, *, hosts=1, **settings):
    from torch.distributed.device_mesh import init_device_mesh

    nccl = "nccl" in torch.distributed.get_backend_config()
    mesh = init_device_mesh("cuda" if nccl else "cpu", sizes, mesh_dim_names=DIMS)
    host = f"host {torch.distributed.get_rank() % hosts}"
    settings = {"num_workers": 1, "device_broadcast": True, **settings}
    return WorkerConfig.from_mesh(mesh, lanes=LANES, host=host, **settings)


def loader_of(config, make=make, options=None, **pipeline):
    return SavableDataLoader(FakePipeline(config, make, **pipeline), options=options)


def plain(config, make=make, **pipeline):
    """The loader of a rank that is alone in its replica."""
    ranks = {"rank": config.rank, "world_size": config.world_size}
    return loader_of(WorkerConfig(**ranks, num_workers=0, lanes=LANES), make, **pipeline)


def check_equal(batch, expected, device):
    """Compare values, types and layouts; all tensors must view one buffer on the device."""
    from torch.utils._pytree import tree_leaves

    leaves, others = tree_leaves(batch), tree_leaves(expected)
    for leaf, other in zip(leaves, others, strict=True):
        if isinstance(other, torch.Tensor):
            assert leaf.device.type == device
            assert (leaf.dtype, leaf.stride()) == (other.dtype, other.stride())
            assert leaf.requires_grad == other.requires_grad
            assert torch.equal(leaf.cpu(), other)
        else:
            assert np.array_equal(leaf, other)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert len({each.untyped_storage().data_ptr() for each in tensors}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "hosts", "backend"),
    [
        ((1, 1, 1, 3), 1, "gloo"),
        ((2, 1, 1, 2), 2, "gloo"),
        ((1, 1, 2, 2), 2, "gloo"),
        pytest.param((1, 1, 1, 2), 1, "cpu:gloo,cuda:nccl", marks=NCCL),
    ],
)
def test_all_processes_have_the_batches_of_a_plain_loader_on_their_devices(
    tmp_path, sizes, hosts, backend
):
    number = prod(sizes)

    def work(rank):
        config = config_of(sizes, hosts=hosts)
        device = config.replica.device
        assert device == ("cuda" if "nccl" in backend else "cpu")
        loader, expected = loader_of(config, rows=2), plain(config, rows=2)
        for stop in (5, None, 3):
            batches = islice(loader, stop), islice(expected, stop)
            for batch, other in zip(*batches, strict=True):
                check_equal(batch, other, device)
        state = loader.save_state_global(0)
        assert loader.save_state_rank() == expected.save_state_rank()
        states = everywhere(state)
        loader.close()
        # Another mesh: all processes are data ranks of their own, or form one replica.
        for resumed_sizes in ((number, 1, 1, 1), (1, 1, 1, number)):
            resumed = config_of(resumed_sizes, num_workers=0)
            second, third = loader_of(resumed, rows=2), plain(resumed, rows=2)
            second.restore_state_global(states[0])
            third.restore_state_global(states[0])
            for batch, other in zip(islice(second, 4), third, strict=False):
                check_equal(batch, other, device)
            second.close()

    run_ranks(work, number, tmp_path, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("needs", [[False, True, "shapes", True], [True, False, True, "shapes"]])
def test_processes_without_data_take_no_part_in_broadcasts(tmp_path, needs):
    def work(rank):
        config = config_of((1, 1, 1, 4), hosts=2, needs_data=needs[rank])
        sources = {each.rank: each.source for each in config.replica.members}
        source = needs.index(True)
        assert sources == {at: source if need is True else None for at, need in enumerate(needs)}
        loader, expected = loader_of(config), plain(config)
        for batch, other in zip(islice(loader, 9), expected, strict=False):
            check_need(batch, other, needs[rank], "large", partial(check_equal, device="cpu"))
        assert loader.save_state_rank() == expected.save_state_rank()
        loader.close()

    run_ranks(work, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_context_ranks_cut_sequences_on_their_devices(tmp_path, hosts):
    def work(rank):
        config = config_of((1, 1, 2, 1), hosts=hosts)
        cut = ContextParallel(dims={"tokens": 1}, cu_seqlens="bounds")
        loader = loader_of(config, options=LoaderOptions(context_parallel=cut))
        own = cut.of(config.replica)
        for batch, other in zip(islice(loader, 9), plain(config), strict=False):
            assert torch.equal(batch["tokens"], own(other)["tokens"])
            assert torch.equal(batch["large"], other["large"])
        loader.close()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
def test_pipeline_stages_need_not_take_a_batch_at_the_same_time(tmp_path):
    def work(rank):
        config = config_of((1, 2, 1, 2), hosts=2)
        loader, expected = loader_of(config), plain(config)
        for stage in range(2):
            if stage == rank // 2:
                # As many as may be under way to another host.
                for batch, other in zip(islice(loader, 4), expected, strict=False):
                    check_equal(batch, other, "cpu")
            torch.distributed.barrier()
        loader.close()

    run_ranks(work, 4, tmp_path)


@pytest.mark.slow
def test_an_error_in_a_hook_is_raised_in_all_processes(tmp_path):
    def work(rank):
        flag = tmp_path / "mended"

        def failing(lane, row):
            if row == 1 and not flag.exists():
                raise ValueError("broken hook")
            return make(lane, row)

        config = config_of((1, 1, 1, 2))
        loader, expected = loader_of(config, failing), plain(config)
        assert names(islice(loader, LANES)) == names(islice(expected, LANES))
        for _ in range(2):
            with pytest.raises(ValueError, match="broken hook"):
                next(iter(loader))
            torch.distributed.barrier()
        flag.touch()
        for batch, other in zip(islice(loader, 6), expected, strict=False):
            check_equal(batch, other, "cpu")
        loader.close()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_is_killed_is_an_error_in_the_others(tmp_path, lost, hosts):
    def work(rank):
        loader = loader_of(config_of((1, 1, 1, 3), hosts=hosts))
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(WorkerError, match="resume all processes|closed its loader"):
            for _ in batches:
                pass

    run_ranks(work, 3, tmp_path, killed=(lost,), together=False)


@pytest.mark.slow
def test_a_process_that_hangs_is_an_error_in_the_others_after_the_deadline(tmp_path):
    def work(rank):
        options = LoaderOptions(watchdog_timeout_seconds=1, fail_on_timeout=True)
        batches = iter(loader_of(config_of((1, 1, 1, 3)), options=options))
        next(batches)
        if rank == 1:
            (tmp_path / "pid.new").write_text(str(os.getpid()))
            (tmp_path / "pid.new").rename(tmp_path / "pid")
            signal.pause()
        wait_until((tmp_path / "pid").exists)
        with pytest.raises(WorkerError, match="resume all|closed its loader|passed on no batch"):
            for _ in batches:
                pass
        if rank == 0:
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    run_ranks(work, 3, tmp_path, killed=(1,), together=False)


def alone():
    """The configuration of a process that is all of its replica."""
    replica = Replica((ReplicaMember(0, "a", True, source=0),), 0, device="cpu")
    return WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=LANES, replica=replica)


def test_a_single_process_has_tensors_on_its_device():
    for batch, other in zip(islice(loader_of(alone()), 4), plain(alone()), strict=False):
        check_equal(batch, other, "cpu")


@pytest.mark.parametrize("kind", ["sparse", "meta", "subclass"])
def test_tensors_that_are_not_strided_are_an_error(kind):
    class Labels(torch.Tensor):
        pass

    tensor = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "meta": lambda: torch.ones(2, device="meta"),
        "subclass": lambda: torch.ones(2).as_subclass(Labels),
    }[kind]
    with pytest.raises(ConfigError, match="expected strided tensors"):
        next(iter(loader_of(alone(), lambda lane, row: {"x": tensor()})))


def test_processes_that_disagree_are_named(tmp_path):
    def work(rank):
        with pytest.raises(ConfigError, match="rank 1 has False; all processes need the same"):
            config_of((1, 1, 1, 2), device_broadcast=rank == 0)

    run_ranks(work, 2, tmp_path)
