"""Blends of many files work within the descriptors of a process, whatever kind they are of."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from itertools import accumulate, islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon import TokensSample, WorkerConfig, get_loader, get_train_dataset
from energon.prepare.jsonl import prepare_jsonl
from tests.commands import run_python
from tests.token_files import write_tokens

NUM_DESCRIPTORS = 160
"""How many descriptors the process may have."""


def write_mds(folder, chunks):
    """Write chunks of one column of integers each, as MosaicML Streaming does."""
    folder.mkdir()
    listed = []
    for name, numbers in chunks.items():
        records = [struct.pack("<q", number) for number in numbers]
        starts = list(accumulate(map(len, records), initial=4 * (len(records) + 2)))
        content = struct.pack(f"<{1 + len(starts)}I", len(records), *starts) + b"".join(records)
        (folder / name).write_bytes(content)
        columns = {"column_names": ["n"], "column_sizes": [8], "column_encodings": ["int"]}
        about = {"samples": len(records), "compression": None, "format": "mds", **columns}
        file = {"basename": name, "bytes": len(content), "hashes": {}}
        listed.append({**about, "raw_data": file})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))


def make_mds(root, datasets, files):
    for dataset in range(datasets):
        write_mds(root / f"{dataset}", {f"{n}.mds": [dataset * files + n] for n in range(files)})
        yield root / f"{dataset}"


def make_parquet(root, datasets, files):
    for dataset in range(datasets):
        (root / f"{dataset}").mkdir()
        for number in range(files):
            table = pa.table({"n": [dataset * files + number]})
            pq.write_table(table, root / f"{dataset}/{number}.parquet")
        yield root / f"{dataset}"


def make_jsonl(root, datasets, files):
    for number in range(datasets * files):
        path = root / f"{number}.jsonl"
        path.write_text(json.dumps({"n": number}) + "\n")
        prepare_jsonl(path)
        yield path


def make_tokens(root, datasets, files):
    for number in range(datasets * files):
        yield write_tokens(root / f"{number}", [[number]])


KINDS = {
    "mds": make_mds,
    "parquet": make_parquet,
    "jsonl": make_jsonl,
    "tokens": make_tokens,
}


def number_of(sample):
    if isinstance(sample, TokensSample):
        return int(sample.tokens[0])
    return int(sample["json"]["n"] if "json" in sample else sample["n"])


def read_blend(root):
    """Read all samples of a blend twice, in this process; print how many there are."""
    document = json.loads((root / "blend.json").read_text())
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=1)
    dataset = get_train_dataset(
        document, worker_config=config, batch_size=None, max_samples_per_sequence=1
    )
    count = len(list((root / "data").rglob("*")))
    seen, most = set(), 0
    for sample in islice(get_loader(dataset), 3 * count):
        seen.add(number_of(sample))
        most = max(most, len(os.listdir("/proc/self/fd")))
    print(len(seen), most)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_blend_of_more_files_than_descriptors_is_read(tmp_path, kind):
    (tmp_path / "data").mkdir()
    datasets, files = int(os.environ.get("MANY", 5)), 40
    paths = [str(path) for path in KINDS[kind](tmp_path / "data", datasets, files)]
    blend = [{"path": path} for path in paths]
    document = {"splits": {"train": {"blend_epochized": blend}}}
    (tmp_path / "blend.json").write_text(json.dumps(document))
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from tests.test_open_many_files import NUM_DESCRIPTORS, read_blend\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, NUM_DESCRIPTORS))\n"
        "read_blend(Path(sys.argv[1]))"
    )
    result = run_python(program, tmp_path)
    seen, most = map(int, result.stdout.split())
    assert seen == datasets * files
    assert most <= NUM_DESCRIPTORS / 2 + 40


@pytest.mark.slow
def test_too_few_descriptors_are_an_error_that_says_so(tmp_path):
    write_tokens(tmp_path / "corpus", [[1]])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = (
        "import resource, sys, energon\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "energon.get_train_dataset(sys.argv[1], batch_size=1,"
        " worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "corpus.idx")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "ConfigError: this process may open only 20 files" in result.stderr
    assert "at least 64; raise the limit, for example with `ulimit -n 1024`" in result.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limit
