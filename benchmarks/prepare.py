"""Measure `energon prepare` beside the installed peer, for docs/benchmarks.md.

    benchmarks/peers.sh
    python benchmarks/prepare.py [--rounds 5] [--only WORD] [--scale 1.0] [--peers PYTHON]

Whole commands in fresh processes with two workers each, on datasets without any index. `small` has
250k samples of two parts with some bytes each, `large` 80 samples of 8 MB, `image` 15k images with
text and metadata, `shards10k` 10,000 shards of two samples. The last table is about memory:
datasets of more and more members, up to `--members`. Five rounds take about six minutes, and data
are written first.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data import tar_member, write
from results import (
    Benchmark,
    Case,
    Results,
    in_fresh_process,
    middle,
    ratio,
    rounds_of,
    shown,
    spread,
    versions_of,
)

COMMON = ["--non-interactive", "--split-parts", "train:.*", "--sample-type", "CrudeWebdataset"]
COMMON += ["--num-workers", "2"]
MEMBERS = 1_000_000
"""Of samples of two parts at a scale of 1."""
EMPTY = "empty"
"""Datasets of members without content."""
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
    """A command to measure: ours, unless it says otherwise."""

    options: tuple[str, ...] = ()
    is_peer: bool = False
    runs_again: bool = False
    """Whether it runs on what the same command has left."""


PEER = "Megatron-Energon"
CONTENDERS = {
    PEER: Contender(is_peer=True),
    "energon (this)": Contender(),
    "energon, again": Contender(runs_again=True),
    "energon --no-sqlite": Contender(("--no-sqlite",)),
}
FOR_MEMORY = ("energon (this)", "energon --no-sqlite")


def main() -> None:
    """Measure, and write the page."""
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--members", type=int, default=4_000_000)
    arguments = BENCHMARK.parsed(parser)
    # Data of another scale are other data: these are not taken for them.
    folders = {kind: arguments.data / f"prepare-{kind}-{arguments.scale:g}" for kind in KINDS}
    members = {kind: make(folders[kind], arguments.scale) for kind, make in KINDS.items()}
    # Deleted at the end: ext4 creates files slowly for minutes after many were deleted.
    copies = arguments.data / "prepare-copies"
    shutil.rmtree(copies, ignore_errors=True)
    for count in (arguments.members // 100, arguments.members // 10, arguments.members):
        members[kind := f"{EMPTY} {count}"] = count
        folders[kind] = arguments.data / f"prepare-{EMPTY}-{count}"
        make_small(folders[kind], count / MEMBERS, content=b"")
    cases = [
        {"data": kind, "members": count, "command": name}
        for kind, count in members.items()
        for name in (FOR_MEMORY if kind.startswith(EMPTY) else CONTENDERS)
    ]
    turn = Turn(arguments.peers, folders, copies)
    versions = versions_of(sys.executable, energon="energon-loader")
    versions |= versions_of(arguments.peers, **{"Megatron-Energon": "megatron-energon"})
    BENCHMARK.run(arguments, cases, turn.measure, versions, scale=arguments.scale)
    shutil.rmtree(copies, ignore_errors=True)


class Turn:
    """Prepares links to the shards of a dataset with one of the commands."""

    def __init__(self, peers: str, folders: dict[str, Path], copies: Path) -> None:
        self.peers = peers
        self.folders = folders
        self.copies = copies
        self.count = 0

    def measure(self, case: Case) -> dict[str, Any]:
        """Return what the command takes."""
        contender = CONTENDERS[case["command"]]
        command = [sys.executable, "-m", "energon.cli.main", "prepare"]
        if contender.is_peer:
            command = [str(Path(self.peers).parent / "energon"), "prepare"]
        self.count += 1
        copy = self.copies / f"{case['data']}-{self.count}"
        link_shards(self.folders[case["data"]], copy)
        command += [str(copy), *COMMON, *contender.options]
        if contender.runs_again:
            run([*command, "--force-overwrite"], peer=contender.is_peer)
        os.sync()
        result = run([*command, "--force-overwrite"], peer=contender.is_peer)
        if (found := count_members(copy)) != case["members"]:
            raise RuntimeError(f"{copy}: expected {case['members']} members, indexed {found}")
        return {**result, "index_bytes": sum(file.stat().st_size for file in index_files(copy))}


def run(command: list[str], *, peer: bool) -> dict[str, Any]:
    """Return seconds, CPU seconds and the memory of the largest process."""
    return in_fresh_process([sys.executable, "-c", RUN, *command], peer=peer)


def index_files(folder: Path) -> Iterator[Path]:
    """Yield all files that a preparation writes."""
    yield from folder.glob(".nv-meta/*")
    for pattern in ("*.idx", "*.parts"):
        yield from folder.glob(pattern)


def count_members(folder: Path) -> int:
    """Return how many members were indexed."""
    info = json.loads((folder / ".nv-meta/.info.json").read_text())
    return (3 if folder.name.startswith("image") else 2) * sum(info["shard_counts"].values())


def link_shards(folder: Path, copy: Path) -> None:
    """Make a dataset of the same shards that was never prepared."""
    copy.mkdir(parents=True)
    for shard in folder.glob("*.tar"):
        (copy / shard.name).hardlink_to(shard)


def make_small(folder: Path, scale: float, *, content: bytes = b"words " * 20) -> int:
    """Write samples of two small parts; return how many members there are."""
    count, per_shard = int(MEMBERS / 2 * scale), 25_000
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
    "small": lambda folder, scale: make_small(folder, scale / 2),
    "large": _maker("large", 80, 10, 2),
    "image": _maker("image", 15_000, 15, 3),
    "shards10k": _maker("text", 20_000, 10_000, 2),
}


def tables(results: Results) -> str:
    """Return a table for each dataset, and that of the memory."""
    found = {(each["data"], each["members"]): None for each in results["cases"]}
    written = [_table(results, *key) for key in found if not key[0].startswith(EMPTY)]
    empty = [members for data, members in found if data.startswith(EMPTY)]
    return "\n\n".join([*written, _memory_table(results, empty)])


def _table(results: Results, kind: str, members: int) -> str:
    lines = [
        f"`{kind}`, {members:,} members:",
        "",
        "| | seconds | members/s | CPU seconds | largest process | index |",
        "|---|---|---|---|---|---|",
    ]
    peer = rounds_of(results, data=kind, command=PEER)
    for name in CONTENDERS:
        found = rounds_of(results, data=kind, command=name)
        seconds, size = middle(found, "seconds"), middle(found, "index_bytes")
        lines.append(
            f"| {name} | {seconds:.2f} {spread(found, 'seconds')} "
            f"({ratio(peer, found, 'seconds'):.1f}x) | {members / seconds:,.0f} "
            f"| {shown(found, 'cpu', 2)} | {shown(found, 'memory_mb', unit=' MB')} "
            f"| {size / 1e6:.2f} MB ({100 * ratio(found, peer, 'index_bytes'):.0f} %) |"
        )
    return "\n".join(lines)


def _memory_table(results: Results, counts: list[int]) -> str:
    lines = [
        "Memory of the largest process, shards of 50,000 members without content:",
        "",
        "| members | with sqlite | | --no-sqlite | |",
        "|---|---|---|---|---|",
    ]
    for members in counts:
        cells = []
        for name in FOR_MEMORY:
            found = rounds_of(results, data=f"{EMPTY} {members}", command=name)
            cells += [shown(found, "seconds", 1, unit=" s"), shown(found, "memory_mb", unit=" MB")]
        lines.append(f"| {members:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


BENCHMARK = Benchmark(__file__, tables, page="benchmarks.md")

if __name__ == "__main__":
    main()
