from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import FormatError, TruncatedError
from energon.formats.tar import iter_members, split_name

letters = st.characters(exclude_characters="/\0", exclude_categories=["Cs"])
component = st.text(letters, min_size=1, max_size=120).filter(lambda s: s not in (".", ".."))
member_names = st.lists(component, min_size=1, max_size=3).map("/".join)
members = st.lists(
    st.tuples(
        member_names,
        st.sampled_from(["file", "file", "file", "folder", "link"]),
        st.binary(max_size=1500),
        st.floats(0, 2**31, allow_nan=False),
    ),
    max_size=8,
)


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


@given(members, st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
@settings(max_examples=150, deadline=None)
def test_finds_what_the_standard_library_finds(entries, tar_format):
    data = archive(entries, tar_format)
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        expected = [
            (info.name, file.extractfile(info).read(), info.offset, info.offset_data)
            for info in file
            if info.isreg()
        ]
    assert [
        (m.name, data[m.offset : m.offset + m.size], m.header_offset, m.offset)
        for m in found_in(data)
    ] == expected


def test_archives_that_were_joined_are_read_to_the_end():
    first = archive([("a.txt", "file", b"one", 0)])
    second = archive([("b.txt", "file", b"two", 0)])
    assert contents(first + second) == [("a.txt", b"one"), ("b.txt", b"two")]


def test_every_cut_is_noticed():
    data = archive([(f"{n}.txt", "file", bytes(700), 1.5) for n in range(3)], tarfile.PAX_FORMAT)
    end = found_in(data)[-1].offset + 1024
    for size in range(1, end + 1):
        with pytest.raises(TruncatedError, match=r"test\.tar"):
            found_in(data[:size])


def test_a_cut_between_members_is_forgiven_where_the_index_is_elsewhere():
    data = archive([(f"{n}.txt", "file", b"x", 0) for n in range(3)])
    assert len(found_in(data[:2048], strict=False)) == 2


def test_other_files_are_refused():
    for data in (b"PK\3\4" + bytes(2000), bytes(range(256)) * 8, b"\x1f\x8b" + bytes(3000)):
        with pytest.raises(FormatError, match="no tar header at byte 0"):
            found_in(data)


def test_sizes_beyond_eight_gigabytes_are_read():
    data = bytearray(archive([("big.bin", "file", b"x", 0)]))
    data[124:136] = b"\x80" + (9 << 30).to_bytes(11, "big")
    with pytest.raises(TruncatedError, match="9663676416 bytes"):
        found_in(with_checksum(data))


def test_sparse_files_are_passed_over():
    data = bytearray(archive([("sparse.bin", "file", b"x" * 600, 0), ("a.txt", "file", b"a", 0)]))
    data[156:157] = b"S"
    assert contents(with_checksum(data)) == [("a.txt", b"a")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0001.jpg", ("0001", "jpg")),
        ("a.b/0001.left.jpg", ("a.b/0001", "left.jpg")),
        ("./0001.jpg", ("./0001", "jpg")),
        ("0001.", ("0001", "")),
        ("README", None),
        (".hidden.txt", None),
        ("dir/.hidden", None),
        ("__meta__/a.txt", None),
        ("__meta__", None),
        ("_a.txt", ("_a", "txt")),
        ("__a.txt", ("__a", "txt")),
    ],
)
def test_names_are_split_at_the_first_dot_of_the_base_name(name, expected):
    assert split_name(name) == expected


def test_checksums_of_signed_bytes_are_known():
    data = bytearray(archive([("ä.txt", "file", b"x", 0)], tarfile.GNU_FORMAT))
    header = bytearray(data[:512])
    header[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(byte - 256 * (byte > 127) for byte in header)
    assert [m.name for m in found_in(bytes(data))] == ["ä.txt"]
