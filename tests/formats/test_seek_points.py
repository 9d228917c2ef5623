"""Compressed files are entered at their points."""

from __future__ import annotations

import gzip
import io
import random
import subprocess
from contextlib import suppress

import numpy as np
import pytest
import zstandard

from energon.errors import FormatError, ShardChangedError
from energon.formats import compressed
from energon.formats.compressed import LongFrameError, SeekPoints, unpacked_blocks

RANDOM = random.Random(0)
WORDS = ["".join(RANDOM.choices("abcdefghijklmnop", k=RANDOM.randint(2, 9))) for _ in range(999)]
TEXT = "\n".join(" ".join(RANDOM.choices(WORDS, k=40)) for _ in range(4000)).encode()


@pytest.fixture(autouse=True)
def close_points(monkeypatch):
    monkeypatch.setattr(compressed, "SPACING_BYTES", 64 << 10)


def members(pack, content, size):
    return b"".join(pack(content[low : low + size]) for low in range(0, len(content), size))


def named(content):
    """A member whose header has a name, which other files of the test have not."""
    buffer = io.BytesIO()
    with gzip.GzipFile("lines.jsonl", "wb", fileobj=buffer) as file:
        file.write(content)
    return buffer.getvalue()


def zstd(content):
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


SKIPPED = b"\x5e\x2a\x4d\x18" + (9).to_bytes(4, "little") + b"seektable"
ENTERED = {
    "members": (TEXT, members(gzip.compress, TEXT, 300_000)),
    "short members": (TEXT, members(gzip.compress, TEXT, 10_000)),
    "named": (TEXT * 2, named(TEXT) + b"\0" * 512 + named(TEXT) + b"\0" * 70_000),
    "zstd frames": (TEXT, members(zstd, TEXT, 30_000)),
    "zstd seekable": (TEXT, members(zstd, TEXT, 100_000) + SKIPPED),
    "zstd skipping": (TEXT, SKIPPED + members(lambda x: zstd(x) + SKIPPED, TEXT, 70_000)),
}
SINGLE = {"gzip": (TEXT, gzip.compress(TEXT)), "zstd": (TEXT, zstd(TEXT))}


def scanned(packed, name="x.jsonl.gz", copy=None):
    """The content of a file, and its points."""
    table = io.BytesIO()
    content = b"".join(unpacked_blocks(io.BytesIO(packed), origin=name, table=table, copy=copy))
    return content, SeekPoints.parse(table.getvalue(), size=len(packed), origin=name)


def entered(points, packed, number):
    (low,), (high,) = points.packed_range(np.array([number]))
    return points.unpack(number, packed[low:high])


@pytest.mark.parametrize("name", [*ENTERED, *SINGLE])
def test_content_between_two_points_is_unpacked_alone(name):
    content, packed = (ENTERED | SINGLE)[name]
    copy = io.BytesIO() if name in SINGLE else None
    unpacked, points = scanned(packed, copy=copy)
    assert unpacked == content
    assert len(points) > 1
    assert points.is_copy == (name in SINGLE)
    for number in range(len(points)):
        start, stop = points.content_range(number)
        data = packed if copy is None else copy.getvalue()
        assert entered(points, data, number) == content[start:stop]
    offsets = np.array([0, len(content) // 2, len(content) - 1])
    holding = points.holding(offsets)
    for offset, number in zip(offsets.tolist(), holding.tolist(), strict=True):
        start, stop = points.content_range(number)
        assert start <= offset < stop


@pytest.mark.parametrize(("tool", "ending"), [("gzip", "gz"), ("zstd", "zst")])
def test_files_of_command_line_tools_are_written_in_short_frames_as_advised(
    tmp_path, monkeypatch, tool, ending
):
    monkeypatch.setattr(compressed, "LONG_BYTES", 256 << 10)
    path = tmp_path / f"x.jsonl.{ending}"
    (tmp_path / "x.jsonl").write_bytes(TEXT)
    subprocess.run([tool, "-qk", "x.jsonl"], check=True, cwd=tmp_path)
    with pytest.raises(LongFrameError, match="can only be unpacked together") as caught:
        scanned(path.read_bytes(), str(path))
    command = str(caught.value).split("`")[1].replace("8M", "128K").replace("NEW", "new")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    content, points = scanned((tmp_path / f"new.{ending}").read_bytes())
    assert content == TEXT
    assert len(points) >= len(TEXT) // (256 << 10)


def test_a_frame_may_refer_back_as_far_as_the_command_line_tool_writes_it():
    # A header with a window of 2 GiB, as of `zstd --long=31`, and a block that is not compressed.
    content = TEXT[:1000]
    block = ((len(content) << 3) | 1).to_bytes(3, "little") + content
    packed = b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + block
    unpacked, points = scanned(packed)
    assert unpacked == entered(points, packed, 0) == content


@pytest.mark.parametrize("name", ["short members", "zstd frames"])
@pytest.mark.parametrize("share", [0.00001, 0.3, 0.9999])
def test_a_file_that_is_cut_off_is_an_error(name, share):
    packed = ENTERED[name][1]
    with pytest.raises(FormatError, match=r"x\.jsonl\.gz: (the compressed data end|begins)"):
        scanned(packed[: int(share * len(packed))])


@pytest.mark.parametrize("name", ["members", "zstd seekable"])
def test_a_damaged_file_is_an_error(name):
    _, packed = ENTERED[name]
    _, points = scanned(packed)
    generator = random.Random(1)
    for _ in range(20):
        damaged = bytearray(packed)
        at = generator.randrange(20, len(packed) - 20)
        damaged[at] ^= 1 << generator.randrange(8)
        with pytest.raises(FormatError, match=r"x\.jsonl\.gz: "):
            scanned(bytes(damaged))
    with pytest.raises(FormatError, match="from byte .* on"):
        entered(points, bytes(len(packed)), len(points) - 1)


@pytest.mark.parametrize("data", [b"", b"{}\n{}\n", b"PK\x03\x04"])
def test_other_files_are_refused(data):
    with pytest.raises(FormatError, match="expected a gzip or zstd file"):
        scanned(data)


def test_bytes_behind_the_last_member_are_an_error():
    with pytest.raises(FormatError, match="the compressed data are damaged"):
        scanned(gzip.compress(TEXT) + b"more than ten bytes")


def test_a_table_that_is_damaged_or_of_another_file_is_an_error():
    packed = ENTERED["members"][1]
    table = io.BytesIO()
    list(unpacked_blocks(io.BytesIO(packed), origin="x", table=table))
    data = table.getvalue()

    def parse(data, size=None):
        return SeekPoints.parse(data, size=size or len(packed), origin="x.jsonl.gz")

    with pytest.raises(ShardChangedError, match=r"x\.jsonl\.gz: has 5 bytes, had \d+.*prepare"):
        parse(data, 5)
    for cut in (b"", data[:60], data[:-1], b"NO" + data[2:]):
        with pytest.raises(FormatError, match=r"x\.jsonl\.gz\.points: .*prepare"):
            parse(cut)
    generator = random.Random(2)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        with suppress(FormatError, ShardChangedError):
            points = parse(bytes(damaged))
            for number in range(len(points)):
                entered(points, packed, number)
