"""`energon pack --to tokens`: texts become token files."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon.errors import (
    ConfigError,
    DatasetBusyError,
    FormatError,
    StorageAccessError,
    StorageFullError,
)
from energon.formats.tokens import token_index_bytes
from energon.io.atomic import hold_lock
from energon.prepare.engines import Engine
from energon.prepare.writers import tokens as writer
from energon.prepare.writers.tokens import TokenizeOptions, pack_tokens
from energon.sources.tables.token_files import TokenSource
from tests.commands import run
from tests.small_disks import LITTLE_ROOM, REMEDIES, small_disk
from tests.sources.reads import read_samples
from tests.token_files import write_tokens

WORDS = "tests.prepare.test_pack_tokens:words"


def words(text):
    """A tokenizer: the lengths of words."""
    return [len(word) for word in text.split()]


def failing(text):
    raise KeyError(text[:3])


def of_text(text):
    return text


def large(text):
    return np.array([70_000])


TEXTS = [" ".join("x" * (1 + (n * k) % 7) for k in range(n % 9)) for n in range(400)]
DOCUMENTS = [words(text) for text in TEXTS]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "n": 1}) for text in TEXTS) + "\n\n")
    return path


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    monkeypatch.setattr(writer, "RANGE_BYTES", 1000)


def pack(source, target, options, **settings):
    """Tokenize in this process, unless told otherwise."""
    return pack_tokens(
        [str(source)], target, options, **{"engine": Engine(num_workers=1), **settings}
    )


def documents(path):
    source = TokenSource(path)
    return [sample["tokens"].tolist() for sample in read_samples(source, np.arange(len(source)))]


REAL = {
    "x.bin": "0100020003000400f401dbff",
    "x.idx": "4d4d4944494458000001000000000000000804000000000000000400000000000000030000000100"
    "000001000000010000000000000000000000060000000000000008000000000000000a0000000000"
    "00000000000000000000010000000000000003000000000000000400000000000000",
    "m.bin": "01000000020000000300000070110100",
    "m.idx": "4d4d4944494458000001000000000000000403000000000000000300000000000000020000000100"
    "000001000000000000000000000008000000000000000c0000000000000000000000000000000200"
    "0000000000000300000000000000000101",
}
"""What the IndexedDatasetBuilder of megatron-core 0.16.1 wrote of [1 2 3] [[4] [500]] [65499] as
uint16, and of [[1 2] [3]] [70000] as int32 with the modes 0 1 1."""


def test_files_are_those_of_megatron_byte_by_byte(tmp_path):
    for name, content in REAL.items():
        (tmp_path / name).write_bytes(bytes.fromhex(content))
    assert documents(tmp_path / "x.idx") == [[1, 2, 3], [4, 500], [65499]]
    samples = read_samples(TokenSource(tmp_path / "m.idx"), np.arange(2))
    assert [sample["tokens"].tolist() for sample in samples] == [[1, 2, 3], [70000]]
    assert [sample["modes"].tolist() for sample in samples] == [[0, 0, 1], [1]]
    for name, lengths, first, modes, dtype in (
        ("x", [3, 1, 1, 1], [0, 1, 3, 4], None, "<u2"),
        ("m", [2, 1, 1], [0, 2, 3], [0, 1, 1], "<i4"),
    ):
        ours = b"".join(token_index_bytes(np.dtype(dtype), lengths, first, modes))
        assert ours.hex() == REAL[f"{name}.idx"]
    write_tokens(tmp_path / "y", [[1, 2, 3], [[4], [500]], [65499]])
    assert (tmp_path / "y.idx").read_bytes().hex() == REAL["x.idx"]


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_become_documents_in_their_order(lines, tmp_path, workers):
    options = TokenizeOptions(WORDS, vocabulary_size=100)
    target = tmp_path / "out" / "x.idx"
    written = pack(lines, target, options, engine=Engine(num_workers=workers))
    assert documents(target) == DOCUMENTS
    assert written == (len(TEXTS), sum(map(len, DOCUMENTS)))
    expected = write_tokens(tmp_path / "expected", DOCUMENTS)
    assert target.read_bytes() == expected.read_bytes()
    assert target.with_suffix(".bin").read_bytes() == expected.with_suffix(".bin").read_bytes()
    assert sorted(os.listdir(target.parent)) == ["x.bin", "x.idx"]


def test_compressed_lines_and_parquet_files_are_read_too(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"body": text}) + "\n" for text in TEXTS[:50])
    table = pa.table({"body": TEXTS[50:], "other": [1] * 350})
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=30)
    options = TokenizeOptions(WORDS, text_column="body")
    pack(tmp_path, tmp_path / "x", options)
    assert documents(tmp_path / "x") == DOCUMENTS


def test_an_interrupted_run_does_only_the_rest(lines, tmp_path, monkeypatch):
    options = TokenizeOptions(WORDS)
    done = []

    def stop(documents):
        done.append(documents)
        if documents > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(lines, tmp_path / "x", options, progress=stop)
    assert not (tmp_path / "x.idx").exists()
    kept = sorted(p.name for p in (tmp_path / "x.tokens-partial").glob("0*.lengths"))
    assert kept
    first = []
    pack(lines, tmp_path / "x", options, progress=first.append)
    assert first[0] >= 100  # what was done is counted before anything is tokenized
    assert documents(tmp_path / "x") == DOCUMENTS
    assert not (tmp_path / "x.tokens-partial").exists()


@pytest.mark.slow
def test_a_killed_command_goes_on_where_it_was(lines, tmp_path):
    (tmp_path / "slow_words.py").write_text(
        "import time\n"
        "def words(text):\n"
        "    time.sleep(0.01)\n"
        "    return [len(word) for word in text.split()]\n"
    )
    lines.write_text(lines.read_text() * 20)  # more than a range of the real size is not needed
    script = (
        "import sys\n"
        "from energon.prepare.writers import tokens\n"
        "tokens.RANGE_BYTES = 1000\n"
        "from energon.prepare.engines import Engine\n"
        "if __name__ == '__main__':\n"
        "    options = tokens.TokenizeOptions('slow_words:words')\n"
        "    one = Engine(num_workers=1)\n"
        "    tokens.pack_tokens(sys.argv[1:2], sys.argv[2], options, engine=one)\n"
    )
    (tmp_path / "pack.py").write_text(script)
    command = [sys.executable, "pack.py", str(lines), str(tmp_path / "x")]
    child = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    partial = tmp_path / "x.tokens-partial"
    try:
        while len(list(partial.glob("0*.lengths"))) < 3:
            assert child.poll() is None
            time.sleep(0.02)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in partial.glob("0*.lengths")}
    (tmp_path / "slow_words.py").write_text(
        "def words(text): return [len(word) for word in text.split()]\n"
    )
    seen = {}

    def look(documents):
        seen.update({name: (partial / name).stat().st_mtime_ns for name in kept})

    options = TokenizeOptions("slow_words:words")
    sys.path.insert(0, str(tmp_path))
    try:
        pack(lines, tmp_path / "x", options, progress=look)
    finally:
        sys.path.remove(str(tmp_path))
    assert seen == kept
    assert documents(tmp_path / "x") == DOCUMENTS * 20


@pytest.mark.parametrize(("little_room", "problem"), LITTLE_ROOM)
def test_a_full_disk_is_named_with_what_to_do(
    lines, tmp_path, monkeypatch, caplog, little_room, problem
):
    monkeypatch.setattr(writer, "RANGE_BYTES", 1 << 20)
    lines.write_text(lines.read_text() * 8)  # 50 KB of tokens
    packing = ("pack", lines, "--to", "tokens", "--tokenizer", WORDS, "--num-workers", 1)
    with little_room(tmp_path / "disk", 8) as disk:
        result = run(*packing, disk / "x")
        assert (result.exit_code, result.output) == (
            2,
            f"Error: {disk}/x.tokens-partial/000000.bin: {problem}; {REMEDIES[problem]} and run it "
            "again; completed work is kept\n",
        )
        with pytest.raises(StorageFullError, match=f"000000.bin: {problem}; {REMEDIES[problem]}"):
            pack(lines, disk / "x", TokenizeOptions(WORDS))
    assert not caplog.records


def test_parts_that_cannot_be_written_are_an_error_with_advice(lines, tmp_path):
    with small_disk(tmp_path / "disk", 64) as disk:
        (disk / "x.tokens-partial").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(StorageAccessError, match=r"x\.tokens-partial"):
            pack(lines, disk / "x", TokenizeOptions(WORDS))


def joined_and_killed(*about):
    _JOIN(*about)
    raise KeyboardInterrupt


def removed_and_killed(folder):
    next(folder.glob("0*.bin")).unlink()
    raise KeyboardInterrupt


_JOIN = writer._join


@pytest.mark.parametrize(
    ("name", "killed"), [("_join", joined_and_killed), ("shutil.rmtree", removed_and_killed)]
)
def test_a_run_that_was_killed_at_its_end_can_be_repeated(
    lines, tmp_path, monkeypatch, name, killed
):
    options, partial = TokenizeOptions(WORDS), tmp_path / "x.tokens-partial"
    with monkeypatch.context() as patched:
        patched.setattr(f"energon.prepare.writers.tokens.{name}", killed)
        with pytest.raises(KeyboardInterrupt):
            pack(lines, tmp_path / "x", options)
    assert list(partial.glob("0*.lengths"))
    assert documents(tmp_path / "x") == DOCUMENTS
    refused = r"x\.idx already exists; choose another name, or pass --overwrite"
    with pytest.raises(ConfigError, match=refused):
        pack(lines, tmp_path / "x", options)
    pack(lines, tmp_path / "x", options, overwrite=True)
    assert documents(tmp_path / "x") == DOCUMENTS
    assert not partial.exists()


def test_another_run_over_what_was_begun_is_refused(lines, tmp_path):
    partial = tmp_path / "x.tokens-partial"

    def stop(documents):
        if documents:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(lines, tmp_path / "x", TokenizeOptions(WORDS), progress=stop)
    other = TokenizeOptions(WORDS, end_token=5)
    with pytest.raises(ConfigError, match="was begun with other files or options"):
        pack(lines, tmp_path / "x", other)
    with open(partial / "lock", "wb") as lock:
        assert hold_lock(lock.fileno())
        with pytest.raises(DatasetBusyError, match="another process writes to it"):
            pack(lines, tmp_path / "x", TokenizeOptions(WORDS))
    pack(lines, tmp_path / "x", other, overwrite=True)
    assert documents(tmp_path / "x") == [[*document, 5] for document in DOCUMENTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{nonsense", r"corpus\.jsonl, byte \d+"),
        ('{"body": "x"}', "has no 'text', but body; name the column with the texts"),
        ('{"text": 7}', "has an int as 'text'"),
        ("[1]", r"has no 'text', but \[1\]"),
    ],
)
def test_a_line_without_a_text_is_named(lines, tmp_path, line, problem):
    with open(lines, "a") as file:
        file.write(line + "\n")
    with pytest.raises(FormatError, match=problem):
        pack(lines, tmp_path / "x", TokenizeOptions(WORDS))
    assert not (tmp_path / "x.idx").exists()


@pytest.mark.parametrize(
    ("tokenizer", "error", "problem"),
    [
        ("words", ConfigError, "expected MODULE:FUNCTION"),
        ("no_such_module:words", ConfigError, "No module named 'no_such_module'"),
        (WORDS + "s", ConfigError, "has no attribute 'wordss'"),
        ("tests.prepare.test_pack_tokens:TEXTS", ConfigError, "TEXTS is not callable"),
        ("tests.prepare.test_pack_tokens:failing", FormatError, "failed on .*: KeyError"),
        ("tests.prepare.test_pack_tokens:of_text", ConfigError, "expected whole numbers"),
        ("tests.prepare.test_pack_tokens:large", ConfigError, "expected 0 to 99; set their number"),
    ],
)
def test_a_tokenizer_that_makes_no_sense_is_reported(lines, tmp_path, tokenizer, error, problem):
    with pytest.raises(error, match=problem):
        pack(lines, tmp_path / "x", TokenizeOptions(tokenizer, vocabulary_size=100))


def test_files_that_hold_no_texts_are_refused(lines, tmp_path):
    (tmp_path / "x.csv").write_text("text\na\n")
    with pytest.raises(ConfigError, match=r"x\.csv: expected \.jsonl or \.parquet files"):
        pack(tmp_path / "x.csv", tmp_path / "x", TokenizeOptions(WORDS))
    (tmp_path / "e.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="there are no documents to write"):
        pack(tmp_path / "e.jsonl", tmp_path / "x", TokenizeOptions(WORDS))
    table = pa.table({"body": ["x"]})
    pq.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(FormatError, match="has no 'text', but body"):
        pack(tmp_path / "p.parquet", tmp_path / "x", TokenizeOptions(WORDS))
    with pytest.raises(ConfigError, match="--end-token 100: expected a number below 100"):
        TokenizeOptions(WORDS, end_token=100, vocabulary_size=100)


def test_the_command_writes_them(lines, tmp_path):
    arguments = ("pack", lines, tmp_path / "x.idx", "--to", "tokens")
    result = run(*arguments, "--tokenizer", WORDS, "--vocabulary-size", 100)
    total = sum(map(len, DOCUMENTS))
    assert (result.exit_code, result.output) == (0, f"400 documents, {total} tokens\n")
    assert documents(tmp_path / "x") == DOCUMENTS
    for more, problem in (
        ((), "--to tokens needs a --tokenizer"),
        (("--tokenizer", WORDS, "--maxcount", 5), "--maxcount does not apply"),
    ):
        result = run(*arguments, *more)
        assert result.exit_code == 2
        assert problem in result.output
    result = run("pack", lines, tmp_path / "y", "--tokenizer", WORDS)
    assert (result.exit_code, result.output) == (2, "Error: --tokenizer is for --to tokens\n")
