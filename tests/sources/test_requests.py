"""How often stores are asked: each request takes as long as the store is far away."""

from __future__ import annotations

import gzip
import json
import shutil
from functools import partial

import numpy as np
import pytest
import zstandard

from energon import WorkerConfig, get_savable_loader, get_train_dataset
from energon.io.files import forget_stores
from energon.prepare.jsonl import prepare_jsonl
from tests.commands import ok
from tests.mds_files import write_mds
from tests.sources.distant import upload
from tests.sources.test_every_kind import DATA, Contents
from tests.token_files import numbered, write_tokens


def tokens(folder):
    write_tokens(folder / "corpus", numbered([300, 100, 0, 700, 500, 120] * 30))
    return "corpus.idx", {}


def token_windows(folder):
    tokens(folder)
    return "corpus.idx", {"unit": "sequence", "length": 64}


def parquet(folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part in range(5):
        rows = {"n": list(range(100 * part, 100 * part + 100)), "text": ["text"] * 100}
        pq.write_table(pa.table(rows), folder / f"{part}.parquet", row_group_size=20)
    return "", {}


def lines(suffix, pack):
    def write(folder):
        texts = np.random.default_rng(0).bytes(600 * 500).hex()
        rows = [json.dumps({"n": n, "text": texts[1200 * n : 1200 * n + 1200]}) for n in range(500)]
        path = folder / f"lines.jsonl{suffix}"
        path.write_bytes(pack("\n".join(rows).encode()))
        prepare_jsonl(path)
        return path.name, {}

    return write


def mds(folder, *, compressed=False):
    texts = [[f"text {number} {row}".encode() for row in range(100)] for number in range(5)]
    write_mds(folder, texts, compressed=compressed)
    return "", {}


def litdata(name):
    def copy(folder):
        shutil.copytree(DATA / name, folder, dirs_exist_ok=True)
        return "", {}

    return copy


KINDS = {
    # What is written, and how many requests it takes to open it and to read all of it once.
    "tokens": (tokens, 8, 4),
    "token windows": (token_windows, 8, 4),
    "parquet": (parquet, 8, 5),
    "jsonl": (lines("", bytes), 6, 2),
    "jsonl.gz": (lines(".gz", gzip.compress), 9, 2),
    "jsonl.zst": (lines(".zst", zstandard.ZstdCompressor().compress), 9, 2),
    # Of each chunk the offsets and the content, and one listing of all.
    "mds": (mds, 9, 1 + 2 * 5),
    "mds_zstd": (partial(mds, compressed=True), 9, 1 + 5),
    "litdata": (litdata("litdata"), 9, 1 + 2 * 3),
    "litdata_zstd": (litdata("litdata_zstd"), 9, 1 + 3),
}


@pytest.fixture(params=KINDS)
def case(request, tmp_path, s3, monkeypatch):
    """A document about a dataset in a store, and what it may cost."""
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    write, opening, reading = KINDS[request.param]
    folder = tmp_path / "data"
    folder.mkdir()
    name, read = write(folder)
    address = f"{upload(folder, s3.address)}/{name}".rstrip("/")
    if request.param == "parquet":  # notes versions of the store
        ok("prepare", address)
    document = tmp_path / "document.yaml"
    document.write_text(json.dumps({"splits": {"train": {"path": address, "read": read}}}))
    return document, opening, reading


def open_far(document, proxy):
    """Open a dataset as a new process does; return it, and how many requests that took."""
    forget_stores()
    proxy.requests.clear()
    dataset = get_train_dataset(
        document,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=1),
        batch_size=8,
        task_encoder=Contents(),
    )
    return dataset, len(proxy.requests)


@pytest.mark.slow
def test_few_requests_open_a_dataset_read_it_once_and_resume(case, s3):
    document, most_opening, most_reading = case
    dataset, opening = open_far(document, s3.proxy)
    assert opening <= most_opening
    with get_savable_loader(dataset) as loader:
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
        state = loader.save_state_rank()
        assert len(s3.proxy.requests) - opening <= most_reading
    dataset, opening = open_far(document, s3.proxy)
    assert opening <= most_opening
    with get_savable_loader(dataset) as loader:
        loader.restore_state_rank(state)
        next(iter(loader))
        # Nothing before the position is read.
        assert len(s3.proxy.requests) - opening <= most_reading


@pytest.mark.slow
def test_nothing_is_fetched_twice_in_a_pass(case, s3):
    document, _, _ = case
    dataset, opening = open_far(document, s3.proxy)
    with get_savable_loader(dataset) as loader:
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
    fetched = [(each.path, each.range) for each in s3.proxy.requests[opening:] if each.is_data]
    assert len(fetched) == len(set(fetched))
