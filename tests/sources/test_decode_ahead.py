"""Row groups are decoded in a thread while hooks run, and nothing else changes."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon import DefaultTaskEncoder, get_savable_loader, get_train_dataset
from energon.errors import FormatError
from energon.sources import reader
from energon.sources.tables.parquet import ParquetGroups
from tests.kind_checks import plain
from tests.task_encoder.runs import config
from tests.waiting import wait_until

ROWS, GROUP_ROWS = 400, 10
THREAD = "energon decode"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows").mkdir()
    for part in range(2):
        numbers = range(200 * part, 200 * part + 200)
        content = [np.random.default_rng(n).bytes(40_000) for n in numbers]
        table = pa.table({"n": list(numbers), "content": content})
        pq.write_table(table, tmp_path / f"rows/{part}.parquet", row_group_size=GROUP_ROWS)
    return tmp_path / "rows"


@pytest.fixture
def decoded(monkeypatch):
    """The row groups that were decoded, and the threads that did it."""
    found = []
    decode = ParquetGroups._decode

    def record(self, group, columns):
        found.append((group, threading.current_thread().name))
        return decode(self, group, columns)

    monkeypatch.setattr(ParquetGroups, "_decode", record)
    return found


class AsTheyAre(DefaultTaskEncoder):
    decoder = None


def epoch(folder, **settings):
    dataset = get_train_dataset(
        folder,
        worker_config=config(**settings),
        task_encoder=AsTheyAre(),
        batch_size=10,
        repeat=False,
    )
    with get_savable_loader(dataset) as loader:
        return [plain(batch) for batch in loader]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"lanes": 1}, {}])
def test_the_batches_are_those_of_decoding_when_it_is_needed(
    folder, decoded, monkeypatch, settings
):
    ahead = epoch(folder, **settings)
    assert sorted(group for group, _ in decoded) == list(range(ROWS // GROUP_ROWS))
    assert all(thread.startswith(THREAD) for _, thread in decoded)
    decoded.clear()
    monkeypatch.setattr(reader, "DECODED_AHEAD_BYTES", 0)
    assert epoch(folder, **settings) == ahead
    assert not any(thread.startswith(THREAD) for _, thread in decoded)


def test_no_more_is_decoded_ahead_than_there_is_memory_for(folder, decoded, monkeypatch):
    waiting = []
    group_bytes = GROUP_ROWS * 45_000
    monkeypatch.setattr(reader, "DECODED_AHEAD_BYTES", 2 * group_bytes)
    begin = ParquetGroups.decode_ahead

    def record(self, *arguments, **settings):
        begin(self, *arguments, **settings)
        waiting.append(len(self._decoded._coming))

    monkeypatch.setattr(ParquetGroups, "decode_ahead", record)
    epoch(folder, lanes=1)
    assert max(waiting) == 2


def test_small_rows_are_left_to_the_reader(tmp_path, decoded):
    table = pa.table({"n": list(range(100)), "content": [b"x"] * 100})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=10)
    epoch(tmp_path)
    assert {thread for _, thread in decoded} == {threading.current_thread().name}


def test_a_damaged_row_group_is_reported_where_its_rows_are_read(folder, decoded):
    path = folder / "1.parquet"
    chunk = pq.read_metadata(path).row_group(7).column(1)
    with open(path, "r+b") as file:
        file.seek(chunk.data_page_offset)
        file.write(bytes(200))
    with pytest.raises(FormatError, match=r"1\.parquet: row group 7 cannot be read"):
        epoch(folder)
    assert any(thread.startswith(THREAD) for _, thread in decoded)


def test_the_thread_ends_with_the_loader(folder):
    def threads():
        return {each for each in threading.enumerate() if each.name.startswith(THREAD)}

    others = threads()
    dataset = get_train_dataset(
        folder, worker_config=config(), task_encoder=AsTheyAre(), batch_size=10
    )
    with get_savable_loader(dataset) as loader:
        next(iter(loader))
        assert len(threads() - others) == 1
    del loader
    wait_until(lambda: not threads() - others)
