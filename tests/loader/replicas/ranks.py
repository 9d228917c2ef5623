"""Several ranks of a job as forks of the test, with a process group of torch.distributed."""

import os
import signal
import traceback

SECONDS = 100


def run_ranks(function, number, folder, *, killed=(), together=True, backend="gloo"):
    """Call `function(rank)` in as many processes, and fail with what they raised.

    Args:
        function: What each rank does.
        number: How many ranks there are.
        folder: An empty folder of the test.
        killed: Ranks that are killed.
        together: Whether ranks wait for each other at the end, since one that leaves early breaks
            the connections of the others.
        backend: That of the process group; with NCCL, each rank has a GPU.
    """
    pids = [_fork(function, rank, number, folder, together, backend) for rank in range(number)]
    ended = {pid: os.waitpid(pid, 0)[1] for pid in pids}
    errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
    assert not errors, "\n".join(errors)
    for rank, pid in enumerate(pids):
        code = os.waitstatus_to_exitcode(ended[pid])
        assert code == (-signal.SIGKILL if rank in killed else 0), (rank, code)


def _fork(function, rank, number, folder, together, backend):
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's does not end C code
    signal.alarm(SECONDS)
    code = 1
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=number
        )
        function(rank)
        if together:
            dist.barrier()
        code = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(code)


def check_need(batch, other, need, tensor, check_equal):
    """Compare what a process gets with a batch, of which it needs all, the shapes or nothing."""
    if need is True:
        check_equal(batch, other)
    elif need:
        assert batch["name"] == other["name"]
        assert batch[tensor].is_meta
        assert batch[tensor].shape == other[tensor].shape
        assert batch[tensor].dtype == other[tensor].dtype
    else:
        assert batch is None


def everywhere(value):
    """Return the values of all ranks."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def names(batches):
    return [batch["name"] for batch in batches]
