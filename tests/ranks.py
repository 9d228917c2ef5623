"""Programs on several ranks, forked from a process that has imported torch, Lightning and others.

The imports take 5 seconds of CPU time in each process that does them by itself.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINERS = (
    *("transformers.models.llama.modeling_llama", "transformers.processing_utils"),
    *("transformers.trainer", "lightning.pytorch.strategies"),
)
"""What trainers import; the first optimizer of a process would import a part of it, too."""


def train(*arguments, ranks, program):
    """Run a program on some ranks, and return the number at the end of what it prints."""
    return float(printed(*arguments, ranks=ranks, program=program).rpartition(" ")[2])


def printed(*arguments, ranks, program):
    """Run a program on some ranks, and return what the first one prints; the others are silent."""
    outputs = finished(started(*arguments, ranks=ranks, program=program))
    assert not any(outputs[1:])
    return outputs[0]


def finished(running):
    """Return what each of some ranks prints until it ends without an error."""
    outputs = [each.communicate() for each in running]
    assert [each.returncode for each in running] == [0] * len(running)
    return outputs


def train_and_kill(data, checkpoint, *arguments, ranks, program):
    """Kill a program on some ranks while it trains, and return how many steps it has saved."""
    import torch

    endless = "--steps", 10**6, "--save-every", 1
    running = started(data, checkpoint, *endless, *arguments, ranks=ranks, program=program)
    try:
        wait_until(lambda: checkpoint.exists() or any(each.has_ended() for each in running))
        time.sleep(0.2)  # a step is shorter: some are saved, and one is half done
    finally:
        for each in running:  # all at once: a rank that loses another one ends by itself
            each.send_signal(signal.SIGKILL)
        for each in running:
            each.communicate()
    assert [each.returncode for each in running] == [-signal.SIGKILL] * ranks
    return torch.load(checkpoint)["step"]


def started(*arguments, ranks, program, merged=False):
    """Start a program on some ranks, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    place |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    place |= {**os.environ, **place, "OMP_NUM_THREADS": "1"}
    words = [str(EXAMPLES / program), *map(str, arguments)]
    return [
        Forked(words, {**place, "RANK": str(n), "LOCAL_RANK": str(n)}, merged=merged)
        for n in range(ranks)
    ]


class Forked:
    """A process that runs a program in this folder, with these variables of the environment.

    What it prints has its errors if they are `merged`. `imports` are modules that it finds
    imported, beside torch.
    """

    def __init__(
        self,
        words: list[str],
        environment: dict[str, str],
        *,
        merged: bool = False,
        imports: tuple[str, ...] = TRAINERS,
    ) -> None:
        descriptor, self._output = tempfile.mkstemp()
        os.close(descriptor)
        self.returncode: int | None = None
        request = words, environment, os.getcwd(), self._output, merged, imports
        self.pid = _ask("start", *request)

    def has_ended(self) -> bool:
        if self.returncode is None:
            self.returncode = _ask("poll", self.pid, os.WNOHANG)
        return self.returncode is not None

    def send_signal(self, number: int) -> None:
        if not self.has_ended():
            os.kill(self.pid, number)

    def communicate(self) -> str:
        """Return what the process prints until it ends."""
        if self.returncode is None:
            self.returncode = _ask("poll", self.pid, 0)
        text = Path(self._output).read_text()
        os.unlink(self._output)
        return text


@functools.cache
def _parent() -> subprocess.Popen[str]:
    """Return the process that others are forked from: it has no threads that a fork would lack."""
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks"],
        cwd=EXAMPLES.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, parent)
    return parent


def _end(parent: subprocess.Popen[str]) -> None:
    # Workers of a loader that is still open have inherited the pipe, so closing it tells nothing.
    with parent:  # which closes its pipes, and waits for its end
        parent.terminate()


def _ask(*request: object) -> int | None:
    parent = _parent()
    print(json.dumps(request), file=parent.stdin, flush=True)
    return json.loads(parent.stdout.readline())


def _poll(pid: int, flags: int) -> int | None:
    ended, status = os.waitpid(pid, flags)
    return os.waitstatus_to_exitcode(status) if ended else None


def _serve() -> list[str] | None:
    """Answer requests; in a process forked for one, return the program and its arguments."""
    for line in sys.stdin:
        kind, *request = json.loads(line)
        if kind == "poll":
            print(json.dumps(_poll(*request)), flush=True)
            continue
        words, environment, folder, output, merged, imports = request
        for name in ("torch.utils.data", *imports):
            importlib.import_module(name)
        gc.freeze()  # what programs share is not looked at in each of them
        if not (answer := os.fork()):
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            for path, mode, descriptor in (
                (os.devnull, os.O_RDONLY, 0),
                (output, os.O_WRONLY | os.O_APPEND, 1),
                *[(output, os.O_WRONLY | os.O_APPEND, 2)] * merged,
            ):
                opened = os.open(path, mode)
                os.dup2(opened, descriptor)
                os.close(opened)
            return words
        print(json.dumps(answer), flush=True)
    return None


if __name__ == "__main__" and (words := _serve()):
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
    # As Python does at the end, but for the freeing of all that was imported: that takes 2 seconds.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):  # the program may print to another one
        stream.flush()
    os._exit(0)
