"""Tests that need a server are skipped without it, and fail where it is required."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.servers.ceph import ceph_gateway
from tests.servers.clouds import azurite
from tests.servers.process import lack


@pytest.mark.parametrize("required", ["", "1"])
@pytest.mark.parametrize("there", [False, True], ids=["missing", "broken"])
@pytest.mark.parametrize("name", ["Ceph", "Azurite"])
def test_a_server_that_cannot_start_is_lacking(tmp_path, monkeypatch, name, there, required):
    if there:
        for program in ("ceph-mon", "ceph-osd", "ceph", "radosgw", "radosgw-admin", "azurite-blob"):
            path = tmp_path / "bin" / program
            path.parent.mkdir(exist_ok=True)
            path.write_text("#!/bin/sh\necho no library >&2; exit 127\n")
            path.chmod(0o755)
    monkeypatch.setattr("tests.servers.process.TOOLS", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/nowhere")
    monkeypatch.setenv("ENERGON_REQUIRE_SERVERS", required)
    outcome = pytest.fail.Exception if required else pytest.skip.Exception
    server = ceph_gateway() if name == "Ceph" else azurite(tmp_path)
    with (
        pytest.raises(outcome, match=r"needs .*: `make servers` installs it"),
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(server)


def summary(*reasons):
    """Return what is printed after tests that were skipped for these reasons."""
    said = []
    skipped = [SimpleNamespace(longrepr=("test_x.py", 1, f"Skipped: {each}")) for each in reasons]
    reporter = SimpleNamespace(stats={"skipped": skipped}, write_line=said.append)
    conftest.pytest_terminal_summary(reporter)
    return said


def test_what_was_skipped_is_summed_up_in_one_line(monkeypatch):
    monkeypatch.setenv("ENERGON_REQUIRE_SERVERS", "")
    reasons = []
    for name in ("libfuse", "Ceph", "libfuse"):
        with pytest.raises(pytest.skip.Exception) as skipped:
            lack(name, "it is not there")
        reasons.append(str(skipped.value))
    assert summary(*reasons, "only on Linux") == [
        "3 tests were skipped because programs are missing: Ceph (1), libfuse (2). `make servers` "
        "installs them."
    ]
    assert summary("only on Linux") == []
