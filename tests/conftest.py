"""Fixtures of all tests: servers, each started once when the first test needs it, and timeouts."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import pytest_timeout
from _pytest._io import TerminalWriter
from hypothesis import HealthCheck, is_hypothesis_test, settings

from energon import testing
from energon.loader.processes import link, start
from tests.cli.mounts import libfuse  # noqa: F401  # a fixture
from tests.clusters import RAY_ENVIRONMENT
from tests.effort import EXAMPLES_SHARE, IN_CI
from tests.servers.places import (  # noqa: F401  # fixtures, found by their names
    azurite_port,
    ceph_port,
    moto_port,
    open_place,
    quick_retries,
)
from tests.waiting import descendants

# No property is about time, and a machine may be busy. CI tries the same examples each time, so
# that what fails there is due to the change; elsewhere they are fewer, and new in every run.
settings.register_profile(
    "patient",
    deadline=None,
    derandomize=IN_CI,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


if not IN_CI:
    testing.check_resume.__kwdefaults__["ahead"] = 4

# Whoever runs the tests in the background of a shell has them ignore Ctrl-C, and with them the
# commands that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where forks hang is written here when a test takes too long.
_stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115  # forks inherit it
faulthandler.register(signal.SIGPROF, file=_stacks, all_threads=True)
_dump_threads = pytest_timeout.dump_stacks


def _dump_threads_and_forks(terminal: TerminalWriter) -> None:
    """Show also what the forks of a test do that takes too long, before it ends them."""
    _dump_threads(terminal)
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            state, handled = re.findall(r"^(?:State|SigCgt):\t(\w+)", status, re.MULTILINE)
            terminal.sep("~", title=f"Process {pid} ({state}): {command[:60]}")
            if int(handled, 16) >> (signal.SIGPROF - 1) & 1:
                os.kill(pid, signal.SIGPROF)
    time.sleep(1)
    _stacks.seek(0)
    terminal.write(_stacks.read())


pytest_timeout.dump_stacks = _dump_threads_and_forks

# Nobody cuts the power during a test, and 12,000 files that wait for the disk take a minute.
os.fsync = os.fstat

# Commands and loaders fork their processes from servers that import once what most processes
# need. Here that is what any command needs, and what test modules import.
PRELOADED = [
    *("numpy", "PIL.Image", "hypothesis", "pytest"),
    *("tests.commands", "tests.datasets", "tests.servers.places"),
    *(
        "energon.prepare.index",
        "energon.prepare.media",
        "energon.inspect.lint_batch",
    ),
]
_preload = forkserver.set_forkserver_preload
# Tests share a process, and one that has read from a store would choose how workers of later tests
# start. Forks of such a process can read all the same, each through a reader process.
link.library_is_used_here = lambda: False
forkserver.set_forkserver_preload = lambda names: _preload([*PRELOADED, *names])
_own_modules = start._own_modules
start._own_modules = lambda: ["pytest", "tests.datasets", *_own_modules()]


def pytest_xdist_auto_num_workers() -> int:
    """Run three tests for every two CPUs: many wait for processes, servers and time limits."""
    usable = getattr(os, "sched_getaffinity", None)
    cpus = len(usable(0)) if usable else os.cpu_count() or 1
    return cpus + (cpus + 1) // 2


@pytest.fixture
def s3(request):
    """A folder of a bucket of its own, as `Place`."""
    yield from open_place("moto", request)


@pytest.fixture(params=["fsspec", pytest.param("moto", marks=pytest.mark.slow)])
def store(request):
    """A folder of a store in memory, and in CI also of a bucket, as `Place`."""
    yield from open_place(request.param, request)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without looking for garbage: what they are made of stays until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # and is not looked at again
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Try a share of the examples that a property asks for, but 5 at least."""
    scaled = set()
    for item in items:
        function = getattr(item, "obj", None)
        if is_hypothesis_test(function) and function not in scaled:
            scaled.add(function)
            asked = function._hypothesis_internal_use_settings
            few = min(asked.max_examples, max(5, asked.max_examples // EXAMPLES_SHARE))
            function._hypothesis_internal_use_settings = settings(asked, max_examples=few)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the tests that were skipped because servers are missing, in one line."""
    lacking: Counter[str] = Counter()
    need_root = 0
    for report in terminalreporter.stats.get("skipped", []):
        if found := re.search(r"needs (.+): `make servers` installs it", str(report.longrepr)):
            lacking[found[1]] += 1
        need_root += "can only be mounted by root" in str(report.longrepr)
    said = []
    if lacking:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(lacking.items()))
        said.append(
            f"{lacking.total()} tests were skipped because programs are missing: {names}. "
            "`make servers` installs them."
        )
    if need_root:
        said.append(f"{need_root} tests of full disks were skipped: they need root.")
    if said:
        terminalreporter.write_line(" ".join(said))


@pytest.fixture(scope="session")
def ray_head():
    """A Ray cluster with a head node of 6 CPUs and an object store of 80 MB."""
    pytest.importorskip("ray")
    os.environ.update(RAY_ENVIRONMENT)
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 6,
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
            # These would take CPU time until the last test has ended.
            "include_log_monitor": False,
            "no_monitor": True,
        },
    )
    yield made
    made.shutdown()
    for name in RAY_ENVIRONMENT:
        os.environ.pop(name, None)


@pytest.fixture(scope="module")
def ray_cluster(ray_head):
    """The Ray cluster, to which this process is connected for one module: others may fork it."""
    import ray

    ray.init(address=ray_head.address, log_to_driver=False, logging_level="ERROR")
    yield ray_head
    ray.shutdown()
