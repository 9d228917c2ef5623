"""Run code that must not take more than so much memory and processor time."""

from __future__ import annotations

import resource
import subprocess
import sys

MEGABYTE = 1 << 20


def run_bounded(
    code: str, *arguments: object, cpu_seconds: int = 20, megabytes: int = 1024
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that is killed beyond `cpu_seconds`, and gets no more memory.

    The time is that of the processor: other programs do not count.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_AS, (megabytes * MEGABYTE, megabytes * MEGABYTE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
