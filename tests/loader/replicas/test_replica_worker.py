"""Processes of a replica get the batches of a plain loader, and one of them loads."""

import os
import signal
import tempfile
from itertools import islice
from typing import NamedTuple

import numpy as np
import pytest

from energon.errors import ConfigError, WorkerError
from energon.loader.options import LoaderOptions
from energon.loader.replicas.context_parallel import ContextParallel
from energon.loader.savable import SavableDataLoader
from energon.worker import WorkerConfig
from tests.loader.fake_pipeline import FakePipeline
from tests.loader.replicas.ranks import check_need, everywhere, names, run_ranks
from tests.waiting import wait_until

torch = pytest.importorskip("torch")
LANES = 12


def make(lane, row):
    """A batch with an array in shared memory, a tensor, a small array and a name."""
    value = 1000 * lane + row
    return {
        "name": f"{lane}/{row}",
        "large": np.full(10_000, value),
        "tensor": torch.full((5000,), value),
        "small": np.full(3, value),
    }


def mesh_of(*sizes, dims=("dp_shard", "tp")):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=dims)


def loader_of(config, make=make, options=None, **pipeline):
    return SavableDataLoader(FakePipeline(config, make, **pipeline), options=options)


def plain(config, make=make, **pipeline):
    """The loader of a rank that is alone in its replica."""
    alone = WorkerConfig(
        rank=config.rank, world_size=config.world_size, num_workers=0, lanes=config.lanes
    )
    return loader_of(alone, make, **pipeline)


def check_equal(batch, expected):
    assert batch["name"] == expected["name"]
    for part in ("large", "tensor", "small"):
        assert (batch[part] == expected[part]).all()


def check_names(batches, expected):
    for batch, other in zip(batches, expected, strict=False):
        assert batch["name"] == other["name"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "others", "hosts", "workers"),
    [(2, 2, 1, 0), (1, 3, 1, 2), (2, 2, 2, 1), (1, 4, 2, 2), (4, 1, 1, 0)],
)
def test_all_processes_get_the_batches_of_their_data_rank(
    tmp_path, monkeypatch, data, others, hosts, workers
):
    def work(rank):
        mesh = mesh_of(data, others)
        host = f"host {mesh.get_local_rank('tp') * hosts // others}"
        config = WorkerConfig.from_mesh(mesh, num_workers=workers, lanes=LANES, host=host)
        assert (config.rank, config.world_size) == (rank // others, data)
        loader, expected = loader_of(config), plain(config)
        kept = []
        for batch, other in zip(islice(loader, 25), expected, strict=False):
            check_equal(batch, other)
            if len(kept) < 8:
                kept.append((batch, other))
            batch["small"][:] = -1  # changes the batch of no other process
        for batch, other in kept:
            assert (batch["large"] == other["large"]).all()
        state = loader.save_state_rank()
        assert state == expected.save_state_rank()
        whole = loader.save_state_global(0)
        assert (whole is not None) == (rank == 0)
        states = [whole]
        torch.distributed.broadcast_object_list(states, src=0)
        assert len(states[0]["positions"]) == LANES
        # Another mesh: all processes are data ranks of their own, or form one replica.
        for sizes in ((data * others, 1), (1, data * others)):
            resumed = WorkerConfig.from_mesh(mesh_of(*sizes), num_workers=0, lanes=LANES)
            second = loader_of(resumed)
            second.restore_state_global(states[0])
            third = plain(resumed)
            third.restore_state_global(states[0])
            assert names(islice(second, 6)) == names(islice(third, 6))
            second.close()
        loader.close()

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        run_ranks(work, data * others, tmp_path)
        assert os.listdir(folder) == []


@pytest.mark.slow
def test_torch_distributed_checkpoint_stores_the_state_of_a_replica_once(tmp_path):
    from torch.distributed import checkpoint

    def work(rank):
        config = WorkerConfig.from_mesh(mesh_of(2, 2), num_workers=0, lanes=4)
        loader, expected = loader_of(config), plain(config)
        assert names(islice(loader, 7)) == names(islice(expected, 7))
        checkpoint.save({"data": loader}, checkpoint_id=tmp_path / "saved")
        states = everywhere(expected.save_state_rank())
        for sizes in ((4, 1), (1, 4)):
            resumed = WorkerConfig.from_mesh(mesh_of(*sizes), num_workers=0, lanes=4)
            second, third = loader_of(resumed), plain(resumed)
            checkpoint.load({"data": second}, checkpoint_id=tmp_path / "saved")
            third.restore_state_global(states[::2])
            assert names(islice(second, 6)) == names(islice(third, 6))
            second.close()
        loader.close()
        if rank == 0:
            stored = checkpoint.FileSystemReader(tmp_path / "saved").read_metadata().storage_data
            lanes = [index.fqn for index in stored if "lane_" in index.fqn]
            assert sorted(lanes) == sorted(set(lanes))
            assert len(lanes) == 4

    run_ranks(work, 4, tmp_path)


@pytest.mark.slow
def test_a_written_batch_changes_in_one_process_only(tmp_path):
    def work(rank):
        config = WorkerConfig.from_mesh(mesh_of(1, 3), num_workers=1, lanes=2)
        loader, expected = loader_of(config), plain(config)
        for number, (batch, other) in enumerate(zip(islice(loader, 30), expected, strict=False)):
            check_equal(batch, other)
            torch.distributed.barrier()
            if number % 3 == rank:
                batch["large"][:] = 0
                batch["tensor"].zero_()
            torch.distributed.barrier()
            if number % 3 != rank:
                check_equal(batch, other)
        loader.close()

    run_ranks(work, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "needs", [[False, True, "shapes", True], [True, "shapes", False, "shapes"]], ids=str
)
def test_processes_get_as_much_of_a_batch_as_they_need_and_the_same_state(tmp_path, needs):
    def work(rank):
        config = WorkerConfig.from_mesh(
            mesh_of(1, 4), num_workers=1, lanes=2, needs_data=needs[rank], host=f"host {rank // 2}"
        )
        loader, expected = loader_of(config), plain(config)
        for batch, other in zip(islice(loader, 12), expected, strict=False):
            check_need(batch, other, needs[rank], "tensor", check_equal)
        assert loader.save_state_rank() == expected.save_state_rank()
        loader.close()

    run_ranks(work, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_loops_end_and_begin_as_those_of_a_plain_loader(tmp_path, hosts):
    def work(rank):
        config = WorkerConfig.from_mesh(
            mesh_of(1, 2), num_workers=1, lanes=2, host=f"host {rank % hosts}"
        )
        for settings in (
            {"rows": 3},
            {"rows": 3, "restart": True},
            {"rows": 5, "virtual_epoch_length": 4},
        ):
            loader, expected = loader_of(config, **settings), plain(config, **settings)
            for stop in (None, 2, None):
                batches = names(islice(loader, stop)), names(islice(expected, stop))
                assert batches[0] == batches[1], settings
            loader.close()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_hook_is_raised_in_all_processes(tmp_path, workers):
    def work(rank):
        flag = tmp_path / "mended"

        def failing(lane, row):
            if row == 3 and not flag.exists():
                raise ValueError("broken hook")
            return make(lane, row)

        config = WorkerConfig.from_mesh(mesh_of(1, 2), num_workers=workers, lanes=2)
        loader, expected = loader_of(config, failing), plain(config)
        assert names(islice(loader, 6)) == names(islice(expected, 6))
        for _ in range(2):
            with pytest.raises(ValueError, match="broken hook"):
                next(iter(loader))
            torch.distributed.barrier()
        flag.touch()
        assert names(islice(loader, 6)) == names(islice(expected, 6))
        loader.close()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
def test_the_next_process_continues_when_the_loading_one_is_killed(tmp_path):
    def work(rank):
        config = WorkerConfig.from_mesh(mesh_of(1, 3), num_workers=2, lanes=4)
        loader, expected = loader_of(config), plain(config)
        for number, (batch, other) in enumerate(zip(islice(loader, 40), expected, strict=False)):
            check_equal(batch, other)
            if rank < 2 and number == 10 + 10 * rank:
                os.kill(os.getpid(), signal.SIGKILL)
        assert loader.save_state_rank() == expected.save_state_rank()

    run_ranks(work, 3, tmp_path, killed=(0, 1), together=False)


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_the_others_alone(tmp_path):
    def work(rank):
        config = WorkerConfig.from_mesh(mesh_of(1, 3), num_workers=1, lanes=2)
        loader, expected = loader_of(config), plain(config)
        for number, (batch, other) in enumerate(zip(islice(loader, 60), expected, strict=False)):
            check_equal(batch, other)
            if rank == 1 and number == 10:
                os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / f"done-{rank}").touch()
        wait_until((tmp_path / f"done-{2 - rank}").exists)

    run_ranks(work, 3, tmp_path, killed=(1,), together=False)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_for_all(tmp_path):
    def work(rank):
        config = WorkerConfig.from_mesh(mesh_of(1, 2), num_workers=1, lanes=2)
        loader, expected = loader_of(config), plain(config)
        for number, (batch, other) in enumerate(zip(islice(loader, 60), expected, strict=False)):
            check_equal(batch, other)
            if rank == 0 and number in (5, 20):
                os.kill(loader.stats()["workers"][0]["pid"], signal.SIGKILL)
        loader.close()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
def test_a_row_that_kills_workers_is_skipped_in_the_states_of_all(tmp_path):
    def work(rank):
        parent = os.getpid()

        def deadly(lane, row):
            if row == 4 and os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGSEGV)
            return make(lane, row)

        config = WorkerConfig.from_mesh(mesh_of(1, 2), num_workers=1, lanes=1)
        loader = loader_of(config, deadly, options=LoaderOptions(max_deaths=2))
        assert names(islice(loader, 6)) == [f"0/{row}" for row in (0, 1, 2, 3, 5, 6)]
        first, second = everywhere(loader.save_state_rank())
        assert first == second
        loader.close()

    run_ranks(work, 2, tmp_path)


def make_text(lane, row):
    """A batch without arrays, of which a few fill a socket."""
    return {"name": f"{lane}/{row}", "text": "x" * 1_000_000}


@pytest.mark.slow
@pytest.mark.parametrize("make", [make, make_text])
def test_a_stopped_process_is_left_behind_after_the_deadline(tmp_path, monkeypatch, make):
    monkeypatch.setattr("energon.loader.replicas.replica_worker.MAX_BEHIND", 4)

    def work(rank):
        options = LoaderOptions(watchdog_timeout_seconds=1)
        config = WorkerConfig.from_mesh(mesh_of(1, 2), num_workers=1, lanes=2)
        loader, expected = loader_of(config, make, options), plain(config, make)
        batches = iter(loader)
        if rank == 1:
            next(batches)
            (tmp_path / "pid").with_suffix(".new").write_text(str(os.getpid()))
            (tmp_path / "pid.new").rename(tmp_path / "pid")
            wait_until((tmp_path / "passed").exists)
            with pytest.raises(WorkerError, match="took no batch for so long"):
                check_names(batches, islice(expected, 1, None))
            return
        next(batches), next(iter(expected))
        wait_until((tmp_path / "pid").exists)
        other = int((tmp_path / "pid").read_text())
        os.kill(other, signal.SIGSTOP)
        assert names(islice(loader, 20)) == names(islice(expected, 20))
        os.kill(other, signal.SIGCONT)
        loader.close()
        (tmp_path / "passed").touch()

    run_ranks(work, 2, tmp_path)


def test_loops_of_different_lengths_are_named(tmp_path):
    def work(rank):
        config = WorkerConfig.from_mesh(mesh_of(1, 2), num_workers=0, lanes=2)
        loader = loader_of(config, restart=True, rows=4)
        list(islice(loader, 2))
        if rank == 0:
            list(islice(loader, 2))
            loader.close()
        else:
            torch.distributed.barrier()
            iterator = iter(loader)
            next(iterator), next(iterator)
            with pytest.raises(WorkerError, match="closed its loader"):
                next(iterator)
            return
        torch.distributed.barrier()

    run_ranks(work, 2, tmp_path)


@pytest.mark.slow
def test_groups_that_contradict_each_other_are_named(tmp_path):
    def work(rank):
        dist = torch.distributed
        dist.new_group([3])  # ranks may be members of different numbers of groups
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        rows, columns = groups[:2], groups[2:]
        config = WorkerConfig.from_groups(data_parallel=columns[rank % 2], replica=rows[rank // 2])
        assert (config.rank, config.world_size) == (rank // 2, 2)
        assert [member.rank for member in config.replica.members] == [
            2 * (rank // 2),
            2 * (rank // 2) + 1,
        ]
        with pytest.raises(ConfigError, match=r"rank 0 has a replica of ranks \[0, 1\]"):
            WorkerConfig.from_groups(data_parallel=rows[rank // 2], replica=rows[rank // 2])
        with pytest.raises(ConfigError, match="none of batch"):
            WorkerConfig.from_mesh(mesh_of(2, 2), data_dims=("batch",))

    run_ranks(work, 4, tmp_path)


def test_a_replica_needs_a_process_group():
    with pytest.raises(ConfigError, match="init_process_group"):
        WorkerConfig.from_groups(data_parallel=None, replica=None)
    with pytest.raises(ConfigError, match="initialize_model_parallel"):
        WorkerConfig.from_megatron()


@pytest.mark.slow  # imports Megatron-Core
@pytest.mark.parametrize(
    ("tensor", "pipeline", "context"), [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 4, 1), (2, 1, 2)]
)
@pytest.mark.filterwarnings("ignore")
def test_the_parallel_state_of_megatron_core_names_the_replica(tmp_path, tensor, pipeline, context):
    core = pytest.importorskip("megatron.core.parallel_state")

    def work(rank):
        core.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=context,
        )
        config = WorkerConfig.from_megatron(num_workers=0, lanes=4)
        ranks = 4 // (tensor * pipeline * context)
        assert (config.rank, config.world_size) == (core.get_data_parallel_rank(), ranks)
        assert len(config.replica.members) == 4 // ranks
        cut = ContextParallel(dims={"small": 0}, layout="contiguous")
        loader = loader_of(config, make_even, LoaderOptions(context_parallel=cut))
        part = 4 // context
        first = part * core.get_context_parallel_rank()
        for batch, other in zip(islice(loader, 5), plain(config, make_even), strict=False):
            if core.is_pipeline_first_stage() or core.is_pipeline_last_stage():
                assert batch["name"] == other["name"]
                assert batch["small"].tolist() == other["small"].tolist()[first : first + part]
            else:
                assert batch is None
        assert len({str(state) for state in everywhere(loader.save_state_rank())}) == ranks
        loader.close()

    run_ranks(work, 4, tmp_path)


@pytest.mark.slow
def test_only_the_part_of_a_context_rank_crosses_to_its_host(tmp_path):
    tokens = 100_000

    def make(lane, row):
        return {"name": f"{lane}/{row}", "tokens": np.arange(tokens) + row, "mask": np.ones(9)}

    def work(rank):
        sent = []
        isend = torch.distributed.isend
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.distributed,
                "isend",
                lambda tensor, *args, **named: (
                    sent.append(tensor.nbytes) or isend(tensor, *args, **named)
                ),
            )
            mesh = mesh_of(1, 2, 2, dims=("dp_shard", "cp", "tp"))
            cp_rank = mesh.get_local_rank("cp")
            config = WorkerConfig.from_mesh(mesh, num_workers=1, lanes=2, host=f"host {cp_rank}")
            cut = ContextParallel(dims={"tokens": 0})
            loader = loader_of(config, make, LoaderOptions(context_parallel=cut))
            own = cut.of(config.replica)
            for batch, expected in zip(islice(loader, 8), plain(config, make), strict=False):
                assert batch["name"] == expected["name"]
                assert (batch["tokens"] == own(expected)["tokens"]).all()
            loader.close()
        bytes_whole = tokens * 8
        assert all(size < 0.6 * bytes_whole for size in sent)
        assert (max(sent, default=0) > 0.4 * bytes_whole) == (rank == 0)

    run_ranks(work, 4, tmp_path)


class Fixed(NamedTuple):
    """A batch whose fields cannot be replaced."""

    large: np.ndarray


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "error"),
    [(dict, (ConfigError, "sequence of 9 elements")), (Fixed, (AttributeError, "set attribute"))],
)
def test_batches_that_cannot_be_cut_are_an_error_on_all_hosts(tmp_path, batch, error):
    def work(rank):
        mesh = mesh_of(1, 2, dims=("dp_shard", "cp"))
        config = WorkerConfig.from_mesh(mesh, num_workers=0, lanes=2, host=f"host {rank}")
        cut = ContextParallel(dims={"large": 0}, layout="zigzag")

        def make(lane, row):
            if row < 2:
                return {"large": np.arange(8)}
            return batch(large=np.arange(9 if batch is dict else 8))

        loader = loader_of(config, make, LoaderOptions(context_parallel=cut))
        batches = iter(loader)
        assert [len(next(batches)["large"]) for _ in range(4)] == [4] * 4
        with pytest.raises(error[0], match=error[1]):
            next(batches)
        loader.close()

    run_ranks(work, 2, tmp_path)


def make_even(lane, row):
    return {"name": f"{lane}/{row}", "small": np.arange(4) + 10 * row}
