"""Call a function in a process of its own, within bounds on CPU time and memory.

What hostile data may cost is counted in CPU seconds and in address space, so that neither a busy
machine nor what the tests themselves have in memory matters.

    with Bounded("tests.drills.documents:read_metadataset", folder) as bounded:
        outcome = bounded(text)

The function gets what `Bounded` was made with, and the argument of the call; both are JSON. It
returns text, and what it raises ends the drill.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
CPU_SECONDS = 30
MEMORY_BYTES = 3 << 30


class Bounded:
    """A process that calls one function again and again; it is started again when it dies.

    Args:
        function: As MODULE:NAME.
        setup: What the function gets first in every call.
        cpu_seconds: What a call may take.
        memory_bytes: The address space that the process may have beyond what it starts with.
    """

    def __init__(
        self,
        function: str,
        setup: Any = None,
        *,
        cpu_seconds: int = CPU_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._command = [sys.executable, "-W", "error", "-m", __name__, function, json.dumps(setup)]
        self._command += [str(cpu_seconds), str(memory_bytes)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Bounded:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def __call__(self, argument: Any) -> str:
        """Return what the function returns.

        Raises:
            AssertionError: If it raises, or is beyond the bounds.
        """
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(argument) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            status = process.wait()
            self._stop()
            raise AssertionError(f"the process ended with {status}, on {_shown(argument)}")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{answer['error']}\non {_shown(argument)}")
        returned: str = answer["returned"]
        return returned

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _stop(self) -> None:
        if self._process is not None:
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                stream.close()
            self._process.kill()
            self._process.wait()
            self._process = None


def _shown(argument: Any) -> str:
    text = argument if isinstance(argument, str) else json.dumps(argument)
    return text if len(text) <= 3000 else f"{text[:3000]}… ({len(text)} characters)"


def _main(function: str, setup: str, cpu_seconds: str, memory_bytes: str) -> None:
    module, _, name = function.partition(":")
    call, given = getattr(import_module(module), name), json.loads(setup)
    # Answers have standard output for themselves, whatever the function prints.
    answers, sys.stdout = sys.stdout, sys.stderr
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + int(memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = usage.ru_utime + usage.ru_stime
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + int(cpu_seconds) + 1, hard))
        try:
            answer = {"returned": call(given, json.loads(line))}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
