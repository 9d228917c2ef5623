from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from energon import WorkerConfig, get_savable_loader, get_train_dataset
from energon.cli.view import listen
from tests.commands import run
from tests.datasets import make_crude


@contextlib.contextmanager
def viewing(path, *options, cwd=None):
    """Run `energon view`; give the process and the address that it prints."""
    words = [sys.executable, "-m", "energon", "view", str(path), "--port", "0", *options]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd
    ) as running:
        try:
            line = running.stdout.readline()
            assert line, running.stderr.read()
            yield running, line.split()[0]
        finally:
            running.kill()


def get(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_serves_until_it_is_interrupted(tmp_path):
    with viewing(make_crude(tmp_path / "ds", [3])) as (running, address):
        assert address.startswith("http://127.0.0.1:")
        assert get(f"{address}s/0/0/2/raw/0") == "text 2"
        assert get(f"{address}s/0/0/2/raw/0", Range="bytes=0-3") == "text"
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0
        assert running.stderr.read() == ""


@pytest.mark.slow
def test_elsewhere_it_prints_an_address_with_a_token(tmp_path):
    with viewing(make_crude(tmp_path / "ds", [1]), "--host", "0.0.0.0") as (_, address):
        port = int(address.rpartition(":")[2].partition("/")[0])
        token = address.partition("?token=")[2]
        assert len(token) > 20
        place = f"http://127.0.0.1:{port}/s/0/0/0/raw/0"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(place)
        assert get(place, Authorization=f"Bearer {token}") == "text 0"


def test_a_port_that_is_taken_is_refused(tmp_path):
    root = make_crude(tmp_path / "ds", [1])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("view", root, "--port", taken.getsockname()[1])
    assert done.exit_code == 2
    assert "in use; --port 0 picks a free port" in done.output
    done = run("view", root, "--host", "192.0.2.1")
    assert done.exit_code == 2
    assert "pass an address of this machine as --host" in done.output


def test_a_folder_of_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    done = run("view", tmp_path, "--port", "0")
    assert done.exit_code == 2
    assert "energon p" in done.output


@pytest.mark.slow
def test_shows_the_run_of_a_state_and_takes_notes(tmp_path):
    root = make_crude(tmp_path / "ds", [20])
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=4)
    dataset = get_train_dataset(root, worker_config=config, batch_size=3)
    with get_savable_loader(dataset) as loader:
        batches = iter(loader)
        next(batches)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        expected = list(next(batches)["__key__"])
    options = ("--state", tmp_path / "state.json", "--world-size", 1, "--quarantine", tmp_path)
    with viewing(root, *map(str, options)) as (_, address):
        page = get(f"{address}run?step=1")
        assert re.findall(r'<span class="key">(s\d+)</span>', page) == expected
        assert 'name="what" value="exclude"' in get(f"{address}s/0/0/0")


@pytest.mark.slow
def test_shows_batches_of_a_task_encoder(tmp_path):
    root = make_crude(tmp_path / "ds", [20])
    (tmp_path / "hooks.py").write_text(
        "from energon import DefaultTaskEncoder\n"
        "class Hooks(DefaultTaskEncoder):\n"
        "    def batch(self, samples):\n"
        "        return {'texts': [sample['txt'].upper() for sample in samples]}\n"
    )
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(root, worker_config=config, batch_size=3)
    with get_savable_loader(dataset) as loader:
        expected = [text.upper() for text in next(iter(loader))["txt"]]
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    options = ("--state", tmp_path / "state.json", "--world-size", 1, "--task-encoder")
    with viewing(root, *map(str, options), "hooks:Hooks", cwd=tmp_path) as (_, address):
        page = get(f"{address}run/batch?step=0")
        assert re.findall(r'<span class="string">(.*?)</span>', page) == expected
    for name, said in (
        ("hooks:Other", "Other"),
        ("no_such:Hooks", "no_such"),
        ("json:loads", "MOD"),
    ):
        done = run("view", root, *options, name)
        assert done.exit_code == 2
        assert said in done.output
    assert run("view", root, "--task-encoder", "hooks:Hooks").exit_code == 2


def test_a_state_of_other_data_is_refused(tmp_path):
    root = make_crude(tmp_path / "ds", [20])
    (tmp_path / "state.json").write_text("{}")
    done = run("view", root, "--state", tmp_path / "state.json", "--world-size", 1)
    assert done.exit_code == 1
    assert "contains no state of an energon loader" in done.output


def test_answers_do_not_wait_for_acknowledgements():
    with (
        listen("127.0.0.1", 0) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
