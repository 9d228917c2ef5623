import logging
import os
import signal
import threading
import time
from contextlib import suppress
from itertools import islice
from types import ModuleType

import numpy as np
import pytest

from energon import RayWorkers, WorkerConfig, get_savable_loader
from energon.errors import ConfigError, WorkerError
from energon.loader.options import LoaderOptions
from tests.loader.fake_pipeline import FakePipeline, fake, in_order

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=2, lanes=4)


@pytest.fixture
def loader_of(cluster):
    """Builds loaders with Ray actors as workers, and closes them after the test."""
    made = []

    def build(make=None, *, workers="ray", options=None, **kwargs):
        kwargs = {"workers": 2, "lanes": 4, **kwargs}
        pipeline = fake(make, **kwargs) if make else fake(**kwargs)
        made.append(get_savable_loader(pipeline, workers=workers, **(options or {})))
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


@pytest.mark.parametrize("step", [1, 4, 7])
def test_states_of_processes_resume_with_actors_and_back(loader_of, step):
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
    assert loader.stats()["worker_deaths"] == 3


def test_an_actor_that_stops_is_replaced(loader_of, caplog):
    loader = loader_of(options={"watchdog_timeout_seconds": 3, "prefetch_factor": 1}, workers="ray")
    batches = iter(loader)
    taken = [next(batches) for _ in range(4)]
    os.kill(address_of(loader._workers[1]).pid, signal.SIGSTOP)
    taken += [next(batches) for _ in range(16)]
    assert taken == in_order(4, 5)
    assert loader.stats()["worker_timeouts"] == 1


def test_an_exception_arrives_in_its_place_with_its_host(loader_of):
    def make(lane, row):
        if row == 2:
            raise ValueError("cannot decode photos/a.jpg")
        return lane, row

    batches = iter(loader_of(make))
    assert list(islice(batches, 8)) == in_order(4, 2)
    with pytest.raises(ValueError, match=r"cannot decode photos/a.jpg") as caught:
        next(batches)
    assert os.uname().nodename in "".join(caught.value.__notes__)
    assert "in make" in str(caught.value.__cause__)


def test_records_of_hooks_appear_here(loader_of, caplog):
    def make(lane, row):
        logging.getLogger("hooks").warning("batch %d of lane %d", row, lane)
        return lane, row

    loader = loader_of(make, rows=2)
    assert len(list(loader)) == 8
    records = [each for each in caplog.records if each.name == "hooks"]
    assert len(records) == 8
    assert {each.process for each in records}.isdisjoint({os.getpid()})


def test_arrays_are_writable_and_stay_intact(loader_of):
    kept = []
    for batch in islice(loader_of(megabyte), 40):
        batch["pixels"][0] = 255
        kept.append(batch)
    for number, batch in enumerate(kept):
        assert batch["at"] == (number % 4, number // 4)
        assert batch["pixels"][0] == 255
        assert (batch["pixels"][1:] == number // 4).all()


def test_large_batches_fit_into_a_small_object_store(loader_of):
    def make(lane, row):
        return lane, row, np.full(19 << 20, row, np.uint8)

    loader = loader_of(make)
    for number, (lane, row, pixels) in enumerate(islice(loader, 24)):
        assert (lane, row) == (number % 4, number // 4)
        assert (pixels[:: 1 << 20] == row).all()


def test_a_class_of_the_main_program_comes_back_as_itself(loader_of, monkeypatch):
    main = ModuleType("__main__")
    source = "class Batch:\n    pass\ndef make(lane, row):\n    batch = Batch()\n"
    exec(source + "    batch.at = lane, row\n    return batch\n", main.__dict__)
    monkeypatch.setitem(__import__("sys").modules, "__main__", main)
    batches = list(islice(loader_of(main.make), 4))
    assert [batch.at for batch in batches] == in_order(4, 1)
    assert {type(batch) for batch in batches} == {main.Batch}


def test_another_version_is_refused_by_name(loader_of, monkeypatch):
    monkeypatch.setattr("energon.loader.ray_actors.actor.__version__", "0.0.7")
    with pytest.raises(ConfigError, match=r"Ray actors on .* have energon-loader .*0\.0\.7"):
        next(iter(loader_of()))


def test_stacks_of_actors_that_hang_are_logged(loader_of, caplog):
    def make(lane, row):
        if (lane, row) == (1, 1):
            threading.Event().wait()
        return lane, row

    loader = loader_of(make, rows=3, lanes=2, options={"watchdog_timeout_seconds": 2})
    expected = [each for each in in_order(2, 3) if each != (1, 1)]
    assert sorted(loader) == sorted(expected)
    assert "in make" in caplog.text
    assert loader.stats()["worker_timeouts"] == 3


def test_a_node_that_is_removed_loses_nothing(cluster, loader_of, caplog):
    node = cluster.add_node(num_cpus=2, resources={"decoding": 2}, object_store_memory=80 << 20)
    loader = loader_of(megabyte, workers=RayWorkers(num_actors=2, resources={"decoding": 1}))
    batches = iter(loader)
    taken = [next(batches)["at"] for _ in range(10)]
    assert {address_of(worker).node for worker in loader._workers} == {node.node_id}
    cluster.remove_node(node)
    cluster.add_node(num_cpus=2, resources={"decoding": 2}, object_store_memory=80 << 20)
    taken += [next(batches)["at"] for _ in range(14)]
    assert taken == in_order(4, 6)
