from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from energon.errors import FormatError, TruncatedError
from energon.formats.tar.scan import iter_members
from energon.formats.tar.writer import END, padded
from energon.formats.tar.writer import _record as record
from tests.bounded import run_bounded

ROOT = Path(__file__).parents[2]


def archive(entries, tar_format=tarfile.USTAR_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as file:
        for name, kind, content, mtime in entries:
            info = tarfile.TarInfo(name)
            info.mtime = mtime
            if kind == "folder":
                info.type = tarfile.DIRTYPE
            elif kind == "link":
                info.type, info.linkname = tarfile.SYMTYPE, "elsewhere"
            else:
                info.size = len(content)
            file.addfile(info, io.BytesIO(content) if kind == "file" else None)
    return buffer.getvalue()


def with_checksum(data):
    """Make the first header of `data` valid again."""
    header = bytearray(data[:512])
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(data[512:])


def found_in(data, **settings_):
    def read(offset, size):
        return data[offset : offset + size]

    return list(iter_members(read, len(data), origin="test.tar", **settings_))


def contents(data):
    return [(m.name, data[m.offset : m.offset + m.size]) for m in found_in(data)]


def test_archives_that_were_joined_are_read_to_the_end():
    first = archive([("a.txt", "file", b"one", 0)])
    second = archive([("b.txt", "file", b"two", 0)])
    assert contents(first + second) == [("a.txt", b"one"), ("b.txt", b"two")]


def test_every_cut_is_noticed():
    data = archive([(f"{n}.txt", "file", bytes(700), 1.5) for n in range(3)], tarfile.PAX_FORMAT)
    end = found_in(data)[-1].offset + 1024
    for size in (*range(1, end, 31), *range(512, end, 512), end - 1, end):
        with pytest.raises(TruncatedError, match=r"test\.tar"):
            found_in(data[:size])


def test_a_cut_between_members_is_forgiven_where_the_index_is_elsewhere():
    data = archive([(f"{n}.txt", "file", b"x", 0) for n in range(3)])
    assert len(found_in(data[:2048], strict=False)) == 2


def test_sizes_beyond_eight_gigabytes_are_read():
    data = bytearray(archive([("big.bin", "file", b"x", 0)]))
    data[124:136] = b"\x80" + (9 << 30).to_bytes(11, "big")
    with pytest.raises(TruncatedError, match="9663676416 bytes"):
        found_in(with_checksum(data))


def test_checksums_of_signed_bytes_are_known():
    data = bytearray(archive([("ä.txt", "file", b"x", 0)], tarfile.GNU_FORMAT))
    header = bytearray(data[:512])
    header[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(byte - 256 * (byte > 127) for byte in header)
    assert [m.name for m in found_in(bytes(data))] == ["ä.txt"]


def pax(records, size, name="a.txt"):
    """A member after an extended header with these bytes."""
    extended = tarfile.TarInfo("x")
    extended.type, extended.size = tarfile.XHDTYPE, len(records)
    member = tarfile.TarInfo(name)
    member.size = size
    return (
        extended.tobuf(tarfile.USTAR_FORMAT)
        + padded(records)
        + member.tobuf(tarfile.USTAR_FORMAT)
        + padded(b"x" * size)
        + END
    )


@pytest.mark.parametrize(
    "field",
    [
        b"-0000001000\0",
        b"+0000001000\0",
        b"0000_001000\0",
        b"0x000001000\0",
        b"00000001000x",
        b"0 000001000\0",
        b"99999999999\0",
        b"\xff" * 12,
        b"\xff" + bytes(11),
    ],
)
def test_a_size_that_is_no_number_of_bytes_is_refused(field):
    data = bytearray(archive([("a.txt", "file", b"x", 0)]))
    data[124:136] = field
    with pytest.raises(FormatError, match="no tar header at byte 0"):
        found_in(with_checksum(data))


@pytest.mark.parametrize("size", [b"", b"-1", b"+1", b"1_0", b" 1", b"0x1", b"1e3", b"9" * 5000])
def test_a_pax_size_that_is_no_number_of_bytes_is_refused(size):
    with pytest.raises(FormatError, match="malformed PAX header before byte"):
        found_in(pax(record(b"size", size), 1))


@pytest.mark.parametrize(
    "records",
    [
        b"99 path=a\n",
        b"0 path=a\n",
        b"-9 path=a\n",
        b"09 path=a\n",
        b"9 path=ab",
        b"path=a.txt\n",
        b"9" * 5000 + b" path=a\n",
        b"8 path\n9 path=a\n",
        b"5 a=\n" * 100_001 + b"9 path=a\n",
        record(b"path", b"a.txt\0.jpg"),
    ],
)
def test_malformed_pax_records_are_refused(records):
    with pytest.raises(FormatError, match="malformed PAX header before byte"):
        found_in(pax(records, 1))


@pytest.mark.slow
def test_the_time_for_pax_records_does_not_grow_with_the_square_of_their_number():
    done = run_bounded(
        """
import sys
sys.path.insert(0, sys.argv[1])
from tests.formats.test_tar import found_in, pax, record
from energon.limits import TAR_RECORDS
records = record(b"comment", b"x" * 130) * (TAR_RECORDS.default - 1) + record(b"path", b"b.txt")
print(found_in(pax(records, 1))[0].name)
""",
        ROOT,
        cpu_seconds=20,
    )
    assert done.stdout == "b.txt\n", done


def test_records_of_which_nothing_matters_are_not_looked_at():
    (member,) = found_in(pax(b"30 mtime=1.5\n", 1))
    assert member.name == "a.txt"
