"""kill -9 of every command that writes, at random moments: the rerun leaves what one run leaves.

The same bytes, and nothing else: no temporary file, no process.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from energon import Sample, WorkerConfig, edataclass, get_savable_loader, get_train_dataset
from energon.cli.main import main
from energon.errors import FormatError
from energon.formats.tables.part_table import PartTable
from energon.prepare.dataset import Indexing, prepare_dataset
from energon.prepare.engines import Engine
from tests.cli.test_consistency import COMMANDS
from tests.datasets import jpeg, make_captions, write_shard
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")

MAX_KILLS = 4
"""How often a command is killed before it may end."""
MAX_SAID = 2000
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, "energon.cli.main", "energon.prepare.writers.pack"])


@dataclass(frozen=True)
class Case:
    """A command, and what it works on.

    Args:
        words: The command; paths in it are relative to the folder that it runs in.
        make: Makes what it needs, in a folder.
        code: Its exit code.
        volatile: Names of files that differ from run to run.
    """

    words: str
    make: Callable[[Path], object]
    code: int = 0
    volatile: frozenset[str] = field(default=frozenset({"index.uuid"}))


def shards(folder, *, count=8, samples=15, prefix="", **settings):
    for shard in range(count):
        names = [f"{prefix}{shard:02}{n:03}" for n in range(samples)]
        write_shard(
            folder / f"{shard:03}.tar",
            [(name, {"txt": name.encode() * 9, "json": b'{"n": 1}'}) for name in names],
        )


def prepared(folder, **settings):
    indexing = Indexing(Engine(num_workers=1), **settings)
    prepare_dataset(
        folder, split_parts=["train:.*"], sample_type="CrudeWebdataset", indexing=indexing
    )


def dataset(folder, **settings):
    shards(folder / "ds")
    prepared(folder / "ds", **settings)


def damaged(folder):
    dataset(folder, checksum=True)
    for number, path in enumerate(sorted((folder / "ds").glob("*.tar.parts"))):
        if number % 3 == 0:
            path.unlink()
        elif number % 3 == 1:
            os.truncate(path, path.stat().st_size // 2)
    (folder / "ds/.nv-meta/index.sqlite").unlink()


def lossy(folder):
    damaged(folder)
    os.truncate(folder / "ds/002.tar", 3000)
    (folder / "ds/005.tar").unlink()


def duplicates(folder):
    shards(folder / "ds", count=4)
    for number in (1, 3):
        shutil.copy2(folder / f"ds/{number:03}.tar", folder / f"ds/{number + 10:03}.tar")


def pictures(folder):
    make_captions(folder / "ds", [6] * 6)


def photos(folder):
    for n in range(60):
        path = folder / f"photos/{'ab'[n % 2]}/{n:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(n))
        path.with_suffix(".txt").write_text(f"photo {n}")


def recipe(folder):
    photos(folder)
    files = sorted(path.relative_to(folder) for path in folder.glob("photos/*/*"))
    written = [f"{path.parent.name}-{path.name} {path}" for path in files]
    (folder / "recipe").write_text("\n".join(written) + "\n")


def lines(folder):
    rows = [json.dumps({"id": f"k{n:04}", "text": "x" * (n % 50)}) for n in range(300)]
    (folder / "table.jsonl").write_text("\n".join(rows) + "\n")


def joined(folder):
    for name in ("texts", "media"):
        shards(folder / name)
        prepared(folder / name)
    joiner = {"__module__": __name__, "__class__": "Pair"}
    document = {"join": [{"path": "texts"}, {"path": "media"}], "joiner": joiner}
    (folder / "meta.yaml").write_text(json.dumps({"splits": {"train": document}}))


@edataclass
class Pair(Sample):
    """What the join makes."""

    text: str

    @classmethod
    def from_joined(cls, first, second):
        return cls.derive_from(first, text=second["txt"])


def states(folder):
    dataset(folder)
    (folder / "states").mkdir()
    for rank in range(2):
        config = WorkerConfig(rank=rank, world_size=2, num_workers=0, lanes=12)
        data = get_train_dataset(folder / "ds", worker_config=config, batch_size=2)
        loader = get_savable_loader(data)
        for _, _ in zip(range(5), loader, strict=False):
            pass
        path = folder / f"states/state_{rank}.json"
        path.write_text(json.dumps(loader.save_state_rank()))


def broken_pictures(folder):
    shards = [(f"k{n:03}", {"jpg": b"no" if n % 9 == 0 else jpeg(n)}) for n in range(40)]
    write_shard(folder / "ds/0.tar", shards)
    indexing = Indexing(Engine(num_workers=1))
    prepare_dataset(
        folder / "ds",
        split_parts=["train:.*"],
        sample_type="ImageSample",
        field_map={"image": "jpg"},
        indexing=indexing,
    )


PREPARE = "prepare ds --non-interactive --force-overwrite --num-workers 2 --sample-type Crude"
PREPARE += "Webdataset"
CASES = {
    "demo": Case("demo out", lambda folder: None),
    "prepare": Case(f"{PREPARE} --split-ratio 2,1", lambda folder: shards(folder / "ds")),
    "prepare --checksum": Case(
        f"{PREPARE} --split-ratio 2,1 --checksum", lambda folder: shards(folder / "ds")
    ),
    "prepare again": Case(f"{PREPARE} --split-ratio 1,1 --checksum", dataset),
    "prepare --fix-duplicates": Case(
        f"{PREPARE} --split-parts train:.* --fix-duplicates", duplicates
    ),
    "prepare JSONL": Case("prepare table.jsonl --split-ratio 2,1", lines),
    "prepare metadataset": Case("prepare meta.yaml", joined),
    "index": Case(
        "index ds --checksum --num-workers 2", lambda folder: dataset(folder, sqlite=False)
    ),
    "prepare-media": Case(
        "prepare-media ds --media-metadata-by-extension --num-workers 2", pictures
    ),
    "repair": Case("repair ds --num-workers 2 --checksum", damaged),
    "repair --drop": Case(
        "repair ds --num-workers 2 --checksum --drop --quarantine lost.jsonl", lossy
    ),
    "verify --quarantine": Case("verify ds --num-workers 2 --quarantine lost.jsonl", lossy, code=1),
    "lint --quarantine": Case(
        "lint ds --num-workers 2 --quarantine bad.jsonl", broken_pictures, code=1
    ),
    "pack folder": Case("pack photos out --maxcount 7 --split-ratio 2,1", photos),
    "pack table": Case("pack table.jsonl out --key-column id --maxcount 40", lines),
    "pack shards": Case("pack ds out --maxcount 11", lambda folder: shards(folder / "ds")),
    "pack --overwrite": Case(
        "pack table.jsonl out --key-column id --maxcount 40 --overwrite", lines
    ),
    "tar create": Case("tar create photos -o out-%06d.tar --maxcount 9 --index", photos),
    "tar split": Case("tar split ds/000.tar ds/001.tar -c 4 -o out-%06d.tar --index", dataset),
    "tar cat": Case("tar cat ds/000.tar ds/004.tar --shuffle 9 -o out-%06d.tar", dataset),
    "tar proc": Case(
        "tar proc ds/000.tar ds/001.tar ds/002.tar -o out --function tests.drills.test_kills:half",
        dataset,
    ),
    "tar index": Case("tar index ds/000.tar ds/001.tar ds/002.tar --wids list.json", dataset),
    "tar create --recipe": Case(
        "tar create --recipe recipe --sort -o out-%06d.tar --maxcount 9 --index", recipe
    ),
    "pack to tokens": Case(
        "pack table.jsonl corpus.idx --to tokens --tokenizer tests.drills.test_kills:tokens"
        " --vocabulary-size 256 --end-token 0 --workers 2 --overwrite",
        lines,
    ),
    "measure": Case(
        "measure ds --name size --with tests.drills.test_kills:size --num-workers 2", dataset
    ),
    "preview --html": Case("preview ds --html samples.html", dataset),
    "preview --save": Case("preview ds --save samples", dataset),
    "checkpoint edit": Case("checkpoint edit --world-size 2 --skip-steps 3 states edited", states),
    "checkpoint redist": Case("checkpoint redist --new-world-size 4 states dealt", states),
}


def tokens(text):
    """What `pack --to tokens` makes of a text."""
    return list(text.encode())


READ_ONLY = {
    *("analyze-debug", "checkpoint diff", "checkpoint info", "doctor", "info"),
    *("mount", "plan", "tar ls", "view"),
}
"""Commands that write nothing; what people exclude in `view` is tested with the viewer."""


def test_every_command_that_writes_is_killed():
    def is_killed(name):
        return any(f"{case.words} ".startswith(f"{name} ") for case in CASES.values())

    assert {name for name in map(" ".join, COMMANDS) if not is_killed(name)} == READ_ONLY


def size(sample):
    """What `measure` stores for each sample."""
    return len(sample["txt"])


def half(sample):
    """What `tar proc` does to each sample."""
    return {**sample, "txt": sample["txt"][: len(sample["txt"]) // 2]}


def run_command(words, folder, said):
    os.setsid()
    os.chdir(folder)
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    main(words)


def processes_of(session):
    """The processes that a command has started and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def call(case, folder, said, *, kill_after=None):
    """Run a command, to its end or until it is killed; return exit code, process and seconds."""
    process = _context.Process(target=run_command, args=(case.words.split(), folder, said))
    start = time.monotonic()
    process.start()
    process.join(kill_after)
    process.kill()
    process.join()
    pid, code = process.pid, process.exitcode
    process.close()
    return code, pid, time.monotonic() - start


def snapshot(case, folder):
    """What the files in a folder hold, apart from dates of shards, which have to be right."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or path.name in case.volatile:
            continue
        found[name] = path.read_bytes()
        if name.endswith(".jsonl"):  # a list of excluded samples names its dataset by address
            found[name] = found[name].replace(os.fsencode(folder), b"FOLDER")
        dated = []
        if name.endswith(".tar.parts"):
            with contextlib.suppress(FormatError):  # damaged on purpose
                table = PartTable.open(path, verify=True)
                dated = [(path.with_suffix(""), table.shard_mtime_ns)]
                found[name] = bytes(replace(table, shard_mtime_ns=0).to_bytes())
        elif name.endswith("index.sqlite"):
            dated, found[name] = rows_of(path)
        if case.make is not lossy:
            for shard, mtime_ns in dated:
                assert shard.stat().st_mtime_ns == mtime_ns, f"{name} is of another {shard}"
    return found


def rows_of(path):
    """The shards that an SQL index is of, with their dates, and all rows without these."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        dated = list(connection.execute("SELECT shard, mtime_ns FROM energon_shards"))
        connection.execute("UPDATE energon_shards SET mtime_ns = 0")
        rows = [
            re.sub(r"'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d'", "NOW", row) for row in connection.iterdump()
        ]
    return [(path.parents[1] / shard, mtime) for shard, mtime in dated], rows


@pytest.mark.parametrize("name", CASES)
def test_a_command_that_is_killed_leaves_what_one_run_leaves(budget, tmp_path, name):
    case = CASES[name]
    (tmp_path / "template").mkdir()
    case.make(tmp_path / "template")
    said = tmp_path / "said"

    def begin(trial):
        shutil.copytree(tmp_path / "template", tmp_path / trial)
        return tmp_path / trial

    whole = begin("whole")
    code, _, seconds = call(case, whole, said)
    assert code == case.code, said.read_text()[-MAX_SAID:]
    expected = snapshot(case, whole)
    assert expected != snapshot(case, tmp_path / "template")
    for number, rng in enumerate(budget.rounds()):
        folder = begin(f"trial{number}")
        sessions = []
        for _ in range(rng.randint(1, MAX_KILLS)):
            code, pid, _ = call(case, folder, said, kill_after=rng.uniform(0, seconds))
            sessions.append(pid)
            budget.done["kills"] += code == -signal.SIGKILL
            if rng.random() < 0.5:
                wait_until(lambda pid=pid: not processes_of(pid))
        code, pid, took = call(case, folder, said)
        assert code == case.code, said.read_text()[-MAX_SAID:]
        found = snapshot(case, folder)
        assert found.keys() == expected.keys(), set(found) ^ set(expected)
        different = [path for path in found if found[path] != expected[path]]
        assert not different
        seconds = (seconds + took) / 2
        wait_until(lambda sessions=sessions: not any(map(processes_of, sessions)))
        shutil.rmtree(folder)
