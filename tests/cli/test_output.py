"""Output that nobody reads, or that has no room, and input that is closed."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from energon.cli.main import main
from tests.datasets import write_shard
from tests.small_disks import LITTLE_ROOM, REMEDIES


@pytest.fixture
def listing(tmp_path):
    shard = tmp_path / "0.tar"
    write_shard(shard, [(f"{n:03}", {"txt": b"text"}) for n in range(3)])
    return ["tar", "ls", str(shard)]


def printed_to(output, *arguments):
    """Run a command that prints to a file descriptor; return exit code and complaints."""
    command = [sys.executable, "-m", "energon.cli.main", *arguments]
    # As most users run it: what could not be written is still in the buffer at the end.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(output)
    return done.returncode, done.stderr


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_a_reader_that_stops_ends_commands_quietly(listing):
    assert printed_to(closed_pipe(), *listing) == (141, "")


@pytest.mark.slow
def test_a_reader_that_stops_ends_help_quietly():
    assert printed_to(closed_pipe(), "--help") == (141, "")


NO_ROOM = (2, "Error: cannot write the output: No space left on device\n")


def test_output_without_room_is_an_error(listing):
    assert printed_to(os.open("/dev/full", os.O_WRONLY), *listing) == NO_ROOM


@pytest.mark.slow
@pytest.mark.parametrize("command", [[], ["info"], ["tar", "cat"]])
def test_help_without_room_is_an_error(command):
    assert printed_to(os.open("/dev/full", os.O_WRONLY), *command, "--help") == NO_ROOM


@pytest.mark.parametrize(
    ("closed", "arguments", "exit_code"),
    [("0<&-", ["ls", "-"], 1), (">&-", ["cat", "-o", "-"], 0), ("2>&-", ["cat", "-o", "-"], 0)],
)
def test_standard_streams_may_be_closed(listing, closed, arguments, exit_code):
    inputs = [] if "-" in arguments[1:2] else listing[2:]
    energon = [sys.executable, "-m", "energon.cli.main", "tar", *arguments, *inputs]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *energon], capture_output=True, text=True
    )
    assert done.returncode == exit_code
    assert ("Error: -: ends at byte 0" in done.stderr) is (exit_code == 1)


@pytest.mark.parametrize(("little_room", "problem"), LITTLE_ROOM)
def test_a_full_disk_is_named_with_what_to_do(listing, tmp_path, little_room, problem):
    shard = listing[-1]
    with little_room(tmp_path / "disk", 4) as disk:
        done = CliRunner().invoke(main, ["tar", "cat", shard, "-o", str(disk / "all.tar")])
    assert (done.exit_code, done.output) == (
        2,
        f"Error: {disk}/all.tar: {problem}; {REMEDIES[problem]} and run the command again\n",
    )


def shown_on_terminal(*arguments):
    """Run a command on a terminal; return the lines that are left on it."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "energon.cli.main", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "300"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            written += chunk
    except OSError:  # the terminal of a process that has ended
        pass
    os.close(ours)
    assert process.wait() == 0, written
    lines = written.decode().replace("\r\n", "\n").split("\n")
    erased = (re.split(r"\r?\x1b\[2K", line)[-1] for line in lines)
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in erased]


def test_progress_and_messages_have_lines_of_their_own(tmp_path):
    for shard in range(4):
        write_shard(tmp_path / f"{shard}.tar", [(f"{shard}-{n}", {"txt": b"x"}) for n in range(3)])
    split = ("--sample-type", "CrudeWebdataset", "--split-parts", "train:.*")
    lines = shown_on_terminal("prepare", "--non-interactive", *split, tmp_path)
    assert lines[0] == "4 shards, from 0.tar to 3.tar"
    assert lines[1].endswith(": 4 of 4 shards were new or changed")
    assert re.fullmatch(r"indexing shards ━+ 4/4 +0:00:\d\d 0:00:00", lines[2])
    assert lines[3:] == ["12 samples in 4 shards", "Done", ""]
