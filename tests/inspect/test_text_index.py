"""Searches with a text index find what searches without one do."""

from __future__ import annotations

import json
import shlex
import signal
import sqlite3
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon import ConfigError, prepare_dataset
from energon.inspect import text_index as format_of_texts
from energon.inspect.text_index import TextIndex, index_texts, read_files, trigrams
from energon.inspect.where import Where
from energon.prepare.engines import Engine
from energon.prepare.jsonl import prepare_jsonl
from energon.viewer.shown import Search, Shown
from tests.commands import run
from tests.datasets import CRUDE, write_crude, write_shard
from tests.sources.distant import upload
from tests.viewer.pages import browse

WORDS = ["Straße", "STRASSE", "ﬁne", "fine", 'say "cat"', "naïve", "cat and dog", "İstanbul", "x'y"]


def make(root, texts, counts=(3, 2)):
    """Make shards with these texts, in text and JSON parts in turn; some keys are texts, too."""
    first = 0
    for shard, count in enumerate(counts):
        own = list(enumerate(texts))[first : first + count]
        write_shard(root / f"{shard}.tar", [(f"Key{n}", parts(n, text)) for n, text in own])
        first += count
    prepare_dataset(root, **CRUDE)
    return root


def parts(number, text):
    if number % 2:
        return {"json": json.dumps({"said": [text]}).encode()}
    return {"txt": text.encode("utf-8", "replace"), "bin": b"not a text: cat"}


def index(path, **given):
    (report,) = index_texts(path, engine=Engine(num_workers=1), **given)
    return report


def search(path, pattern, *, start=0):
    """Return the keys of the samples found, and whether the index was used."""
    leaf = Shown(path).leaf(0, 0)
    found = Search(leaf, Where(shlex.quote(f"text:{pattern}")), start, 1000)
    keys = [sample.where.key for sample in found if sample is not None]
    assert found.stop == len(leaf)
    assert not leaf.texts_problem
    return keys, found.is_indexed


letters = st.text(st.sampled_from("aAbßẞİiﬁ'\"\0\n\uffff\ud800é\u0301 "), max_size=12)


@settings(max_examples=8)
@given(texts=st.lists(letters | st.sampled_from(WORDS), min_size=5, max_size=5), data=st.data())
def test_a_search_finds_the_same_with_and_without_an_index(tmp_path_factory, texts, data):
    root = make(tmp_path_factory.mktemp("texts"), texts)
    patterns = ["key", "ss", "cat"]
    for _ in range(8):
        text = data.draw(st.sampled_from(texts))
        cut = text[data.draw(st.integers(0, 4)) :][: data.draw(st.integers(1, 8))]
        patterns.append(data.draw(st.sampled_from([cut, cut.upper(), cut.casefold()])) or "a")
    expected = {pattern: search(root, pattern) for pattern in patterns}
    index(root)
    for pattern, (keys, is_indexed) in expected.items():
        assert not is_indexed
        assert search(root, pattern) == (keys, bool(trigrams(pattern))), repr(pattern)


def test_rows_of_tables_and_lines_are_indexed(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(f'{{"said": "{each}"}}\n' for each in "ab"))
    with open(tmp_path / "x.jsonl", "a") as file:
        file.write('{"said": "Hello World"}\n')
    prepare_jsonl(tmp_path / "x.jsonl")
    pq.write_table(
        pa.table({"said": ["hello", None, "LOW"], "n": [1, 2, 3]}), tmp_path / "x.parquet"
    )
    for name, stored in (
        ("x.jsonl", "x.jsonl.texts.sqlite"),
        ("x.parquet", "x.parquet.texts.sqlite"),
    ):
        path = tmp_path / name
        before = [search(path, pattern)[0] for pattern in ("hello", "low", "lo w", "x/2")]
        assert index(path).measured == 3
        assert (tmp_path / stored).is_file()
        after = [search(path, pattern) for pattern in ("hello", "low", "lo w", "x/2")]
        assert after == [(keys, True) for keys in before]


def test_excluded_samples_and_subsets_are_numbered_as_without_an_index(tmp_path):
    make(tmp_path / "data", ["some text"] * 9, (4, 5))
    index(tmp_path / "data")
    document = tmp_path / "blend.yaml"
    leaf = "{path: data, subset: {range: [10%, 90%]}}"
    document.write_text(f"splits: {{train: {{blend: [{leaf}]}}}}\n")
    with open(tmp_path / "data/.nv-meta/split.yaml") as file:
        split = file.read().replace("exclude: []", "exclude: [0.tar/Key2, 1.tar/Key5]")
    (tmp_path / "data/.nv-meta/split.yaml").write_text(split)
    for path in (tmp_path / "data", document):
        (leaf,) = Shown(path).splits[0].leaves
        every = [sample.where.key for sample in leaf.page(0, 9)]
        assert 4 < len(every) < 9
        assert search(path, "some") == (every, True)
        assert search(path, "some", start=2) == (every[2:], True)


def test_only_changed_shards_are_read_again(tmp_path):
    make(tmp_path, ["one cat", "two cats", "dog", "bird", "fish"])
    assert index(tmp_path).measured == 5
    file = tmp_path / ".nv-meta/texts.sqlite"
    written = file.stat().st_mtime_ns
    assert index(tmp_path).measured == 0
    assert file.stat().st_mtime_ns == written
    write_shard(tmp_path / "1.tar", [("Key7", {"txt": b"a new cat"})])
    prepare_dataset(tmp_path, **CRUDE)
    answer = browse(tmp_path).get("/s/0/0?text=cat").text
    assert "the dataset has changed since; run `energon measure" in answer.replace("&#39;", "'")
    assert "with the text index" not in answer
    assert index(tmp_path).measured == 1
    assert search(tmp_path, "cat") == (["Key0", "Key1", "Key7"], True)
    assert search(tmp_path, "fish") == ([], True)
    assert "with the text index" in browse(tmp_path).get("/s/0/0?text=cat").text
    assert read_files(file).rows == 6
    write_crude(tmp_path, [(f"Key{n}", {"txt": b"cat"}) for n in range(3)])
    assert index(tmp_path).measured == 3
    assert search(tmp_path, "cat") == (["Key0", "Key1", "Key2", "Key7"], True)
    # Most rows are now those of shards that are gone, so that it is time for a new index.
    assert read_files(file).rows == 9
    assert index(tmp_path).measured == 4
    assert read_files(file).rows == 4
    assert index(tmp_path, again=True).measured == 4
    assert search(tmp_path, "cat") == (["Key0", "Key1", "Key2", "Key7"], True)


_KILLED = """
import os, sys
from energon.inspect import measure
from energon.inspect.text_index import index_texts
from energon.prepare.engines import Engine
measure.MEASURED_TOGETHER = 1
def progress(done, total):
    if done >= 3: os.kill(os.getpid(), 9)
index_texts(sys.argv[1], engine=Engine(num_workers=1), progress=progress)
"""


def test_a_killed_run_is_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("energon.inspect.measure.MEASURED_TOGETHER", 1)
    make(tmp_path, ["one cat", "two cats", "dog", "bird", "fish"])
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert search(tmp_path, "cat") == (["Key0", "Key1"], False)
    assert index(tmp_path).measured == 2
    assert search(tmp_path, "cat") == (["Key0", "Key1"], True)
    assert len(TextIndex(tmp_path / ".nv-meta/texts.sqlite").files.ranges["0.tar"]) == 1
    assert [each.name for each in (tmp_path / ".nv-meta").glob("texts*")] == ["texts.sqlite"]


def test_a_damaged_index_is_not_used_and_replaced(tmp_path):
    make(tmp_path, ["one cat", "two cats", "dog", "bird", "fish"])
    index(tmp_path)
    file = tmp_path / ".nv-meta/texts.sqlite"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert "it is damaged; run" in browse(tmp_path).get("/s/0/0?text=cat").text
    assert index(tmp_path).measured == 5
    assert file.read_bytes() == whole
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE texts_data SET block = ?", (bytes([255] * 64),))
    connection.close()
    answer = browse(tmp_path).get("/s/0/0?text=cat").text
    assert "it is damaged; run" in answer
    assert "2 matches" in answer
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TRIGGER t AFTER INSERT ON files BEGIN SELECT 1; END")
    connection.close()
    assert "it is damaged; run" in browse(tmp_path).get("/s/0/0?text=cat").text


def test_a_dataset_in_a_store_is_indexed_there(tmp_path, s3):
    address = upload(make(tmp_path / "data", ["one cat", "dog", "b", "c", "CAT"]), s3.address)
    assert index(address).measured == 5
    assert search(address, "cat") == (["Key0", "Key4"], True)
    assert index(address).measured == 0


def test_the_command(tmp_path):
    make(tmp_path, ["one cat", "dog", "b", "c", "CAT"])
    result = run("measure", tmp_path, "--text", "--workers", 1)
    assert result.output.endswith(": 5 samples, 5 of them indexed now\n"), result.output
    assert "neither --name" in run("measure", tmp_path, "--text", "--name", "a").output
    assert "pass --name and --with, or --text" in run("measure", tmp_path).output


def test_sqlite_without_trigrams_is_an_error(tmp_path, monkeypatch):
    make(tmp_path, ["one cat", "dog", "b", "c", "CAT"])
    index(tmp_path)
    monkeypatch.setattr(format_of_texts, "_TEXTS", "CREATE VIRTUAL TABLE texts USING fts9(text)")
    with pytest.raises(ConfigError, match=r"text indexes need FTS5 .* this Python has SQLite"):
        index(tmp_path)
    with pytest.raises(ConfigError, match="need FTS5"):
        TextIndex(tmp_path / ".nv-meta/texts.sqlite")
