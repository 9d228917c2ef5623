"""Programs that share a cluster: ranks with one pool of actors, a replica, a notebook."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.datasets import make_captions

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def run_programs(code, number, *arguments, killed=None, **environment):
    """Run a program as several ranks, which get their number and the arguments.

    One of them may be killed.
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), *map(str, arguments)],
            cwd=Path(__file__).parents[3],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(number)
    ]
    for rank, program in enumerate(started):
        said, _ = program.communicate(timeout=240)
        assert program.returncode == (-signal.SIGKILL if rank == killed else 0), said


HANDS_OVER = """
import os, signal, sys, time
from pathlib import Path
from energon import RayWorkers, get_savable_loader
from energon.loader.ray_actors import scaling
from tests.loader.fake_pipeline import fake, in_order

scaling.SCALE_SECONDS = 1.0
rank, address, folder, killed = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])

def make(lane, row):
    # The rank that waits is another one every 15 s: an actor that is offered too late, or not yet
    # cleared, is not handed over.
    time.sleep(0.2 if lane % 2 == time.time() // 15 % 2 else 0)
    assert os.environ.setdefault("LEFT_BY_HOOKS", str(lane % 2)) == str(lane % 2), "not cleared"
    return lane, row, os.getpid()

def is_done(taken):
    if killed == 1:
        return rank == 0 and taken == first + 20
    return not Path("/proc", first_pid).exists()

workers = RayWorkers(num_actors=4, num_cpus=0.25, pool=f"{killed} is killed", address=address)
pipeline = fake(make, rank=rank, world_size=2, lanes=8)
with get_savable_loader(pipeline, workers=workers, verdict_seconds=0.5) as loader:
    taken, first = [], None
    for *at, pid in loader:
        taken.append(tuple(at))
        if rank == 1:
            (folder / str(pid)).touch()
            time.sleep(0.02)
        elif first is None and (folder / str(pid)).exists():
            (folder / f"{pid} handed over").touch()
        if first is None and (found := [*folder.glob("* handed over")]):
            first, first_pid = len(taken), found[0].name.split()[0]
            if rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
        if first is not None and is_done(len(taken)):
            break
expected = in_order(8, len(taken) // 4 + 1, ranks=2, rank=rank)[: len(taken)]
assert taken == expected, taken
"""


@pytest.mark.parametrize("killed", [0, 1], ids=["taker", "giver"])
def test_nothing_is_lost_with_a_rank_that_dies_after_an_actor_changed_hands(
    ray_head, tmp_path, killed
):
    run_programs(HANDS_OVER, 2, ray_head.address, tmp_path, killed, killed=killed)


IN_A_REPLICA = """
import sys
from itertools import islice
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from energon import RayWorkers, WorkerConfig, get_savable_loader
from tests.loader.fake_pipeline import FakePipeline, in_order

rank, address, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
config = WorkerConfig.from_mesh(
    init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp")), num_workers=1, lanes=4
)

def loader(workers):
    return get_savable_loader(FakePipeline(config), workers=workers)

with loader(RayWorkers(num_actors=2, num_cpus=0.5, address=address)) as first:
    assert list(islice(first, 10)) == in_order(4, 3)[:10]
    state = first.state_dict()
ray = sys.modules.get("ray")
assert (ray is not None and ray.is_initialized()) == (rank == 0)
with loader("thread") as second:
    second.load_state_dict(state)
    assert list(islice(second, 2)) == in_order(4, 3)[10:]
dist.barrier()
"""


def test_only_the_rank_of_a_replica_that_loads_has_actors(ray_head, tmp_path):
    pytest.importorskip("torch")
    run_programs(IN_A_REPLICA, 2, ray_head.address, tmp_path / "store")


NOTEBOOK = '''
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.user_ns["address"], shell.user_ns["folder"] = sys.argv[2:]
cells = [
    """
from dataclasses import dataclass
from energon import DefaultTaskEncoder, RayWorkers, WorkerConfig, get_loader, get_train_dataset

@dataclass
class Captions:
    texts: list

class Encoder(DefaultTaskEncoder):
    decoder = None
    change = staticmethod(lambda text: text.upper())

    def encode_sample(self, sample):
        return self.change(sample.caption.decode())

    def batch(self, samples):
        return Captions(samples)

def first_batch(workers):
    config = WorkerConfig(rank=0, world_size=1, num_workers=1, lanes=2)
    train = get_train_dataset(
        folder, worker_config=config, batch_size=4, task_encoder=Encoder()
    )
    with get_loader(train, workers=workers) as loader:
        return next(iter(loader))

on_ray = RayWorkers(num_actors=1, address=address)
""",
    """
batch = first_batch(on_ray)
assert type(batch) is Captions
assert batch == first_batch("thread")
assert batch.texts[0].startswith("CAPTION")
""",
    "Encoder.change = staticmethod(lambda text: text[::-1])",
    """
assert first_batch(on_ray) == first_batch("thread")
assert first_batch(on_ray).texts[0].split()[1] == "noitpac"
""",
]
for cell in cells:
    shell.run_cell(cell).raise_error()
'''


def test_an_encoder_of_a_notebook_runs_in_actors(ray_head, tmp_path):
    pytest.importorskip("IPython")
    folder = make_captions(tmp_path / "captions", [8])
    run_programs(NOTEBOOK, 1, ray_head.address, folder, IPYTHONDIR=str(tmp_path / "ipython"))


CONNECTS_AGAIN = """
import sys
import ray
from energon import RayWorkers, get_savable_loader
from tests.loader.fake_pipeline import fake

def connect():
    ray.init(sys.argv[2], log_to_driver=False)

connect()
workers = RayWorkers(num_actors=1, num_cpus=0.5)
with get_savable_loader(fake(lambda *address: address, lanes=2), workers=workers) as loader:
    ray.shutdown()
    connect()
    batches = iter(loader)
    assert [next(batches) for _ in range(2)] == [(0, 0), (1, 0)]
    assert loader.stats()["worker_deaths"] == 0
"""


def test_actors_that_ended_with_a_connection_are_not_used(ray_head):
    run_programs(CONNECTS_AGAIN, 1, ray_head.address)
