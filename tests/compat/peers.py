"""The packages that ours takes the place of, in an environment of their own."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def peers_python() -> str:
    """Return an interpreter that has the peers; the script of the benchmarks installs them."""
    folder = Path(os.environ.get("ENERGON_PEERS", ROOT / ".venv-peers"))
    python = folder / "bin" / "python"
    check = [python, "-c", "import webdataset, zmq"]
    if not python.exists() or subprocess.run(check, capture_output=True).returncode != 0:
        script = ROOT / "benchmarks" / "peers.sh"
        subprocess.run([script, folder], check=True, timeout=1800)
    return str(python)
