"""Compressed files are entered at their points, whatever wrote them."""

from __future__ import annotations

import gzip
import io
import random
import subprocess
import zlib
from contextlib import suppress

import numpy as np
import pytest
import zstandard

from energon.errors import ConfigError, FormatError, ShardChangedError, TruncatedError
from energon.formats import seek_points
from energon.formats.seek_points import PointFinder, SeekPoints

RANDOM = random.Random(0)
WORDS = ["".join(RANDOM.choices("abcdefghijklmnop", k=RANDOM.randint(2, 9))) for _ in range(999)]
TEXT = "\n".join(" ".join(RANDOM.choices(WORDS, k=40)) for _ in range(4000)).encode()
NOISE = RANDOM.randbytes(1 << 20)


@pytest.fixture(autouse=True)
def close_points(monkeypatch):
    monkeypatch.setattr(seek_points, "SPACING_BYTES", 64 << 10)


def deflated(content, *, level=6, strategy=zlib.Z_DEFAULT_STRATEGY, flush_every=None):
    """A gzip file of one member, made by zlib with these settings."""
    packer = zlib.compressobj(level, zlib.DEFLATED, 31, 8, strategy)
    step = flush_every or len(content)
    pieces = []
    for low in range(0, len(content), step):
        pieces.append(packer.compress(content[low : low + step]))
        if flush_every:
            pieces.append(packer.flush(zlib.Z_SYNC_FLUSH))
    return b"".join([*pieces, packer.flush()])


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
FILES = {
    "fast": (TEXT, deflated(TEXT, level=1)),
    "default": (TEXT, deflated(TEXT)),
    "best": (TEXT, deflated(TEXT, level=9)),
    "stored": (NOISE, deflated(NOISE, level=0)),
    "noise": (NOISE, deflated(NOISE)),
    "huffman": (TEXT, deflated(TEXT, strategy=zlib.Z_HUFFMAN_ONLY)),
    "flushed": (TEXT, deflated(TEXT, flush_every=50_000)),
    "mixed": (TEXT + NOISE + TEXT, deflated(TEXT + NOISE + TEXT)),
    "blocks": (TEXT, members(gzip.compress, TEXT, 10_000)),
    "members": (TEXT, members(gzip.compress, TEXT, 300_000)),
    "named": (TEXT * 2, named(TEXT) + b"\0" * 512 + named(TEXT) + b"\0" * 70_000),
    "zstd frames": (TEXT, members(zstd, TEXT, 30_000)),
    "zstd seekable": (TEXT, members(zstd, TEXT, 100_000) + SKIPPED),
    "zstd skipping": (TEXT, SKIPPED + members(lambda x: zstd(x) + SKIPPED, TEXT, 70_000)),
}


def scanned(packed, name="x.jsonl.gz"):
    """The content of a file, and its points."""
    table = io.BytesIO()
    content = b"".join(PointFinder(table, origin=name).blocks(io.BytesIO(packed)))
    return content, SeekPoints.parse(table.getvalue(), size=len(packed), origin=name)


def entered(points, packed, number):
    (low,), (high,) = points.packed_range(np.array([number]))
    return points.unpack(number, packed[low:high])


@pytest.mark.parametrize("name", FILES)
def test_what_lies_between_two_points_is_unpacked_alone(name):
    content, packed = FILES[name]
    found, points = scanned(packed)
    assert found == content
    assert len(points) >= len(content) // 300_000
    for number in range(len(points)):
        start, stop = points.content_range(number)
        assert entered(points, packed, number) == content[start:stop]
    offsets = np.array([0, len(content) // 2, len(content) - 1])
    holding = points.holding(offsets)
    for offset, number in zip(offsets.tolist(), holding.tolist(), strict=True):
        start, stop = points.content_range(number)
        assert start <= offset < stop


def test_points_are_at_every_bit_of_a_byte():
    _, points = scanned(deflated(TEXT * 4, level=1))
    assert set((points.bits % 8).tolist()) == set(range(8))


def test_files_of_command_line_tools_are_entered(tmp_path):
    (tmp_path / "x").write_bytes(TEXT)
    for command in (["gzip", "-c"], ["zstd", "-qc"]):
        packed = subprocess.run([*command, tmp_path / "x"], capture_output=True, check=True).stdout
        assert scanned(packed)[0] == TEXT


def test_the_advice_for_files_of_one_long_frame_works(tmp_path, monkeypatch):
    monkeypatch.setattr(seek_points, "POINT_GAP_BYTES", 256 << 10)
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(zstd(TEXT))
    with pytest.raises(ConfigError, match="a frame holds more than 0 MiB") as caught:
        scanned(path.read_bytes(), str(path))
    command = str(caught.value).split("`")[1].replace("8M", "128K").replace("NEW", "new")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert scanned((tmp_path / "new.zst").read_bytes())[0] == TEXT


def test_a_frame_may_refer_back_as_far_as_the_command_line_tool_writes_it():
    # A header with a window of 2 GiB, as of `zstd --long=31`, and a block that is not compressed.
    content = TEXT[:1000]
    block = ((len(content) << 3) | 1).to_bytes(3, "little") + content
    packed = b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + block
    found, points = scanned(packed)
    assert found == entered(points, packed, 0) == content


def test_deflated_files_without_blocks_to_enter_are_refused(monkeypatch):
    monkeypatch.setattr(seek_points, "POINT_GAP_BYTES", 256 << 10)
    with pytest.raises(ConfigError, match="no block can be found"):
        scanned(deflated(TEXT, strategy=zlib.Z_FIXED))


@pytest.mark.parametrize("name", ["default", "blocks", "zstd frames"])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.9999])
def test_a_file_that_is_cut_off_is_an_error(name, share):
    packed = FILES[name][1]
    with pytest.raises((TruncatedError, FormatError), match=r"x\.jsonl\.gz: (ends within|begins)"):
        scanned(packed[: int(share * len(packed))])


@pytest.mark.parametrize("name", ["default", "members", "zstd seekable"])
def test_a_damaged_file_is_an_error(name):
    _, packed = FILES[name]
    _, points = scanned(packed)
    generator = random.Random(1)
    for _ in range(20):
        damaged = bytearray(packed)
        at = generator.randrange(20, len(packed) - 20)
        damaged[at] ^= 1 << generator.randrange(8)
        with pytest.raises((FormatError, TruncatedError), match=r"x\.jsonl\.gz: "):
            scanned(bytes(damaged))
    with pytest.raises(FormatError, match="from byte .* on"):
        entered(points, bytes(len(packed)), len(points) - 1)


@pytest.mark.parametrize("data", [b"", b"{}\n{}\n", b"PK\x03\x04"])
def test_other_files_are_refused(data):
    with pytest.raises(FormatError, match="expected a gzip or zstd file"):
        scanned(data)


def test_bytes_behind_the_last_member_are_an_error():
    with pytest.raises(FormatError, match="expected a gzip header"):
        scanned(deflated(TEXT) + b"more than ten bytes")


def test_a_table_that_is_damaged_or_of_another_file_is_an_error():
    content, packed = FILES["default"]
    table = io.BytesIO()
    assert b"".join(PointFinder(table, origin="x").blocks(io.BytesIO(packed))) == content
    data = table.getvalue()

    def parse(data, size=None):
        return SeekPoints.parse(data, size=size or len(packed), origin="x.jsonl.gz")

    with pytest.raises(ShardChangedError, match=r"x\.jsonl\.gz: has 5 bytes, had \d+.*prepare"):
        parse(data, 5)
    for cut in (b"", data[:100], b"NO" + data[2:]):
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
