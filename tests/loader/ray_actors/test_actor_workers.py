import logging
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from energon import RayWorkers, WorkerConfig, get_savable_loader
from energon.errors import ConfigError
from energon.loader.options import LoaderOptions
from energon.loader.savable import SavableDataLoader
from tests.clusters import RAY_ENVIRONMENT
from tests.loader.fake_pipeline import FakePipeline, fake, in_order
from tests.waiting import wait_for_end

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HANGS = {"watchdog_timeout_seconds": 3, "watchdog_initial_timeout_seconds": 120}
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=2, lanes=4)


@pytest.fixture
def loader_of(ray_cluster):
    """Builds loaders with Ray actors as workers, and closes them after the test."""
    made = []

    def build(make=None, *, actors="ray", options=None, **kwargs):
        kwargs = {"workers": 2, "lanes": 4, **kwargs}
        pipeline = fake(make, **kwargs) if make else fake(**kwargs)
        made.append(get_savable_loader(pipeline, workers=actors, **(options or {})))
        return made[-1]

    yield build
    for loader in made:
        loader.close()


def address_of(worker):
    return worker._link._address.result(60)


def megabyte(lane, row):
    return {"at": (lane, row), "pixels": np.full(1 << 20, row % 250, np.uint8)}


def test_order_and_state_survive_kill_9(loader_of, caplog):
    loader = loader_of(megabyte)
    batches = iter(loader)
    taken = [next(batches)["at"] for _ in range(10)]
    for worker in list(loader._workers):
        os.kill(address_of(worker).pid, signal.SIGKILL)
    taken += [next(batches)["at"] for _ in range(20)]
    assert taken == in_order(4, 8)[:30]
    assert loader.stats()["worker_deaths"] == 2
    assert "was killed on" in caplog.text


def test_states_of_processes_resume_with_actors_and_back(loader_of):
    step = 5
    processes = get_savable_loader(FakePipeline(CONFIG), workers="process")
    with processes:
        taken = list(islice(processes, step))
        state = processes.state_dict()
    actors = loader_of()
    actors.load_state_dict(state)
    taken += list(islice(actors, step))
    threads = get_savable_loader(FakePipeline(CONFIG), workers="thread")
    threads.load_state_dict(actors.state_dict())
    with threads:
        taken += list(islice(threads, step))
    assert taken == in_order(4, 8)[: 3 * step]


def test_a_row_that_crashes_its_actor_is_left_out(loader_of, caplog):
    def make(lane, row):
        if (lane, row) == (1, 1):
            os.abort()
        return lane, row

    loader = loader_of(make, rows=3, lanes=2)
    expected = [each for each in in_order(2, 3) if each != (1, 1)]
    assert sorted(loader) == sorted(expected)
    assert "lane 1 row 1 killed 3 workers and is skipped" in caplog.text
    assert "in make" in caplog.text
    # On a busy machine, one may end before this process knows that it has started.
    assert loader.stats()["worker_deaths"] >= 3


def test_an_actor_that_stops_is_replaced(loader_of, caplog):
    loader = loader_of(megabyte, options=HANGS)
    batches = iter(loader)
    taken = [next(batches)["at"] for _ in range(4)]
    # Otherwise, it would have the time for its first batch.
    assert all(worker._link.heartbeat.beats[0] for worker in loader._workers)
    os.kill(address_of(loader._workers[1]).pid, signal.SIGSTOP)
    taken += [next(batches)["at"] for _ in range(16)]
    assert taken == in_order(4, 5)
    assert loader.stats()["worker_timeouts"] == 1


def test_records_and_an_exception_arrive_in_their_place_with_their_host(loader_of, caplog):
    def make(lane, row):
        logging.getLogger("hooks").warning("batch %d of lane %d", row, lane)
        if row == 2:
            raise ValueError("cannot decode photos/a.jpg")
        return lane, row

    batches = iter(loader_of(make))
    assert list(islice(batches, 8)) == in_order(4, 2)
    with pytest.raises(ValueError, match=r"cannot decode photos/a.jpg") as caught:
        next(batches)
    assert os.uname().nodename in "".join(caught.value.__notes__)
    assert "in make" in str(caught.value.__cause__)
    records = [each for each in caplog.records if each.name == "hooks"]
    assert len(records) >= 9
    assert {each.process for each in records}.isdisjoint({os.getpid()})


def test_arrays_are_writable_and_stay_intact_and_large_ones_fit_into_a_small_store(loader_of):
    def make(lane, row):
        return {"at": (lane, row), "pixels": np.full((1 if row < 5 else 19) << 20, row, np.uint8)}

    batches = iter(loader_of(make))
    kept = list(islice(batches, 20))
    for batch in kept:
        batch["pixels"][0] = 255
    for number, batch in enumerate([*kept, *islice(batches, 16)]):
        lane, row = batch["at"]
        assert (lane, row) == (number % 4, number // 4)
        assert batch["pixels"][0] == (255 if row < 5 else row)
        assert (batch["pixels"][1 :: 1 << 20 if row > 4 else 1] == row).all()


def test_a_class_of_the_main_program_comes_back_as_itself(loader_of, monkeypatch):
    main = ModuleType("__main__")
    source = "class Batch:\n    pass\ndef make(lane, row):\n    batch = Batch()\n"
    exec(source + "    batch.at = lane, row\n    return batch\n", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    batches = list(islice(loader_of(main.make), 4))
    assert [batch.at for batch in batches] == in_order(4, 1)
    assert {type(batch) for batch in batches} == {main.Batch}


def test_another_version_is_refused_by_name(loader_of, monkeypatch):
    monkeypatch.setattr("energon.loader.ray_actors.actor.__version__", "0.0.7")
    with pytest.raises(ConfigError, match=r"Ray actors on .* have energon-loader .*0\.0\.7"):
        next(iter(loader_of()))


def test_stacks_of_actors_that_hang_are_logged(ray_cluster, caplog):
    def make(lane, row):
        if (lane, row) == (1, 1):
            threading.Event().wait()
        return lane, row

    options = LoaderOptions(workers="ray", max_deaths=1, **HANGS)
    expected = [each for each in in_order(2, 3) if each != (1, 1)]
    with SavableDataLoader(fake(make, workers=2, rows=3, lanes=2), options=options) as loader:
        assert sorted(loader) == sorted(expected)
        assert "in make" in caplog.text
        assert loader.stats()["worker_timeouts"] == 1


def test_a_node_that_is_removed_loses_nothing(ray_cluster, loader_of, caplog):
    node = ray_cluster.add_node(num_cpus=2, resources={"decoding": 2}, object_store_memory=80 << 20)
    loader = loader_of(megabyte, actors=RayWorkers(num_actors=2, resources={"decoding": 1}))
    batches = iter(loader)
    taken = [next(batches)["at"] for _ in range(10)]
    assert {address_of(worker).node for worker in loader._workers} == {node.node_id}
    ray_cluster.remove_node(node)
    ray_cluster.add_node(num_cpus=2, resources={"decoding": 2}, object_store_memory=80 << 20)
    taken += [next(batches)["at"] for _ in range(14)]
    assert taken == in_order(4, 6)


def test_actors_are_added_and_removed_without_a_change_of_order(loader_of, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("energon.loader.ray_actors.scaling.SCALE_SECONDS", 1.0)
    # Other tests delay each transfer, so a trainer that lets actors idle waits a little.
    monkeypatch.setattr("energon.loader.ray_actors.scaling.WAITS", 0.6)
    monkeypatch.setattr("energon.loader.ray_actors.scaling.WAITS_LITTLE", 0.5)

    def slow(lane, row):
        time.sleep(0.3 if row < 8 else 0)
        return lane, row

    def changes():
        return [(each["from"], each["to"]) for each in loader.stats()["actors"]["changes"]]

    workers = RayWorkers(min_actors=1, max_actors=2)
    loader = loader_of(slow, actors=workers, options={"verdict_seconds": 0.5})
    taken = []
    for at in islice(loader, 400):
        taken.append(at)
        time.sleep(0.2 if len(taken) > 32 else 0)
        if len(changes()) > 1 and len(taken) % 4 == 0:
            break
    assert taken == in_order(4, len(taken) // 4)
    assert changes()[:2] == [(1, 2), (2, 1)]
    assert "using 2 of 2 from now on" in caplog.text


def pid_of(actor):
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def test_actors_that_are_not_needed_end(loader_of):
    with get_savable_loader(fake(lanes=1), workers="thread") as loader:
        state = loader.state_dict()
    restored, unused = loader_of(lanes=None), loader_of()
    ahead, others = (
        [pid_of(each) for each in loader._actors._ahead] for loader in (restored, unused)
    )
    assert len(ahead) == len(others) == 2
    restored.load_state_dict(state)
    assert next(iter(restored)) == (0, 0)
    (host,) = (address_of(worker).pid for worker in restored._workers)
    unused.close()
    wait_for_end({*ahead, *others} - {host})
    assert next(iter(unused)) == (0, 0)


class Idle:
    def pid(self):
        return os.getpid()


def test_an_offer_goes_to_its_like_or_makes_room(ray_cluster, monkeypatch):
    from energon.loader.ray_actors.pool import PoolShares

    def offered(kind, number):
        actors = [ray.remote(num_cpus=0)(Idle).remote() for _ in range(number)]
        for actor in actors:
            answer = actor.pid.remote()
            pids[actor] = ray.get(answer)
            shares.offer(kind, [actor], [answer])
        return actors

    shares, pids = PoolShares(4), {}  # whose handles keep actors alive until they are ended
    (first, second), (other,) = offered("images", 2), offered("text", 1)
    assert shares.take("images", 1) == [first]
    assert shares.take("text", 2) == [other]  # another one may start in place of the second
    wait_for_end([pids[second]])
    monkeypatch.setattr("energon.loader.ray_actors.pool.OFFER_SECONDS", 0.1)
    (late,) = offered("images", 1)
    wait_for_end([pids[late]])


def test_a_validation_loader_starts_afresh_in_the_actors_that_were_started_with_it(loader_of):
    loader = loader_of(rows=3, restart=True)
    ahead = {pid_of(actor) for actor in loader._actors._ahead}
    passes = [list(loader) for _ in range(10)]
    assert {address_of(worker).pid for worker in loader._workers} == ahead
    assert loader.stats()["worker_timeouts"] == 0
    pages = [Path(address_of(worker).page) for worker in loader._workers]
    assert all(page.exists() for page in pages)
    loader.close()
    assert not any(page.exists() for page in pages)
    assert passes == [in_order(4, 3)] * 10


HEAD_GOES = """
import numpy as np
import ray
from ray.cluster_utils import Cluster
from energon import get_savable_loader
from energon.errors import WorkerError
from energon.loader.ray_actors import workers
from tests.clusters import RAY_ENVIRONMENT
from tests.loader.fake_pipeline import fake, in_order
from tests.loader.ray_actors.test_actor_workers import megabyte

workers.HEAD_CHECK_SECONDS, workers.HEAD_PATIENCE_SECONDS = 1.0, 3.0
cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False},
)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
loader = get_savable_loader(fake(megabyte, workers=2, lanes=4), workers="ray")
taken = []
try:
    for batch in loader:
        taken.append(batch["at"])
        if len(taken) == 10:
            cluster.head_node.kill_gcs_server()
except WorkerError as error:
    assert "head node of Ray" in str(error), error
resumed = get_savable_loader(fake(workers=2, lanes=4), workers="thread")
resumed.load_state_dict(loader.state_dict())
taken.append(next(iter(resumed)))
resumed.close()
loader.close()
assert taken == in_order(4, len(taken))[: len(taken)]
print("resumed")
"""


def test_a_run_whose_head_node_goes_can_be_resumed(tmp_path):
    environment = {**os.environ, **RAY_ENVIRONMENT}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", HEAD_GOES],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "resumed" in done.stdout, done.stderr
