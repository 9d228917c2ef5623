"""Tables that are small on disk and large when decoded: bounded memory, or a clear error."""

from __future__ import annotations

import contextlib
import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon.errors import FormatError
from energon.formats.arrow import read_batches
from energon.formats.parquet import python_rows, row_batches, value_bytes
from energon.limits import DECODED_BYTES, DOCUMENT_BYTES
from energon.prepare.importers.files import Table, read_rows
from energon.prepare.importers.row import RowRules
from energon.prepare.jsonl import index_jsonl
from energon.sources.tables.parquet import ParquetSource
from tests.bounded import run_bounded

MEGABYTE = 1 << 20

READ = """
import sys, resource
import numpy as np
from energon.sources.tables.parquet import ParquetSource

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for folder in sys.argv[1:]:
    source = ParquetSource(folder)
    block = source.read(np.arange(2048)).with_sources("here")
    for at in (0, 1, 2047):
        [sample] = block.samples(at, at + 1)
        assert sample["__key__"] == f"0/{at}" and sample["n"] == at
        assert sample["__sources__"][0].dataset_path == "here"
        assert len(sample["text"]) == 1 << 20
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def make_dictionary(folder, kind="string", rows=8192, *, has_schema=True):
    """Write a file of a few kilobytes with a column of `rows` times one value of a megabyte."""
    folder.mkdir(parents=True)
    value = pa.array(["x" * MEGABYTE]).cast(kind)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), value)
    table = pa.table({"text": texts, "n": range(rows)})
    pq.write_table(table, folder / "0.parquet", compression="zstd", store_schema=has_schema)
    assert (folder / "0.parquet").stat().st_size < 100_000
    return folder


@pytest.mark.slow
def test_samples_of_a_dictionary_are_made_one_by_one(tmp_path):
    folders = [
        make_dictionary(tmp_path / f"{kind}-{has_schema}", kind, has_schema=has_schema)
        for kind in ("string", "binary")
        for has_schema in (False, True)
    ]
    done = run_bounded(READ, *folders, megabytes=2048)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256


@pytest.mark.slow
def test_a_dictionary_that_would_be_written_down_is_refused(tmp_path):
    folder = make_dictionary(tmp_path / "x", has_schema=False)
    target = tmp_path / "packed"
    code = "import sys; from energon.cli.main import main; main(sys.argv[1:])"
    done = run_bounded(code, "pack", folder / "0.parquet", target, megabytes=2048)
    assert done.returncode == 1, done.stderr
    assert "0.parquet: row group 0 has at least 859" in done.stderr
    assert DECODED_BYTES.variable in done.stderr
    assert not list(target.glob("*.tar"))


@pytest.mark.parametrize("has_lists", [False, True])
def test_a_row_group_is_refused_before_it_is_decoded(tmp_path, monkeypatch, has_lists):
    texts = pa.array(["x" * 1000] * 1000)
    if has_lists:
        texts = pa.array([["x" * 1000] * 1000])
    table = pa.table({"text": texts})
    pq.write_table(table, tmp_path / "0.parquet", compression="zstd", use_dictionary=has_lists)
    monkeypatch.setenv(DECODED_BYTES.variable, "500_000")
    metadata = pq.read_metadata(tmp_path / "0.parquet")
    with open(tmp_path / "0.parquet", "rb") as file:
        batches = row_batches(file, metadata, 0, ["text"], origin="0.parquet")
        with pytest.raises(FormatError, match=f"0.parquet: row group 0 .*{DECODED_BYTES.variable}"):
            next(batches)


def test_python_rows_are_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("energon.formats.parquet.ROW_BATCH_BYTES", 4000)
    rows = [{"n": n, "text": f"{n % 3}" * 500, "many": ["a"] * (n % 4)} for n in range(300)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "0.parquet", row_group_size=200)
    metadata = pq.read_metadata(tmp_path / "0.parquet")
    with open(tmp_path / "0.parquet", "rb") as file:
        found = [
            row
            for group in range(2)
            for row in python_rows(file, metadata, group, ["n", "text", "many"], origin="0.parquet")
        ]
    assert found == rows


def test_columns_that_stay_dictionaries_have_the_same_values(tmp_path, monkeypatch):
    monkeypatch.setattr("energon.formats.parquet.ROW_BATCH_BYTES", 4000)
    rows = [
        {
            "text": f"{n % 3}" * 100 if n % 5 else None,
            "image": {"bytes": bytes([n % 3]) * 100, "path": f"{n % 3}.png"},
            "n": n,
        }
        for n in range(300)
    ]
    table = pa.Table.from_pylist(rows)
    table = table.append_column("json", pa.array(['{"a": 1}'] * 300, pa.json_()))
    pq.write_table(table, tmp_path / "0.parquet")
    source = ParquetSource(tmp_path)
    kinds = source.groups.table(0, source.columns).table.schema
    assert pa.types.is_dictionary(kinds.field("text").type)
    samples = source.read(np.arange(300)).samples(0, 300)
    for sample, row in zip(samples, rows, strict=True):
        assert (sample["text"], sample["n"]) == (row["text"], row["n"])
        assert sample["image"] == row["image"]["bytes"]
        assert sample["json"] == {"a": 1}


TEXTS = ["abc", "", "a" * 1000, None, "abc"]


@pytest.mark.parametrize(
    ("values", "size"),
    [
        (pa.array(TEXTS).dictionary_encode(), 1006),
        (pa.array(TEXTS).dictionary_encode().slice(1, 2), 1000),
        (pa.array(TEXTS, pa.large_string()).dictionary_encode(), 1006),
        (pa.chunked_array([pa.array(TEXTS).dictionary_encode()] * 2), 2012),
        (pa.array([None, None], pa.string()).dictionary_encode(), 0),
        (pa.array([7, 8, 7, 7]).dictionary_encode(), 32),
        (pa.StructArray.from_arrays([pa.array(TEXTS).dictionary_encode()], ["x"]), 1006),
        (pa.array(TEXTS, pa.string_view()), 1006),
        (pa.ListArray.from_arrays([0, 2, 5], pa.array(TEXTS).dictionary_encode()), 1006),
    ],
)
def test_values_count_as_often_as_they_are_there(values, size):
    assert value_bytes(values) == size


@pytest.mark.parametrize("kind", ["run", "map", "list view"])
def test_other_references_count_as_the_most_that_they_can_be(kind):
    if kind == "run":
        values = pa.RunEndEncodedArray.from_arrays(pa.array([1000]), pa.array(["x" * 100]))
        least = 100_000
    elif kind == "map":
        items = pa.array(["x" * 100] * 10).dictionary_encode()
        values = pa.MapArray.from_arrays([0, 10], pa.array([str(n) for n in range(10)]), items)
        least = 1000
    else:
        values = pa.ListViewArray.from_arrays([0] * 10, [1] * 10, pa.array(["x" * 100]))
        least = 1000
    assert value_bytes(values) >= least


def write_arrow(path, table, *, is_file, compression):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as out, new(out, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=100)
    return pa.py_buffer(path.read_bytes())


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
@pytest.mark.parametrize("has_dictionary", [False, True])
def test_arrow_is_limited_by_what_it_unpacks_to(
    tmp_path, monkeypatch, is_file, compression, has_dictionary
):
    texts = pa.array(["x" * 100_000 + str(n) for n in range(50)])
    table = pa.table({"text": texts.dictionary_encode() if has_dictionary else texts})
    data = write_arrow(tmp_path / "x", table, is_file=is_file, compression=compression)
    schema, batches = read_batches(data, origin="x.arrow")
    assert pa.Table.from_batches(batches, schema) == table
    monkeypatch.setenv(DECODED_BYTES.variable, "1_000_000")
    if compression is None:  # these are only mapped
        read_batches(data, origin="x.arrow")
        return
    before = pa.total_allocated_bytes()
    with pytest.raises(FormatError, match=f"x.arrow: unpacks to .*{DECODED_BYTES.variable}"):
        read_batches(data, origin="x.arrow")
    assert pa.total_allocated_bytes() <= before


@pytest.mark.parametrize("is_file", [False, True])
def test_damaged_arrow_is_refused(tmp_path, is_file):
    table = pa.table({"text": ["x" * 100] * 300})
    data = write_arrow(tmp_path / "x", table, is_file=is_file, compression="zstd").to_pybytes()
    draw = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        at = int(draw.integers(8, len(data)))
        damaged[at : at + 4] = draw.bytes(len(damaged[at : at + 4]))
        if draw.random() < 0.3:
            del damaged[at:]
        with contextlib.suppress(FormatError, pa.ArrowException, OSError, ValueError):
            read_batches(pa.py_buffer(bytes(damaged)), origin="x")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".csv", ".csv.gz"])
def test_a_line_is_limited_as_a_document(tmp_path, monkeypatch, suffix):
    monkeypatch.setenv(DOCUMENT_BYTES.variable, str(MEGABYTE))
    text = b'{"a": "' + b"x" * (40 << 20) + b'"}\n'
    if suffix.startswith(".csv"):
        text = b"a,b\n" + text
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(text, 1) if suffix.endswith(".gz") else text)
    expected = f"x{suffix}:[12]: a document .*{DOCUMENT_BYTES.variable}"
    with pytest.raises(FormatError, match=expected):
        list(read_rows(Table.at(path, RowRules())))
    if suffix.startswith(".jsonl"):
        with pytest.raises(FormatError, match=expected):
            index_jsonl(path, str(path))
