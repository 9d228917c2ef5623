from __future__ import annotations

import gc
import os
import threading
import warnings

import pytest

import energon.webdataset as wds
from energon.errors import StorageError
from energon.webdataset.gopen import Pipe
from tests.servers.web import web_server
from tests.waiting import wait_until
from tests.webdataset.shards import keys, make_shards


@pytest.fixture
def urls(tmp_path):
    return make_shards(tmp_path, [3, 4, 2])


def test_the_next_command_begins_while_the_output_of_the_present_one_is_read(urls, tmp_path):
    commands = [f"pipe:touch {tmp_path}/{n}; cat {url}" for n, url in enumerate(urls)]
    samples = iter(wds.WebDataset(commands, allow=("shell",)))
    first = next(samples)
    wait_until((tmp_path / "1").exists)
    assert not (tmp_path / "2").exists()
    assert keys([first, *samples]) == [*range(9)]


def test_the_next_object_is_asked_for_early(urls, tmp_path):
    with web_server(tmp_path) as server:
        samples = iter(wds.WebDataset([f"{server.url}/{os.path.basename(url)}" for url in urls]))
        next(samples)
        wait_until(lambda: any(urls[1].endswith(path) for path in server.paths))
        assert len(list(samples)) == 8


def test_threads_end_once_the_next_shard_is_open(urls):
    def opening():
        return [each for each in threading.enumerate() if each.name.startswith("energon-shards")]

    commands = [f"pipe:cat {url}" for url in urls]
    loops = [iter(wds.WebDataset(commands, allow=("shell",))) for _ in range(3)]
    first = [next(loop) for loop in loops]
    wait_until(lambda: not opening())
    assert keys(first) == [0, 0, 0]
    assert [keys(loop) for loop in loops] == [[*range(1, 9)]] * 3
    wait_until(lambda: not opening())


def test_a_failure_comes_in_its_turn(urls):
    commands = [f"pipe:cat {urls[0]}", "pipe:exit 3", f"pipe:cat {urls[2]}"]
    samples = iter(wds.WebDataset(commands, allow=("shell",)))
    assert keys(next(samples) for _ in range(3)) == [0, 1, 2]
    with pytest.raises(StorageError, match="status 3"):
        next(samples)
    dataset = wds.WebDataset(commands, allow=("shell",), handler=wds.ignore_and_continue)
    assert keys(dataset) == [0, 1, 2, 7, 8]


def test_a_failure_of_the_list_comes_in_its_turn(urls):
    def shards(_=None):
        yield {"url": f"pipe:cat {urls[0]}"}
        raise RuntimeError("no more of these")

    samples = iter(wds.DataPipeline(shards, wds.tarfile_to_samples(allow=("shell",))))
    assert keys(next(samples) for _ in range(3)) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="no more"):
        next(samples)


def test_leaving_ends_the_command_that_began_early(urls, tmp_path):
    pid = tmp_path / "pid"
    silent = f"pipe:echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 99"
    commands = [f"pipe:cat {urls[0]}", silent]
    dataset = wds.WebDataset(commands, allow=("shell",))
    next(iter(dataset))
    wait_until(pid.exists)
    dataset.close()

    def is_gone():
        try:
            os.kill(int(pid.read_text()), 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(is_gone)


def test_a_command_writes_a_megabyte_ahead(tmp_path):
    # Each read then returns as much as the parser of archives takes at a time.
    with Pipe(f"head -c {1 << 20} /dev/zero; touch {tmp_path}/written") as pipe:
        wait_until((tmp_path / "written").exists)
        assert len(pipe.read(2 << 20)) == 1 << 20


@pytest.mark.parametrize("order", [1, -1])
def test_a_command_in_garbage_ends_without_a_warning_whatever_is_finalized_first(order):
    # A loop that is dropped half-way is a cycle that contains the pipe and its stream.
    pipe = Pipe("exec sleep 99")
    command, cycle = pipe.proc.pid, [pipe, pipe.stream][::order]
    cycle.append(cycle)
    del pipe
    gc.collect()  # the order of the list determines that of finalization from now on
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del cycle
        gc.collect()
    assert not caught
    with pytest.raises(ProcessLookupError):
        os.kill(command, 0)


def test_lists_of_local_files_are_not_looked_into(urls):
    asked = []

    def shards(_=None):
        for url in urls:
            asked.append(url)
            yield {"url": url}

    samples = iter(wds.DataPipeline(shards, wds.tarfile_to_samples()))
    next(samples)
    assert asked == urls[:1]
    assert len(list(samples)) == 8


def test_states_are_those_of_the_shard_that_is_read(urls):
    def make():
        return wds.WebDataset([f"pipe:cat {url}" for url in urls], allow=("shell",)).map(
            lambda sample: int(sample["__key__"])
        )

    for taken in range(9):
        dataset = make()
        loop = iter(dataset)
        for _ in range(taken):
            next(loop)
        again = make()
        again.load_state_dict(dataset.state_dict())
        assert list(again) == [*range(taken, 9)]
