from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile

import pytest
from click.testing import CliRunner

import energon.webdataset as wds
from energon.cli.main import main
from energon.formats.tar.writer import END, encode_header
from energon.io.files import file_info, forget_stores
from energon.webdataset import wids
from tests.bounded import run_bounded
from tests.effort import some
from tests.servers.clouds import make_bucket, moto
from tests.servers.places import s3_environment
from tests.servers.web import web_server
from tests.waiting import wait_until
from tests.webdataset.shards import make_shards, tar_bytes


def run(*arguments, stdin=None):
    result = CliRunner().invoke(main, ["tar", *map(str, arguments)], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def ok(*arguments, stdin=None):
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def members(path):
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]


def names(path):
    return [name for name, _ in members(path)]


# create


def test_creates_by_a_recipe(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"content")
    recipe = f"# two samples\n1.jpg {tmp_path}/a.bin\n1.txt text:two words\n\n2.txt text:\n"
    ok("create", "--recipe", "-", "-o", tmp_path / "x.tar", stdin=recipe)
    assert members(tmp_path / "x.tar") == [
        ("1.jpg", b"content"),
        ("1.txt", b"two words"),
        ("2.txt", b""),
    ]


def test_creates_of_a_folder_the_same_bytes_each_time_without_hidden_files(tmp_path):
    folder = tmp_path / "in"
    for name in ("b.txt", "a.txt", "a.jpg", "sub/c.txt", "a-1.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    ok("create", folder, "-o", tmp_path / "1.tar")
    for hidden in (".DS_Store", ".git/config.txt", "sub/.c.txt"):
        (folder / hidden).parent.mkdir(exist_ok=True)
        (folder / hidden).touch()
    (folder / "a.txt").touch()
    ok("create", folder, "-o", tmp_path / "2.tar")
    assert names(tmp_path / "1.tar") == ["a.jpg", "a.txt", "a-1.txt", "b.txt", "sub/c.txt"]
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()


def test_commands_in_recipes_have_to_be_allowed(tmp_path):
    recipe = "1.txt pipe:echo hello\n"
    refused = run("create", "--recipe", "-", "-o", tmp_path / "x.tar", stdin=recipe)
    assert refused.exit_code == 2
    assert "ENERGON_ALLOW=shell" in refused.output
    assert not (tmp_path / "x.tar").exists()
    ok("create", "--recipe", "-", "-o", tmp_path / "x.tar", "--allow", "shell", stdin=recipe)
    assert members(tmp_path / "x.tar") == [("1.txt", b"hello\n")]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("1.txt\n", "standard input:1"),
        ("1.txt text:a\n2.txt text:b\n1.cls text:c\n", "sort the recipe"),
        ("1.txt text:a\n1.txt text:b\n", "listed twice"),
        ("noext text:a\n", "KEY.FIELD"),
        ("1.txt /no/such/file\n", "no such file"),
    ],
)
def test_wrong_recipes_are_errors_and_leave_nothing(tmp_path, recipe, message):
    result = run("create", "--recipe", "-", "-o", tmp_path / "x.tar", stdin=recipe)
    assert result.exit_code == (2 if message == "no such file" else 1)
    assert message in result.output
    assert list(tmp_path.iterdir()) == []


def test_scattered_recipes_can_be_sorted(tmp_path):
    recipe = "1.txt text:a\n2.txt text:b\n1.cls text:c\n"
    ok("create", "--recipe", "-", "--sort", "-o", tmp_path / "x.tar", stdin=recipe)
    assert names(tmp_path / "x.tar") == ["1.cls", "1.txt", "2.txt"]


# cat


def test_joins_shards_and_keeps_names_and_order(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_bytes([("A.TXT", b"1"), ("A.JPG", b"2")]))
    (tmp_path / "b.tar").write_bytes(tar_bytes([("B.TXT", b"1"), ("B.JPG", b"2")]))
    (tmp_path / "b.tar.gz").write_bytes(b"")
    ok("cat", tmp_path / "b.tar", "-o", tmp_path / "b.tar.gz")
    ok(
        "cat",
        tmp_path / "a.tar",
        tmp_path / "b.tar.gz",
        "--rekey",
        "{key}x",
        "-o",
        tmp_path / "c.tar",
    )
    assert names(tmp_path / "c.tar") == ["Ax.TXT", "Ax.JPG", "Bx.TXT", "Bx.JPG"]
    failed = run("cat", tmp_path / "a.tar", tmp_path / "a.tar", "-o", tmp_path / "d.tar")
    assert failed.exit_code == 1
    assert "already has a sample with the key 'A'" in failed.output
    assert not (tmp_path / "d.tar").exists()


def test_shuffles_slices_selects_and_renames(tmp_path):
    make_shards(tmp_path, [10, 10])
    pattern = f"{tmp_path}/shard-{{000000..000001}}.tar"
    ok("cat", pattern, "--slice", "2:14:3", "-f", "text:md,txt", "-o", tmp_path / "x.tar")
    assert names(tmp_path / "x.tar") == [f"{n:06}.text" for n in (2, 5, 8, 11)]
    ok("cat", pattern, "--shuffle", "100", "-o", tmp_path / "y.tar")
    shuffled = [int(name[:6]) for name in names(tmp_path / "y.tar")[::2]]
    assert sorted(shuffled) == list(range(20)) != shuffled
    ok("cat", pattern, "--shard-slice", "0:2", "--rekey", "#", "-o", tmp_path / "z.tar")
    assert names(tmp_path / "z.tar")[::2] == [f"{n:09}.json" for n in range(4)]
    ok("cat", pattern, "--mix", "2", "--slice", ":4", "-f", "txt", "-o", tmp_path / "m.tar")
    assert [int(name[:6]) for name in names(tmp_path / "m.tar")] == [0, 10, 1, 11]


def test_writes_as_many_shards_as_are_needed(tmp_path):
    make_shards(tmp_path, [7])
    ok("cat", tmp_path / "shard-000000.tar", "-o", f"{tmp_path}/x-%03d.tar", "--maxcount", 3)
    assert [len(names(tmp_path / f"x-{n:03}.tar")) for n in range(3)] == [6, 6, 2]


def test_reads_and_writes_other_places(tmp_path):
    make_shards(tmp_path, [3])
    with web_server(tmp_path) as server:
        ok("cat", f"{server.url}/shard-000000.tar", "-o", f"{server.url}/copied.tar")
    assert names(tmp_path / "copied.tar") == names(tmp_path / "shard-000000.tar")


def test_damaged_shards_are_errors_unless_some_are_tolerated(tmp_path):
    make_shards(tmp_path, [4, 4])
    damaged = tmp_path / "shard-000000.tar"
    damaged.write_bytes(damaged.read_bytes()[:4608])
    pattern = f"{tmp_path}/shard-*.tar"
    refused = run("cat", pattern, "-o", tmp_path / "x.tar")
    assert refused.exit_code == 1
    assert "truncated" in refused.output
    assert not (tmp_path / "x.tar").exists()
    ok("cat", pattern, "--max-errors", 1, "-o", tmp_path / "x.tar")
    assert "000007.json" in names(tmp_path / "x.tar")


# split


def test_splits_by_count_and_bytes(tmp_path):
    make_shards(tmp_path, [10])
    source = tmp_path / "shard-000000.tar"
    ok("split", source, "--count", 4, "-o", f"{tmp_path}/c-%d.tar", "--start", 1)
    assert [len(names(tmp_path / f"c-{n}.tar")) for n in (1, 2, 3)] == [8, 8, 4]
    ok("split", source, "--size", 20480, "-o", f"{tmp_path}/s-%d.tar")
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("s-*.tar"))]
    assert max(sizes) <= 20480
    assert sum(len(names(path)) for path in tmp_path.glob("s-*.tar")) == 20


def test_runs_a_command_for_each_shard_and_notices_if_it_fails(tmp_path):
    make_shards(tmp_path, [4])
    source, log = tmp_path / "shard-000000.tar", tmp_path / "log"
    output = f"{tmp_path}/x-%d.tar"
    ok("split", source, "--count", 2, "-o", output, "--post", f"echo %s {{}} >>{log}", "--delete")
    assert log.read_text().split() == [f"{tmp_path}/x-{n}.tar" for n in (0, 0, 1, 1)]
    assert not list(tmp_path.glob("x-*.tar"))
    result = run("split", source, "--count", 2, "-o", output, "--post", "false")
    assert result.exit_code == 2
    assert "status 1" in result.output


# proc


def upper(sample):
    """Function for `--function`."""
    if sample["__key__"] == "000002":
        return None
    return {"txt": sample["txt"].upper()}


def test_changes_samples_with_a_command(tmp_path):
    make_shards(tmp_path / "in", [3, 2])
    command = "tr a-z A-Z <sample.txt >sample.up && rm sample.json && cat sample.__key__ >sample.k"
    ok("proc", f"{tmp_path}/in", "-o", tmp_path / "out", "-c", command, "-j", 3)
    found = dict(members(tmp_path / "out/shard-000001.tar"))
    assert found["000003.up"] == b"TEXT 3"
    assert found["000003.k"] == b"000003"
    assert "000003.json" not in found


def test_a_command_may_make_several_samples(tmp_path):
    make_shards(tmp_path / "in", [1])
    command = "for i in 000000 000001; do echo $i >sample-$i.n; done"
    ok("proc", f"{tmp_path}/in", "-o", tmp_path / "out", "-m", command)
    assert names(tmp_path / "out/shard-000000.tar") == ["000000/000000.n", "000000/000001.n"]


def test_changes_samples_with_a_function_and_goes_on_where_it_was(tmp_path):
    make_shards(tmp_path / "in", [3, 2])
    function = "tests.cli.test_tar:upper"
    first = ok("proc", f"{tmp_path}/in", "-o", tmp_path / "out", "--function", function)
    assert "2 shards created, 0 already existed" in first.output
    assert members(tmp_path / "out/shard-000000.tar") == [
        ("000000.txt", b"TEXT 0"),
        ("000001.txt", b"TEXT 1"),
    ]
    (tmp_path / "out/shard-000001.tar").unlink()
    again = ok("proc", f"{tmp_path}/in", "-o", tmp_path / "out", "--function", function)
    assert "1 shard created, 1 already existed" in again.output


@pytest.mark.parametrize(("on_error", "left"), [("skip", 2), ("keep", 3)])
def test_samples_that_fail(tmp_path, on_error, left):
    make_shards(tmp_path / "in", [3])
    command = "grep -q 'text 1' sample.txt && exit 3; exit 0"
    arguments = ("proc", f"{tmp_path}/in", "-o", tmp_path / "out", "-c", command)
    stopped = run(*arguments)
    assert stopped.exit_code == 1
    assert "sample '000001': the command ended with status 3" in stopped.output
    assert not list((tmp_path / "out").glob("*.tar"))
    ok(*arguments, "--on-error", on_error)
    assert len(names(tmp_path / "out/shard-000000.tar")) == 2 * left


# index, verify, ls, stat


def test_indexes_shards_and_lists_them(tmp_path):
    make_shards(tmp_path, [3, 2])
    ok("index", f"{tmp_path}/*.tar", "--wids", tmp_path / "all.json", "--name", "all")
    assert (tmp_path / "shard-000000.tar.idx").stat().st_size == 4 * 8
    listed = json.loads((tmp_path / "all.json").read_text())
    assert listed["wids_version"] == 1
    assert [(s["url"], s["nsamples"]) for s in listed["shardlist"]] == [
        ("shard-000000.tar", 3),
        ("shard-000001.tar", 2),
    ]


def test_lists_samples(tmp_path):
    make_shards(tmp_path, [3])
    path = tmp_path / "shard-000000.tar"
    assert ok("ls", path, "-n", 1).stdout == "000000 json:8 txt:6\n"
    listed = [json.loads(line) for line in ok("ls", path, "--json").stdout.splitlines()]
    assert listed[2] == {"key": "000002", "shard": str(path), "fields": {"json": 8, "txt": 6}}


def test_lists_of_inputs(tmp_path):
    make_shards(tmp_path, [3, 2])
    (tmp_path / "list.txt").write_text(f"# mine\n{tmp_path}/shard-000001.tar\n")
    assert len(ok("ls", f"@{tmp_path}/list.txt").stdout.splitlines()) == 2


@pytest.mark.slow
def test_indexes_of_shards_in_a_store_lie_beside_them(tmp_path, monkeypatch):
    make_shards(tmp_path, [3, 2])
    with moto() as port:
        for name, value in s3_environment(port).items():
            monkeypatch.setenv(name, value)
        make_bucket(port, "tars")
        forget_stores()
        try:
            ok("cat", tmp_path, "-o", "s3://tars/in/x-%d.tar", "--maxcount", 2)
            ok("index", "s3://tars/in/x-{0..2}.tar", "--wids", tmp_path / "w.json")
            before = file_info("s3://tars/in/x-0.tar.idx")
            assert "5 samples in 3 shards" in ok("index", "s3://tars/in/").output
            assert file_info("s3://tars/in/x-0.tar.idx") == before
            assert len(wds.WebDataset("s3://tars/in/").with_length()) == 5
            numbered = wids.ShardListDataset(str(tmp_path / "w.json"))
            assert [numbered[n][".txt"] for n in (0, 4)] == ["text 0", "text 4"]
            ok("proc", "s3://tars/in/*.tar", "-o", "s3://tars/out", "-c", "rm sample.json")
            assert len(ok("ls", "s3://tars/out/").stdout.splitlines()) == 5
            ok("cat", "s3://tars/out/", "-o", "s3://tars/all.tar.gz")
            listed = ok("ls", "s3://tars/all.tar.gz").output.split()
            assert listed[0::2] == [f"{n:06}" for n in range(5)]
            ok("ls", "s3://tars/in/")
        finally:
            forget_stores()


def test_shards_of_web_servers_can_be_listed_but_not_indexed(tmp_path):
    make_shards(tmp_path, [3])
    with web_server(tmp_path) as server:
        url = f"{server.url}/shard-000000.tar"
        assert "--wids" in run("index", url).output
        ok("index", url, "--wids", tmp_path / "w.json")
    (listed,) = json.loads((tmp_path / "w.json").read_text())["shardlist"]
    assert (listed["url"], listed["nsamples"]) == (url, 3)


def test_compressed_shards_and_streams_have_no_index(tmp_path):
    make_shards(tmp_path, [3])
    ok("cat", tmp_path / "shard-000000.tar", "-o", tmp_path / "x.tar.gz")
    assert "is compressed" in run("index", tmp_path / "x.tar.gz").output
    assert "no place for an index" in run("index", "-").output


# as a program among others


def start(*arguments, **options):
    command = [sys.executable, "-m", "energon.cli.main", "tar", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


@pytest.mark.slow
@pytest.mark.parametrize("output", some(["x.tar", "x-%d.tar", "x.tar.gz"]))
def test_an_interrupted_command_leaves_no_part_of_a_shard(tmp_path, output):
    # More than a buffer holds, so that some of it is in the file.
    source = tmp_path / "in.tar"
    source.write_bytes(tar_bytes([("1.bin", os.urandom(4 << 20)), ("2.txt", b"")]))
    (tmp_path / "out").mkdir()
    process = start("cat", source, "-", "-o", tmp_path / "out" / output, stdin=subprocess.PIPE)
    wait_until(lambda: any(path.stat().st_size for path in (tmp_path / "out").iterdir()))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said.split() == b"interrupted; no incomplete files were left".split()
    assert list((tmp_path / "out").iterdir()) == []


def test_interrupted_workers_leave_no_part_of_a_shard_and_no_traceback(tmp_path):
    make_shards(tmp_path / "in", [3, 3])
    out, marks = tmp_path / "out", tmp_path / "marks"
    marks.mkdir()
    command = f"touch {marks}/$$; sleep 60"
    process = start(
        *("proc", tmp_path / "in", "-o", out, "-c", command, "--num-workers", 2),
        start_new_session=True,
    )
    workers = min(2, len(os.sched_getaffinity(0)))
    wait_until(lambda: len(list(marks.iterdir())) == workers)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate()
    assert said.split() == b"interrupted; no incomplete files were left".split()
    assert list(out.iterdir()) == []


@pytest.mark.slow
def test_who_reads_no_more_hears_no_complaint(tmp_path):
    (source,) = make_shards(tmp_path, [3000])
    for arguments in (("ls", source), ("ls", "--json", source), ("cat", source, "-o", "-")):
        process = start(*arguments, stdout=subprocess.PIPE)
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        process.wait()


def test_joins_pipes_and_shows_how_far_it_is_on_a_terminal(tmp_path):
    (source,) = make_shards(tmp_path, [3])
    reading, writing = os.openpty()
    command = [sys.executable, "-m", "energon.cli.main", "tar", "cat", "-", "-o", "-"]
    with open(source, "rb") as file:
        done = subprocess.run(command, stdin=file, stdout=subprocess.PIPE, stderr=writing)
    os.close(writing)
    said = b""
    with contextlib.suppress(OSError):
        while data := os.read(reading, 1 << 16):
            said += data
    os.close(reading)
    assert done.returncode == 0
    assert b"joining" in said
    assert b"3 samples of 1 shard" in said
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        assert len(tar.getnames()) == 6


def test_folders_that_nobody_may_write_to_are_errors(tmp_path):
    make_shards(tmp_path, [1])
    result = run("cat", tmp_path / "shard-000000.tar", "-o", "/proc/x.tar")
    assert result.exit_code == 2
    assert result.output.startswith("Error: /proc/")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cat", "x.tar", "--rekey", "%s%s", "-o", "y.tar"), "one place for a number"),
        (("cat", "x.tar", "--rekey", "same", "-o", "y.tar"), "the same for all"),
        (("cat", "x.tar", "--mix", "0", "-o", "y.tar"), "--mix"),
        (("cat", "x.tar", "--slice", "-1:", "-o", "y.tar"), "START:STOP:STEP"),
        (("split", "x.tar", "--count", "0"), "--count"),
        (("proc", "x.tar", "-o", "out"), "one of --command"),
        (("proc", "x.tar", "-o", "out", "--function", "no_such:f"), "MODULE:NAME"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path, monkeypatch, arguments, message):
    (source,) = make_shards(tmp_path, [2])
    os.rename(source, tmp_path / "x.tar")
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert not (tmp_path / "y.tar").exists()


def sparse_shard(path, size=1 << 40):
    """A shard with a member of a terabyte, which is a hole in the file."""
    with open(path, "wb") as file:
        file.write(tar_bytes([("a.cls", b"1")])[:1024] + encode_header("b.bin", size))
        file.seek(size, os.SEEK_CUR)
        file.write(encode_header("c.cls", 1) + b"2".ljust(512, b"\0") + END)


LISTINGS = """
import sys
from tests.commands import run
for arguments in (["ls"], ["ls", "--json"]):
    done = run("tar", *arguments, sys.argv[1])
    assert done.exit_code == 0, done.output
    assert str(1 << 40) in done.stdout, done.output
"""


def test_a_terabyte_of_nothing_is_neither_read_nor_held(tmp_path):
    sparse_shard(tmp_path / "x.tar")
    done = run_bounded(LISTINGS, tmp_path / "x.tar", cpu_seconds=20, megabytes=1024)
    assert done.returncode == 0, done.stderr


def test_names_cannot_steer_the_terminal(tmp_path):
    evil = "a\x1b[2J\nb\r\u202e\x9b"
    path = tmp_path / "x.tar"
    content = [(f"{evil}/1.txt", b"1"), (f"{evil}/1.TXT", b"2"), (f"{evil}noext", b"")]
    path.write_bytes(tar_bytes(content, format=tarfile.PAX_FORMAT))
    outputs = []
    for arguments in (["ls"], ["ls", "--json"]):
        result = run(*arguments, path)
        outputs += [result.stdout, result.stderr]
    text = "".join(outputs)
    assert "\\x1b[2J" in text
    for character in "\x1b\r\u202e\x9b":
        assert character not in text
    assert not any(line.startswith("b\\r") for line in text.splitlines())
