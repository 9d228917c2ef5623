"""Ctrl-C: a line, an exit code, and nothing that is half written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from energon.cli.main import COMMANDS, GO_ON
from energon.io.files import list_files
from energon.prepare.dataset import prepare_dataset
from tests.datasets import CRUDE, write_shard
from tests.servers.proxy import Fault
from tests.sources.distant import upload

GOES_ON = "interrupted; completed work is kept, and the same command continues from there"
NOTHING_LEFT = "interrupted; no incomplete files were left"


@pytest.fixture
def dataset(tmp_path):
    root = tmp_path / "ds"
    for shard in range(3):
        samples = [(f"{shard}{n:03}", {"txt": f"text {n}".encode()}) for n in range(20)]
        write_shard(root / f"{shard}.tar", samples)
    return root


def interrupted(s3, *arguments):
    """Start a command, press Ctrl-C while it waits for a shard; return exit code and last line."""
    s3.proxy.plan(
        [Fault("delay", seconds=600)] * 100,
        lambda request: request.is_data and request.path.endswith(".tar"),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "energon.cli.main", *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    while s3.proxy.faults_left == 100:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said, complained = process.communicate()
    s3.proxy.plan([])
    assert said == b""
    assert b"Traceback" not in complained
    return process.returncode, complained.decode().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("prepare", "{}", "--non-interactive", "--split-parts", "train:.*"),
        ("pack", "{}", "{}_packed"),
    ],
)
def test_commands_that_write_leave_no_dataset_and_go_on(s3, dataset, arguments):
    address = upload(dataset, s3.address)
    before = [each.key for each in list_files(s3.address)]
    arguments = [argument.format(address) for argument in arguments]
    assert interrupted(s3, *arguments) == (130, GOES_ON)
    left = {each.key for each in list_files(s3.address)} - set(before)
    assert left <= {"ds_packed/.nv-meta/pack.json"}
    done = subprocess.run([sys.executable, "-m", "energon.cli.main", *arguments])
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["verify", "lint"])
def test_commands_that_read_leave_nothing(s3, dataset, tmp_path, command):
    prepare_dataset(dataset, **CRUDE)
    address = upload(dataset, s3.address)
    listed = tmp_path / "listed.jsonl"
    assert interrupted(s3, command, address, "--quarantine", listed) == (130, NOTHING_LEFT)
    assert not listed.exists()


def test_what_goes_on_is_a_command():
    assert set(COMMANDS) >= GO_ON
