from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from energon.errors import FormatError, TruncatedError
from energon.formats.tables.sqlite_file import SqliteReader
from energon.formats.tables.sqlite_index import _TABLES, indexed_shards
from tests.bounded import run_bounded

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
STRANGE = {
    "view": f"CREATE VIEW samples AS {ENDLESS} SELECT x AS tar_file_id FROM n",
    "table": "CREATE VIRTUAL TABLE t USING fts5(a)",
    "trigger": "CREATE TABLE t(a); CREATE TRIGGER r AFTER INSERT ON t BEGIN DELETE FROM t; END",
    "computed": "CREATE TABLE t(a, b AS (length(zeroblob(1000000000))))",
    "index": "CREATE TABLE t(a); CREATE INDEX i ON t(length(hex(zeroblob(a))))",
    "index 'p'": "CREATE TABLE t(a); CREATE INDEX p ON t(a) WHERE a > 1",
}


def database(path: Path, script: str) -> Path:
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()
    return path


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("in_memory", [False, True])
def test_anything_but_plain_tables_is_refused(tmp_path, kind, in_memory):
    path = database(tmp_path / "index.sqlite", STRANGE[kind])
    with pytest.raises(FormatError, match=rf"index\.sqlite: has .*{kind}.*a few plain tables"):
        SqliteReader(path.read_bytes() if in_memory else path)


def test_tables_that_other_tools_write_are_read(tmp_path):
    path = database(
        tmp_path / "index.sqlite",
        """
        CREATE TABLE IF NOT EXISTS samples (tar_file_id INTEGER NOT NULL,
            sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL);
        CREATE INDEX IF NOT EXISTS idx_a ON samples(tar_file_id, "sample_index" DESC);
        CREATE UNIQUE INDEX [b c] ON samples (`sample_key`);
        CREATE TABLE media_filters (filter_id INTEGER PRIMARY KEY AUTOINCREMENT, strategy TEXT,
            created_at_utc TEXT DEFAULT CURRENT_TIMESTAMP, UNIQUE(strategy));
        INSERT INTO media_filters (strategy) VALUES ('GLOB');
        INSERT INTO samples VALUES (0, 'a', 0), (0, 'b', 1);
        ANALYZE;
        """,
    )
    with SqliteReader(path) as reader:
        assert reader.tables.keys() >= {"samples", "media_filters"}
        assert list(reader.rows("SELECT sample_key FROM samples ORDER BY 1")) == [("a",), ("b",)]
        assert reader.first("SELECT 1 FROM samples WHERE sample_key = ?", ("c",)) is None


def test_reading_cannot_write(tmp_path):
    path = database(tmp_path / "index.sqlite", "CREATE TABLE t(a)")
    for file in (path, path.read_bytes()):
        with SqliteReader(file) as reader, pytest.raises(FormatError, match="readonly"):
            list(reader.rows("INSERT INTO t VALUES (1)"))


def test_a_query_that_does_not_end_is_ended(tmp_path, monkeypatch):
    path = database(tmp_path / "index.sqlite", "CREATE TABLE t(a); INSERT INTO t VALUES (1), (2)")
    monkeypatch.setenv("ENERGON_LIMIT_SQLITE_STEPS", "1")
    with SqliteReader(path) as reader:
        for _ in range(2):
            with pytest.raises(FormatError, match="takes more than .* steps.*SQLITE_STEPS"):
                list(reader.rows(f"{ENDLESS} SELECT x FROM n"))
            # The steps of each query are counted again.
            assert reader.first("SELECT max(a) FROM t") == (2,)


@pytest.mark.slow
def test_pages_that_lead_round_in_circles_end():
    done = run_bounded(CIRCLES, cpu_seconds=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "FormatError\n"


CIRCLES = """
import os, sqlite3, struct, tempfile
os.environ["ENERGON_LIMIT_SQLITE_STEPS"] = "8"  # of 200, which take a minute
from pathlib import Path
from energon.errors import FormatError
from energon.formats.tables.sqlite_file import SqliteReader
path = Path(tempfile.mkdtemp()) / "index.sqlite"
connection = sqlite3.connect(path)
connection.execute("PRAGMA page_size = 512")
connection.execute("CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)")
connection.executemany("INSERT INTO t VALUES (?, ?)", ((n, "x" * 40) for n in range(20_000)))
connection.commit()
(root,) = connection.execute("SELECT rootpage FROM sqlite_schema").fetchone()
connection.close()
data = bytearray(path.read_bytes())
# Let all children of each interior page be one and the same: a tree of few pages with more
# leaves than can be visited.
def children(page):
    at = (page - 1) * 512
    cells = struct.unpack_from(">H", data, at + 3)[0]
    return [at + struct.unpack_from(">H", data, at + 12 + 2 * n)[0] for n in range(cells)]
def lead_to(page, child):
    at = (page - 1) * 512
    for cell in children(page):
        struct.pack_into(">I", data, cell, child)
    struct.pack_into(">I", data, at + 8, child)
interior = [n + 1 for n in range(len(data) // 512) if data[n * 512] == 5]
leaf = next(n + 1 for n in range(1, len(data) // 512) if data[n * 512] == 13)
full = [page for page in interior if page != root and len(children(page)) > 10][:12]
for page, child in zip([root, *full], [*full, leaf]):
    lead_to(page, child)
path.write_bytes(data)
with SqliteReader(path) as reader:
    try:
        for row in reader.rows("SELECT a, b FROM t"):
            pass
    except FormatError as error:
        print(type(error).__name__)
"""


def test_a_value_that_claims_a_gigabyte_takes_no_memory(tmp_path):
    path = database(tmp_path / "index.sqlite", "PRAGMA page_size = 512; CREATE TABLE t(a TEXT)")
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO t VALUES (?)", ("x" * 300,))
    connection.commit()
    connection.close()
    data = bytearray(path.read_bytes())
    # Bytes of the record, number of the row, bytes of the header, kind and bytes of the text.
    record = b"\x82\x2f\x01\x03\x84\x65" + b"x" * 300
    at = data.index(record)
    data[at : at + 6 + 300] = (b"\x84\x80\x80\x80\x07\x01\x06\x88\x80\x80\x80\x0d" + b"x" * 300)[
        : 6 + 300
    ]
    path.write_bytes(data)
    done = run_bounded(
        """
import sys
from pathlib import Path
from energon.errors import FormatError
from energon.formats.tables.sqlite_file import SqliteReader
with SqliteReader(Path(sys.argv[1])) as reader:
    try:
        print(len(reader.first("SELECT a FROM t")[0]))
    except FormatError as error:
        print(error)
""",
        path,
        megabytes=400,
    )
    assert "too big" in done.stdout or "malformed" in done.stdout, done


def test_values_of_other_types_are_refused(tmp_path):
    with SqliteReader(database(tmp_path / "index.sqlite", "CREATE TABLE t(a)")) as reader:
        assert reader.numbers(0, 1 << 62) == (0, 1 << 62)
        for value in (-1, None, "1", b"1", 1.0):
            with pytest.raises(FormatError, match=r"index\.sqlite: expected a number .* found "):
                reader.numbers(3, value)
        assert reader.text("a") == "a"
        for value in (None, 1, b"a"):
            with pytest.raises(FormatError, match=r"index\.sqlite: expected a name, found "):
                reader.text(value)


def test_bytes_that_are_no_text_are_read_as_names_of_files_are(tmp_path):
    script = "CREATE TABLE t(a TEXT); INSERT INTO t VALUES (CAST(x'ff41' AS TEXT))"
    with SqliteReader(database(tmp_path / "index.sqlite", script)) as reader:
        assert reader.first("SELECT a FROM t") == ("\udcffA",)


def test_other_files_and_their_halves_are_refused(tmp_path):
    path = database(tmp_path / "index.sqlite", "CREATE TABLE t(a); CREATE TABLE u(a)")
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(TruncatedError, match="has 12188 bytes, expected 12288"):
        SqliteReader(path)
    for content in (b"no database" * 200, data[:600], data[:-4096]):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"index\.sqlite: "):
            SqliteReader(path)
    path.unlink()
    with pytest.raises(FormatError, match=r"index\.sqlite: No such file"):
        SqliteReader(path)


@pytest.mark.parametrize(
    "more",
    [
        "CREATE TRIGGER r AFTER INSERT ON samples BEGIN DELETE FROM samples; END",
        "ALTER TABLE samples ADD COLUMN more TEXT DEFAULT 'x'",
        "DROP TABLE samples; CREATE TABLE samples(a CHECK(length(printf('%.*c', 1e9, 'x'))))",
    ],
)
def test_an_index_whose_tables_are_not_ours_is_not_extended(tmp_path, more):
    tables = ";".join(_TABLES.values())
    path = database(tmp_path / "index.sqlite", tables)
    assert indexed_shards(path) == []
    database(path, more)
    assert indexed_shards(path) is None
