"""Measure `energon prepare` beside the installed peer, and write docs/benchmarks_prepare.md.

    benchmarks/peers.sh
    python benchmarks/prepare.py [--rounds 3] [--scale 1.0] [--data FOLDER] [--peers PYTHON]

Whole commands in fresh processes with two workers each, in turns, on datasets without any
index. `small` has 500k samples of two parts with some bytes each, `large` 80 samples of 8 MB,
`image` 15k images with text and metadata, `shards10k` 10,000 shards of two samples. The last
table is about memory: datasets of more and more members, up to `--members`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from data import tar_member, write

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks_prepare.md"
MARK = "<!-- made by benchmarks/prepare.py -->"
HEAD = "# Benchmarks of preparation\n\n"
WORKERS = ["--num-workers", "2"]
COMMON = ["--non-interactive", "--split-parts", "train:.*", "--sample-type", "CrudeWebdataset"]
# Processes whose parent ends before them become children of this one, so that all are counted.
RUN = """
import ctypes, json, os, resource, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
start = time.perf_counter()
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
seconds = time.perf_counter() - start
if done.returncode:
    sys.exit(done.stderr[-2000:])
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"seconds": seconds, "cpu": used.ru_utime + used.ru_stime,
                  "memory_mb": used.ru_maxrss / 1024}))
"""


class Contender(NamedTuple):
    """A command to measure."""

    name: str
    command: list[str]
    keeps_index: bool = False
    """Whether it runs on what the command before has left."""


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--members", type=int, default=10_000_000)
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks" / "data-made")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    arguments = parser.parse_args()
    contenders = _contenders(arguments.peers)
    # Deleted at the end: ext4 creates files slowly for minutes after many were deleted.
    copies = arguments.data / "prepare-copies"
    shutil.rmtree(copies, ignore_errors=True)
    tables = []
    for kind, make in KINDS.items():
        # Data of another scale are other data: these are not taken for them.
        folder = arguments.data / f"prepare-{kind}-{arguments.scale:g}"
        members = make(folder, arguments.scale)
        found = measure(folder, contenders, arguments.rounds, copies)
        for results in found.values():
            if any(result["members"] != members for result in results):
                raise RuntimeError(f"{folder}: expected {members} members, indexed {results}")
        tables.append(_table(kind, members, found))
    tables.append(_memory_table(arguments.data / "prepare-memory", arguments.members))
    shutil.rmtree(copies)
    head = PAGE.read_text().partition(MARK)[0] if PAGE.exists() else HEAD
    PAGE.write_text(head + MARK + "\n\n" + "\n\n".join(tables) + "\n")


def measure(
    folder: Path, contenders: list[Contender], rounds: int, copies: Path
) -> dict[str, list[dict[str, Any]]]:
    """Return what each contender took in each round, on links to the shards in `copies`."""
    found: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for place, contender in enumerate(contenders):
            if not contender.keeps_index:
                copy = copies / f"{folder.name}-{number}-{place}"
                link_shards(folder, copy)
            os.sync()
            result = run([*contender.command, str(copy), *COMMON, "--force-overwrite", *WORKERS])
            result["members"] = count_members(copy)
            result["index_bytes"] = sum(file.stat().st_size for file in index_files(copy))
            found[contender.name].append(result)
            print(folder.name, number, contender.name, f"{result['seconds']:.2f} s", flush=True)
    return found


def run(command: list[str]) -> dict[str, Any]:
    """Return seconds, CPU seconds and the memory of the largest process."""
    # Peers must not find our `megatron.energon`.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *command], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def index_files(folder: Path) -> Iterator[Path]:
    """Yield all files that a preparation writes."""
    yield from folder.glob(".nv-meta/*")
    for pattern in ("*.idx", "*.parts"):
        yield from folder.glob(pattern)


def count_members(folder: Path) -> int:
    """Return how many members were indexed."""
    info = json.loads((folder / ".nv-meta/.info.json").read_text())
    parts = {"small": 2, "large": 2, "image": 3, "shards10k": 2}[folder.name.split("-")[1]]
    return parts * sum(info["shard_counts"].values())


def link_shards(folder: Path, copy: Path) -> None:
    """Make a dataset of the same shards that was never prepared."""
    copy.mkdir(parents=True)
    for shard in folder.glob("*.tar"):
        (copy / shard.name).hardlink_to(shard)


def remove_index(folder: Path) -> None:
    """Make the dataset one that was never prepared."""
    for file in index_files(folder):
        file.unlink()


def make_small(folder: Path, scale: float, *, content: bytes = b"words " * 20) -> int:
    """Write samples of two small parts; return how many members there are."""
    count, per_shard = int(500_000 * scale), 25_000
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for first in range(0, count, per_shard):
            with open(folder / f"{first // per_shard:05}.tar", "wb") as file:
                for number in range(first, min(count, first + per_shard)):
                    about = b'{"id": %d}' % number if content else b""
                    file.write(tar_member(f"{number:08}.json", about))
                    file.write(tar_member(f"{number:08}.txt", content))
                file.write(bytes(10_240))
        (folder / "done").touch()
    return 2 * count


def _maker(kind: str, num_samples: int, num_shards: int, parts: int) -> Callable[..., int]:
    def make(folder: Path, scale: float) -> int:
        samples = max(10, int(num_samples * scale))
        shards = max(1, int(num_shards * scale)) if num_shards > 100 else min(num_shards, samples)
        write(folder, kind, num_samples=samples, num_shards=shards)
        return samples * parts

    return make


KINDS: dict[str, Callable[..., int]] = {
    "small": make_small,
    "large": _maker("large", 80, 10, 2),
    "image": _maker("image", 15_000, 15, 3),
    "shards10k": _maker("text", 20_000, 10_000, 2),
}


def _contenders(peers: str) -> list[Contender]:
    ours = [sys.executable, "-m", "energon.cli.main", "prepare"]
    return [
        Contender("Megatron-Energon", [str(Path(peers).parent / "energon"), "prepare"]),
        Contender("energon (this)", ours),
        Contender("energon, again", ours, keeps_index=True),
        Contender("energon --no-sqlite", [*ours, "--no-sqlite"]),
    ]


def _table(kind: str, members: int, found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        f"`{kind}`, {members:,} members:",
        "",
        "| | seconds | members/s | CPU seconds | largest process | index |",
        "|---|---|---|---|---|---|",
    ]
    first = None
    for name, results in found.items():
        middle = {key: median(result[key] for result in results) for key in results[0]}
        first = first or middle
        lines.append(
            f"| {name} | {middle['seconds']:.2f} ({first['seconds'] / middle['seconds']:.1f}x) "
            f"| {members / middle['seconds']:,.0f} | {middle['cpu']:.2f} "
            f"| {middle['memory_mb']:.0f} MB | {middle['index_bytes'] / 1e6:.2f} MB "
            f"({100 * middle['index_bytes'] / first['index_bytes']:.0f} %) |"
        )
    return "\n".join(lines)


def _memory_table(folder: Path, most: int) -> str:
    lines = ["| members | with sqlite | | --no-sqlite | |", "|---|---|---|---|---|"]
    ours = [sys.executable, "-m", "energon.cli.main", "prepare"]
    for members in (most // 100, most // 10, most):
        make_small(folder, members / 1_000_000, content=b"")
        cells = []
        for option in ([], ["--no-sqlite"]):
            remove_index(folder)
            result = run([*ours, str(folder), *COMMON, "--force-overwrite", *WORKERS, *option])
            cells += [f"{result['seconds']:.1f} s", f"{result['memory_mb']:.0f} MB"]
            print("memory", members, option, *cells[-2:], flush=True)
        lines.append(f"| {members:,} | {' | '.join(cells)} |")
        shutil.rmtree(folder)
    return "Memory of the largest process, shards of 50,000 members without content:\n\n" + (
        "\n".join(lines)
    )


if __name__ == "__main__":
    main()
