from __future__ import annotations

import json

import pytest

from tests.commands import ok, run, run_python
from tests.datasets import make_captions, write_shard


def test_help_comes_without_torch_or_anything_heavy():
    program = (
        "import sys\nfrom click.testing import CliRunner\nfrom energon.cli.main import main\n"
        "print(*(CliRunner().invoke(main, [*of, '--help']).output for of in ([], ['tar'])))\n"
        "heavy = {'torch', 'PIL', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = run_python(program)
    assert "prepare" in done.stdout
    assert "split" in done.stdout


def test_version():
    assert "0.1.0" in run("--version").output


def test_prepares_and_shows_a_dataset(tmp_path):
    write_shard(tmp_path / "a.tar", [(str(n), {"txt": b"x", "jpg": b"y"}) for n in range(5)])
    write_shard(tmp_path / "b.tar", [(f"b{n}", {"txt": b"x", "jpg": b"y"}) for n in range(3)])
    ok(
        *("prepare", tmp_path, "--non-interactive", "--split-parts", "train:a"),
        *("--split-parts", "val:b", "--sample-type", "CaptioningSample"),
        *("--field-map", '{"image": "jpg", "caption": "txt"}'),
    )
    shown = json.loads(run("info", tmp_path, "--json").stdout)
    assert shown["sample_type"] == "CaptioningSample"
    assert (shown["samples"], shown["shards"]) == (8, 2)
    assert shown["splits"] == {
        "train": {"samples": 5, "shards": 1, "excluded": 0},
        "val": {"samples": 3, "shards": 1, "excluded": 0},
    }
    assert "split train: 5 samples (62.5 %)" in run("info", tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split-ratio", "x"], "split ratio 'x'"),
        ([], "--split-ratio, --split-parts"),
        (["--split-ratio", "1", "--field-map", "{"], "expected JSON"),
        (["--split-ratio", "1", "--exclude", "("], "exclude '(' is not a regular expression"),
        (["--split-ratio", "1", "--field-map", "[]"], "expected {"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(tmp_path, arguments, message):
    write_shard(tmp_path / "a.tar", [("a", {"txt": b"x"})])
    result = run("prepare", tmp_path, "--non-interactive", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_folder_without_shards_is_an_error(tmp_path):
    result = run("prepare", tmp_path, "--non-interactive", "--split-ratio", "1")
    assert result.exit_code == 2
    assert "no .tar file" in result.output
    assert run("info", tmp_path).exit_code == 2


def test_verify_and_repair_say_by_exit_code_whether_something_is_wrong(tmp_path):
    root = make_captions(tmp_path / "ds", [3, 3])
    assert "6 samples in 2 shards: no problems" in run("verify", root).stdout
    (root / "shards/000.tar.parts").unlink()
    result = run("verify", root, "--json", "--quick")
    assert result.exit_code == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert (problem["kind"], problem["where"]) == ("index-missing", "shards/000.tar.parts")
    result = run("repair", root)
    assert result.exit_code == 0
    assert "indexed again: shards/000.tar" in result.stdout
    (root / "shards/001.tar").unlink()
    assert run("repair", root).exit_code == 1
    ok("repair", root, "--drop", "--json")
    assert run("verify", tmp_path / "nothing").exit_code == 2


def test_the_sql_index_may_be_left_out_and_made_later(tmp_path):
    write_shard(tmp_path / "a.tar", [("a", {"txt": b"x"})])
    options = ("--non-interactive", "--split-ratio", "1", "--no-sqlite")
    ok("prepare", tmp_path, *options)
    index = tmp_path / ".nv-meta/index.sqlite"
    assert not index.exists()
    ok("index", tmp_path)
    assert index.exists()
    index.unlink()
    ok("prepare", tmp_path, "--tar-index-only")
    assert index.exists()


def test_a_table_is_packed_to_a_prepared_dataset(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    (tmp_path / "table.csv").write_text("image,caption\na.jpg,one\nb.jpg,two\n")
    arguments = ("pack", tmp_path / "table.csv", tmp_path / "out", "--file-column", "image")
    result = run(*arguments)
    assert result.exit_code == 2
    assert "row 2" in result.output
    assert "--skip-missing" in result.output
    result = ok(*arguments, "--skip-missing", "--part", "caption:txt", "--overwrite")
    assert "skipped" in result.output
    shown = json.loads(run("info", tmp_path / "out", "--json").stdout)
    assert (shown["samples"], shown["sample_type"]) == (1, "CrudeWebdataset")
    ok("verify", tmp_path / "out", "--checksum")
    assert "expected COLUMN:PART" in run(*arguments, "--part", "x").output
