from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import FormatError, TruncatedError
from energon.formats.tar import parser as tar_parser
from energon.formats.tar import scan as tar_window
from energon.formats.tar.headers import split_name
from energon.formats.tar.scan import scan_archive, scan_tar
from energon.formats.tar.writer import encode_header, padded
from tests.effort import mixed

NAMES = ["jpg", "txt", "seg.png", "a", "json"]
keys = st.text("ab_/ä.0", min_size=1, max_size=12).map(lambda key: f"k{key}z")
contents = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 4000).map(lambda size: b"u" * size),
    st.just(encode_header("inner.txt", 3) + padded(b"abc")),
)
entries = st.lists(
    st.tuples(keys, st.sampled_from([*NAMES, "x" * 120]), contents, st.sampled_from("ffffffdl")),
    max_size=60,
)


def archive(members, tar_format=tarfile.USTAR_FORMAT, mtime=0.0):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as file:
        for key, part, content, kind in members:
            info = tarfile.TarInfo(f"{key}.{part}" if kind != "d" else key)
            info.mtime = mtime
            if kind == "d":
                info.type = tarfile.DIRTYPE
            elif kind == "l":
                info.type, info.linkname = tarfile.SYMTYPE, "elsewhere"
            else:
                info.size = len(content)
            file.addfile(info, io.BytesIO(content) if kind == "f" else None)
    return buffer.getvalue()


def scanned(data, **options):
    def read_into(offset, buffer):
        found = data[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    return scan_archive(read_into, len(data), origin="test.tar", **options)


def samples_in(data):
    """What the standard library finds, grouped by the rules, as a list of samples."""
    samples = []
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        last = None
        for info in file:
            if not info.isreg() or split_name(info.name) is None:
                continue
            key, part = split_name(info.name)
            if key != last:
                samples.append((key, info.offset, []))
                last = key
            samples[-1][2].append((part, info.offset_data, info.size))
    return samples


def samples_of(scan):
    first = scan.first_part.tolist()
    parts = list(
        zip(
            [scan.part_names[name] for name in scan.part_name.tolist()],
            scan.part_offset.tolist(),
            scan.part_size.tolist(),
            strict=True,
        )
    )
    return [
        (key, offset, parts[first[n] : first[n + 1]])
        for n, (key, offset) in enumerate(
            zip(scan.keys, scan.sample_offset.tolist()[:-1], strict=True)
        )
    ]


@given(
    entries,
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.sampled_from([0.0, 1700000000.25]),
    st.integers(1, 64),
)
@settings(max_examples=150, deadline=None)
def test_finds_the_samples_that_the_standard_library_finds(members, tar_format, mtime, shortest):
    data = archive(members, tar_format, mtime)
    before = tar_parser.MIN_RUN_BLOCKS, tar_parser.MIN_RUN_MEMBERS
    tar_parser.MIN_RUN_BLOCKS, tar_parser.MIN_RUN_MEMBERS = shortest, max(1, shortest // 8)
    try:
        assert samples_of(scanned(data)) == samples_in(data)
    finally:
        tar_parser.MIN_RUN_BLOCKS, tar_parser.MIN_RUN_MEMBERS = before


@pytest.mark.parametrize(
    ("tar_format", "window"),
    mixed([tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT], [4096, 10240, 1 << 20]),
)
def test_windows_of_any_size_find_the_same(monkeypatch, window, tar_format):
    members = [
        (f"{n // 3:05}", f"{n % 3}.bin", bytes([n % 251]) * (n * 97 % 5000), "f")
        for n in range(600)
    ]
    data = archive(members, tar_format, 0.5 if tar_format == tarfile.PAX_FORMAT else 0)
    for name in ("MAX_WINDOW_BYTES", "FIRST_WINDOW_BYTES"):
        monkeypatch.setattr(tar_window, name, window)
    monkeypatch.setattr(tar_window, "JUMP_BYTES", 1024)
    scan = scanned(data)
    assert samples_of(scan) == samples_in(data)
    assert (scan.num_samples, len(scan.part_size)) == (200, 600)


def test_members_that_are_no_files_are_reported(caplog):
    members = [("a", "txt", b"a", "f"), ("b", "txt", b"", "l"), ("c", "txt", b"", "l")]
    assert samples_of(scanned(archive([*members, ("d", "", b"", "d")])))[0][0] == "a"
    (record,) = caplog.records
    assert "test.tar: skipped 2 members, the first of them 'b.txt': links" in record.getMessage()
    caplog.clear()
    scanned(archive([members[0], ("d", "", b"", "d")]))
    assert not caplog.records


@pytest.mark.slow
def test_every_flipped_bit_of_a_header_is_noticed():
    data = bytearray(archive([(f"{n:03}", "txt", b"x" * 600, "f") for n in range(100)]))
    position = scanned(bytes(data)).sample_offset[50]
    for at in [*range(0, 8), *range(124, 135), 148, 150, 156, 300]:
        damaged = bytearray(data)
        damaged[position + at] ^= 1
        with pytest.raises(FormatError, match=r"test\.tar.*byte"):
            scanned(bytes(damaged))


def test_every_cut_is_noticed():
    data = archive([(f"{n:03}", "txt", b"x" * 700, "f") for n in range(40)])
    end = int(scanned(data).sample_offset[-1])
    for size in [*range(1, 3000, 100), *range(end - 2000, end + 1, 100), end - 1, end]:
        with pytest.raises(TruncatedError, match=r"test\.tar"):
            scanned(data[:size])


def test_content_of_large_members_is_not_read():
    members = [(f"{n:03}", "bin", bytes(200_000), "f") for n in range(50)]
    data = archive(members)
    read = 0

    def read_into(offset, buffer):
        nonlocal read
        read += len(buffer)
        found = data[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    assert scan_archive(read_into, len(data), origin="x").num_samples == 50
    assert read < 1 << 20


@pytest.mark.parametrize(
    ("compress", "name"), [(gzip.compress, "gz"), (bz2.compress, "bz2"), (lzma.compress, "xz")]
)
def test_a_compressed_archive_named_tar_is_called_compressed(tmp_path, compress, name):
    (tmp_path / "x.tar").write_bytes(
        compress(archive([("a", "bin", Random(0).randbytes(2000), "f")]))
    )
    with pytest.raises(FormatError, match=rf"x\.tar: is compressed \({name}\), expected a plain"):
        scan_tar(tmp_path / "x.tar")
