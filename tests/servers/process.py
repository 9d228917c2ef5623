"""Start server programs for tests, and end them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

TOOLS = Path(__file__).parents[2] / ".servers"
"""Where `make servers` installs what comes from npm."""


def lack(name: str, reason: str = "") -> NoReturn:
    """Skip the test for lack of something that `make servers` installs.

    With ENERGON_REQUIRE_SERVERS=1, as in CI, it fails instead.

    Args:
        name: The program.
        reason: Why it does not start, if it is there.
    """
    message = f"needs {name}: `make servers` installs it"
    if reason:
        message += f"; the one found does not start: {reason}"
    if os.environ.get("ENERGON_REQUIRE_SERVERS"):
        pytest.fail(message)
    pytest.skip(message)


def find_program(name: str) -> str:
    """Return the path of a server program; without it, the test is skipped, see `lack`."""
    return shutil.which(name, path=_path()) or lack(name)


def _path() -> str:
    """Return where programs are looked for; Node.js may be one of our environment."""
    places = [TOOLS / "node_modules/.bin", Path(sys.executable).parent, os.environ.get("PATH", "")]
    return os.pathsep.join(map(str, places))


def free_port() -> int:
    """Return a port that nothing uses, from below those that systems give to connections.

    A server may begin to listen much later than this is called.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def running(
    command: Sequence[str], port: int, *, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a server until the end of the block; begins when it listens on `port`."""
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": _path(), **(environment or {})},
    ) as process:
        try:
            wait_for_port(port, process)
            yield
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for_port(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    for _ in range(1200):
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port}")
