"""The packages that ours takes the place of, in an environment of their own."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@cache
def peers_python() -> str:
    """Return an interpreter that has the peers; in CI the script of the benchmarks installs them.

    Elsewhere, tests are skipped where they are not installed: they take gigabytes.
    """
    folder = Path(os.environ.get("ENERGON_PEERS", ROOT / ".venv-peers"))
    python = folder / "bin" / "python"
    check = [python, "-c", "import webdataset, zmq, megatron.energon"]
    if not python.exists() or subprocess.run(check, capture_output=True).returncode != 0:
        script = ROOT / "benchmarks" / "peers.sh"
        if "CI" not in os.environ:
            pytest.skip(f"needs webdataset and megatron-energon: run {script}")
        subprocess.run([script, folder], check=True, timeout=1800)
    return str(python)
