from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.formats.tables.part_table import PartTable
from energon.formats.tar.scan import scan_tar
from energon.prepare.writers.shard_writer import ShardWriter
from tests.commands import run_python


def samples(count, *, size=20):
    return [
        {"__key__": f"{n:05}", "txt": b"x" * (n % size), "json": {"n": n}} for n in range(count)
    ]


def write(pattern, wanted, **options):
    with ShardWriter(pattern, **options) as writer:
        for sample in itertools.islice(wanted, writer.num_samples, None):
            writer.write(sample)
    return writer


def content_of(folder):
    return {
        name: (folder / name).read_bytes()
        for name in sorted(os.listdir(folder))
        if not name.endswith(".parts")  # these hold the date of the shard
    }


@given(st.integers(1, 25), st.integers(1, 8), st.integers(1024, 12_000))
@settings(max_examples=15, deadline=None)
def test_shards_are_bounded_by_count_and_bytes(tmp_path_factory, count, maxcount, maxsize):
    root = tmp_path_factory.mktemp("w")
    writer = write(
        root / "s/%03d.tar", samples(count, size=1500), maxcount=maxcount, maxsize=maxsize
    )
    scans = [scan_tar(path) for path in writer.shards]
    assert [key for scan in scans for key in scan.keys] == [f"{n:05}" for n in range(count)]
    for scan in scans:
        assert scan.num_samples <= maxcount
        assert scan.num_samples == 1 or scan.sample_offset[-1] <= maxsize
    assert writer.num_samples == count


def test_shards_are_called_for_as_they_become_complete(tmp_path):
    done = []
    writer = write(tmp_path / "s-%d.tar", samples(5), maxcount=2, start_shard=7, post=done.append)
    assert [os.path.basename(path) for path in done] == ["s-7.tar", "s-8.tar", "s-9.tar"]
    assert writer.shards == done


def test_resuming_gives_what_one_run_gives(tmp_path):
    wanted = samples(50)
    write(tmp_path / "whole/%d.tar", wanted, maxcount=7)
    for stop in (0, 7, 12, 30, 50):
        writer = ShardWriter(tmp_path / "cut/%d.tar", maxcount=7, resume=True)
        assert writer.num_samples <= stop
        for sample in wanted[writer.num_samples : stop]:
            writer.write(sample)
        writer.abort()
    writer = write(tmp_path / "cut/%d.tar", wanted, maxcount=7, resume=True)
    assert writer.last_key == "00049"
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")


def test_resuming_indexes_a_shard_whose_index_was_not_written_any_more(tmp_path):
    write(tmp_path / "%d.tar", samples(10), maxcount=5)
    os.unlink(tmp_path / "1.tar.parts")
    with ShardWriter(tmp_path / "%d.tar", resume=True) as writer:
        assert (writer.num_samples, writer.last_key) == (10, "00009")
    assert PartTable.open(tmp_path / "1.tar.parts").part_crc32 is not None


def test_resuming_adds_the_checksums_that_an_index_lacks(tmp_path):
    write(tmp_path / "%d.tar", samples(10), maxcount=5, checksum=False)
    assert PartTable.open(tmp_path / "1.tar.parts").part_crc32 is None
    ShardWriter(tmp_path / "%d.tar", resume=True).close()
    whole = write(tmp_path / "whole/%d.tar", samples(10), maxcount=5)
    for shard, other in zip(("0.tar", "1.tar"), whole.shards, strict=True):
        found = PartTable.open(tmp_path / f"{shard}.parts").part_crc32
        assert found.tolist() == PartTable.open(Path(f"{other}.parts")).part_crc32.tolist()


def test_existing_shards_are_kept_unless_told_otherwise(tmp_path):
    write(tmp_path / "%d.tar", samples(10), maxcount=3)
    with pytest.raises(ConfigError, match="4 such shards.*resume=True.*overwrite=True"):
        ShardWriter(tmp_path / "%d.tar")
    writer = write(tmp_path / "%d.tar", samples(2), overwrite=True)
    assert len(writer.shards) == 1
    assert sorted(os.listdir(tmp_path)) == ["0.tar", "0.tar.idx", "0.tar.parts"]


def test_two_writers_of_the_same_names_are_noticed(tmp_path):
    one, other = (ShardWriter(tmp_path / "%d.tar") for _ in range(2))
    for writer in (one, other):
        writer.write(samples(1)[0])
    one.close()
    with pytest.raises(ConfigError, match="another process writes to the same names"):
        other.close()
    assert scan_tar(tmp_path / "0.tar").keys == ["00000"]


def test_a_writer_whose_file_another_one_deletes_says_why(tmp_path):
    one = ShardWriter(tmp_path / "%d.tar", resume=True)
    one.write(samples(1)[0])
    ShardWriter(tmp_path / "%d.tar", resume=True)
    with pytest.raises(ConfigError, match="another process that writes to the same names"):
        one.close()


@pytest.mark.parametrize(
    ("pattern", "options", "message"),
    [
        ("a.tar", {}, "no place for the number"),
        ("a%s%s.tar", {}, "no place for the number"),
        ("%d.tar", {"maxcount": 0}, "maxcount=0"),
        ("%d.tar", {"resume": True, "overwrite": True}, "choose one"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, pattern, options, message):
    with pytest.raises(ConfigError, match=message):
        ShardWriter(tmp_path / pattern, **options)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_killing_it_at_any_moment_leaves_whole_shards_to_go_on_from(tmp_path):
    program = (
        "import itertools, sys\n"
        "from energon.prepare.writers.shard_writer import ShardWriter\n"
        "print('go', flush=True)\n"
        f"with ShardWriter({str(tmp_path / 'cut/%04d.tar')!r}, maxcount=50, resume=True) as w:\n"
        "    for n in range(w.num_samples, 4000):\n"
        "        w.write({'__key__': f'{n:05}', 'txt': b'x' * (n % 20), 'json': {'n': n}})\n"
    )
    moments = random.Random(3)
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(moments.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    run_python(program)
    write(tmp_path / "whole/%04d.tar", samples(4000), maxcount=50)
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")
