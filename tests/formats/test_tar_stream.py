from __future__ import annotations

import io
import re
import subprocess
import tarfile
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import DuplicateSampleKeyError, EnergonError, FormatError, TruncatedError
from energon.formats.tar import parser as tar_parser
from energon.formats.tar import stream
from energon.formats.tar.headers import RECORD_BYTES, split_name
from energon.formats.tar.parser import SampleParser
from energon.formats.tar.scan import iter_members, scan_archive
from energon.formats.tar.stream import StreamReader
from tests.effort import mixed
from tests.webdataset.shards import members_of, numbered, tar_bytes

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
names = st.text("abé./_ B", min_size=1, max_size=12).filter(
    lambda name: not name.endswith("/") and name.strip("/. ") != ""
)


class Trickle(io.BytesIO):
    """Yields few bytes at a time, as pipes do."""

    def __init__(self, data: bytes, step: int) -> None:
        super().__init__(data)
        self.step = step

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(self.step, self.step if size is None else size))


class Unseekable(io.BytesIO):
    def seekable(self) -> bool:
        return False


def read(data, *, step=1 << 30, position=0, **options):
    stream = Trickle(data[position:], step)
    reader = StreamReader(stream, SampleParser("x.tar", position=position, **options))
    found = []
    while (block := reader.next_block()) is not None:
        found += block
    return found


def expected(data):
    """What the tar library finds, grouped by the rule of the format."""
    samples = []
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            parts = split_name(member.name)
            if not member.isreg() or parts is None:
                continue
            key, field = parts
            if not samples or samples[-1]["__key__"] != key:
                samples.append({"__key__": key})
            samples[-1][field.lower()] = tar.extractfile(member).read()
    return samples


@settings(deadline=None)
@given(
    st.lists(st.tuples(names, st.binary(max_size=1500)), max_size=12),
    st.sampled_from(FORMATS),
    st.sampled_from([1, 7, 512, 1000, 1 << 30]),
    st.sampled_from([600, 1 << 20]),
)
def test_finds_what_the_tar_library_finds(members, format, step, large):
    # Fields are compared in lower case, and a field twice is an error.
    unique = {}
    for name, content in members:
        key, field = split_name(name) or (name, "")
        unique.setdefault((key, field.lower()), (name, content))
    data = tar_bytes(unique.values(), format=format)
    before = tar_parser.LARGE_MEMBER_BYTES
    tar_parser.LARGE_MEMBER_BYTES = large
    try:
        found = read(data, step=step)
    finally:
        tar_parser.LARGE_MEMBER_BYTES = before
    assert found == expected(data)


@given(
    st.lists(st.integers(0, 700), min_size=8, max_size=40),
    st.lists(st.sampled_from(["txt", "JSON", "seg.png", "__url__"]), min_size=1, unique=True),
    st.sampled_from([700, 9000, 1 << 30]),
    st.sampled_from(["", "d.x/"]),
    st.integers(0, 40),
    st.booleans(),
)
def test_runs_hold_the_samples_that_the_tar_library_finds(sizes, parts, step, folder, odd, adds):
    """Samples are alike except for one, which has another part, or its parts in reverse."""
    members = []
    for number, size in enumerate(sizes):
        others = [*parts, "odd"] if adds else parts[::-1]
        for part in others if number == odd else parts:
            members.append((f"{folder}{number:03}.{part}", f"{part}{number}".encode() * size))
    data = tar_bytes(members)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar_parser, "MIN_RUN_BLOCKS", 4)
        assert read(data, step=step) == expected(data)


def test_a_field_that_is_there_twice_is_refused_in_the_middle_of_a_run():
    messages = {
        "TXT": r"'001'.* second time at byte",
        "__url__": r"'001'.* '__url__' at byte \d+, a name that every sample has",
    }
    for other, message in messages.items():
        twice = ["txt", other]
        members = [(f"{number:03}.{part}", b"") for number in range(200) for part in twice]
        data = tar_bytes([("000.a", b""), *members[2:]])
        with pytest.raises(FormatError, match=message):
            read(data, common={"__url__": "x.tar"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "format"),
    mixed([{}, {"lowercase": False}, {"common": {"__url__": "x"}}], [*FORMATS]),
)
def test_many_small_members_give_the_same_samples_as_each_alone(monkeypatch, format, options):
    random = Random(0)
    members = []
    for number in range(300):
        folder = random.choice(["", "d.x/", "é/", "__hidden__/"])
        for part in random.sample(["txt", "JSON", "seg.png", "", "cls"], random.randint(1, 3)):
            members.append((f"{folder}{number}.{part}", random.randbytes(number)))
        if number in (50, 290):
            members += [
                ("y" * 60 + "/" + "z" * 60 + f"{number}.txt", b"long"),
                ("no extension", b""),
            ]
    data = tar_bytes(members, format=format)
    monkeypatch.setattr(tar_parser, "MIN_RUN_BLOCKS", 1 << 30)
    singles = read(data, **options)
    assert len(singles) > 200
    monkeypatch.setattr(tar_parser, "MIN_RUN_BLOCKS", 8)
    for step in (1 << 30, 20_000):
        reader = StreamReader(Trickle(data, step), SampleParser("x.tar", **options))
        found = []
        while (block := reader.next_block()) is not None:
            found += block
            rest = read(data, position=reader.block_position, **options)
            assert block + singles[len(found) :] == rest
        assert found == singles


@pytest.mark.parametrize("format", FORMATS)
def test_reads_names_of_any_length(format):
    limit = 100 if format == tarfile.USTAR_FORMAT else 400
    members = [("x" * length + ".txt", b"%d" % length) for length in range(90, limit - 4)]
    members += [("d" * 60 + "/" + "e" * 60 + ".txt", b"prefix")]
    data = tar_bytes(members, format=format)
    assert read(data) == expected(data)
    assert len(read(data)) == len(members)


@pytest.mark.parametrize("step", [1 << 30, 700])
def test_an_archive_that_is_cut_anywhere_is_an_error_and_gives_no_half_sample(step):
    data = tar_bytes(members_of(numbered(range(4))))
    whole = read(data)
    end = 4 * 2 * 1024
    for cut in range(0, end + 1, 64):
        parser = SampleParser("x.tar")
        reader = StreamReader(Trickle(data[:cut], step), parser)
        found = []
        with pytest.raises(TruncatedError, match=r"x\.tar"):
            found.extend(sample for block in iter(reader.next_block, None) for sample in block)
        assert found == whole[: len(found)]
    assert read(data[: end + 512]) == whole


@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        (1 << 33, TruncatedError, "8589932544 bytes too early"),
        (1 << 60, FormatError, "'a' has a field 'txt' of 1152921504606846976 bytes at byte 0"),
    ],
)
def test_a_size_that_cannot_be_takes_no_memory(size, error, words):
    member = tarfile.TarInfo("a.txt")
    member.size = size
    asked = []

    class Stream(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size)
            return super().read(size)

    source = Stream(member.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(error, match=words):
        StreamReader(source, SampleParser("x.tar")).next_block()
    assert max(asked) <= stream.MAX_STREAM_READ_BYTES


@pytest.mark.parametrize("step", [1 << 30, 700])
@pytest.mark.parametrize("damage", [b"y" * 512, b"a"])
def test_complete_samples_before_damage_come_ahead_of_the_error(step, damage):
    data = tar_bytes(members_of(numbered(range(4))))
    whole = read(data)
    for member in range(8):
        at = 1024 * member
        damaged = data[:at] + damage + data[at + len(damage) :]
        reader = StreamReader(Trickle(damaged, step), SampleParser("x.tar"))
        found = []
        with pytest.raises(FormatError, match=rf"byte {at}\b"):
            found.extend(sample for block in iter(reader.next_block, None) for sample in block)
        assert found == whole[: len(found)]
        # A sample is complete when the next one has begun.
        assert len(found) == max(0, member - 1) // 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 3000, 60_000])
@pytest.mark.parametrize("options", [{}, {"select": bool}])
def test_every_flipped_bit_of_a_header_is_noticed(size, options):
    data = bytearray(tar_bytes([(f"{n:03}.bin", b"x" * size) for n in range(40)]))
    whole = len(read(bytes(data)))
    stride = 512 + -(-size // 512) * 512
    for position in (0, stride, 20 * stride, 39 * stride):
        for at in [
            *range(0, 12),
            99,
            103,
            111,
            124,
            130,
            134,
            140,
            *range(148, 154),
            200,
            345,
            511,
        ]:
            for bit in (1, 2, 128):
                data[position + at] ^= bit
                with pytest.raises(FormatError, match=rf"x\.tar: .* byte {position} "):
                    read(bytes(data), **options)
                data[position + at] ^= bit
    assert len(read(bytes(data))) == whole


def test_an_empty_file_is_an_error_and_an_empty_archive_is_not():
    with pytest.raises(TruncatedError):
        read(b"")
    assert read(bytes(10240)) == []


def test_archives_joined_with_cat_are_read_through():
    one, two = (tar_bytes(members_of(numbered([n]))) for n in (1, 2))
    assert [s["__key__"] for s in read(one + two)] == ["000001", "000002"]
    # The same key on both sides of a border is two samples.
    assert len(read(one + one)) == 2


@pytest.mark.parametrize("options", [{}, {"select": bool}])
@pytest.mark.parametrize("at_once", [1, 128])
@pytest.mark.parametrize(
    ("names", "second"), [(["a.jpg", "a.JPG"], 2048), (["a.jpg", "a.txt", "a.jpg", "a.txt"], 3072)]
)
def test_a_field_twice_in_a_sample_is_an_error_that_names_it(
    options, at_once, names, second, monkeypatch
):
    """Also where they are two neighbouring samples with one key, which are not merged."""
    monkeypatch.setattr(tar_parser, "MIN_RUN_BLOCKS", at_once)
    with pytest.raises(
        DuplicateSampleKeyError,
        match=r"x\.tar: sample 'a', which begins at byte 1024, has the field 'jpg' twice, the "
        rf"second time at byte {second}; .*--fix-duplicates",
    ) as caught:
        read(tar_bytes([("0.txt", b"0"), *((name, b"1") for name in names)]), **options)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("step", [700, 1 << 30])
def test_sizes_are_given_without_reading_contents(tmp_path, step):
    members = [("a.x", b"1"), ("a.y", b"2" * 3000), ("b.x", b"3" * (3 << 20)), ("c.x", b"")]
    data = tar_bytes(members)
    expected = [
        {"__key__": "a", "x": 1, "y": 3000},
        {"__key__": "b", "x": 3 << 20},
        {"__key__": "c", "x": 0},
    ]
    assert read(data, sizes=True, step=step) == expected
    for cut in (len(data) // 2, 4096, len(data) - 10240):
        with pytest.raises(TruncatedError):
            read(data[:cut], sizes=True, step=step)


def test_select_and_rename_decide_by_name():
    data = tar_bytes([("a.x", b"1"), ("a.y", b"2" * 3000), ("b.y", b"3")])
    assert read(data, select=lambda name: name.endswith(".x")) == [{"__key__": "a", "x": b"1"}]
    renamed = read(data, rename=lambda name: name.replace(".y", ".x.y"))
    assert renamed[0] == {"__key__": "a", "x": b"1", "x.y": b"2" * 3000}


@pytest.mark.parametrize("kind", [io.BytesIO, Unseekable])
def test_every_sample_can_be_read_from_its_own_position(monkeypatch, kind):
    data = tar_bytes(
        [("x" * 150 + f"{n}.txt", b"%d" % n) for n in range(9)], format=tarfile.GNU_FORMAT
    )
    whole = read(data)
    monkeypatch.setattr(stream, "WINDOW_BYTES", 2048)
    monkeypatch.setattr(stream, "MAX_STREAM_WINDOW_BYTES", 4096)
    reader = StreamReader(kind(data), SampleParser("x.tar"))
    found = 0
    while (block := reader.next_block()) is not None:
        assert read(data, position=reader.block_position) == whole[found:]
        found += len(block)
    assert found == 9


def test_links_and_folders_are_no_parts():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
            member = tarfile.TarInfo("a.txt")
            member.type, member.linkname = kind, "b"
            tar.addfile(member)
        tar.addfile(tarfile.TarInfo("a.cls"))
    assert read(file.getvalue()) == [{"__key__": "a", "cls": b""}]


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("d.x/a.seg.JPG", {"__key__": "d.x/a", "seg.jpg": b""}),
        ("./a.jpg", {"__key__": "./a", "jpg": b""}),
        ("a..b", {"__key__": "a", ".b": b""}),
        ("a.", {"__key__": "a", "": b""}),
        ("__x__.json", {"__key__": "__x__", "json": b""}),
        ("__x__/a.json", None),
        (".a.jpg", None),
        ("d/.a.jpg", None),
        ("noext", None),
        ("d/.hidden", None),
        ("__x__", None),
        ("_a.txt", {"__key__": "_a", "txt": b""}),
        ("__a.txt", {"__key__": "__a", "txt": b""}),
    ],
)
def test_keys_end_at_the_first_dot_of_the_base_name(name, sample):
    assert read(tar_bytes([(name, b"")])) == ([sample] if sample else [])


@pytest.mark.parametrize(("format", "step"), mixed(["gnu", "pax"], [1, 512, 1 << 30]))
def test_sparse_files_are_passed_over_and_counted(tmp_path, format, step):
    for name in ("a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    with open(tmp_path / "b.bin", "wb") as file:
        for hole in range(40):  # more than the first header has room for
            file.seek(hole << 16)
            file.write(b"x" * 4096)
    names = ["a.txt", "b.bin", "c.txt"]
    command = ["tar", "--sparse", f"--format={format}", "-cf", "x.tar", *names]
    subprocess.run(command, cwd=tmp_path, check=True)
    data = (tmp_path / "x.tar").read_bytes()
    assert len(data) < 400_000
    parser = SampleParser("x.tar")
    reader = StreamReader(Trickle(data, step), parser)
    found = []
    while (block := reader.next_block()) is not None:
        found += block
    assert found == [{"__key__": "a", "txt": b"a"}, {"__key__": "c", "txt": b"c"}]
    assert re.match(
        r"x\.tar: skipped 1 member, the first of them '\S*b\.bin': links", parser.warnings[0]
    )


def scanned(data):
    def read_into(offset, buffer):
        piece = data[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    return scan_archive(read_into, len(data), origin="x.tar").num_samples


@pytest.mark.parametrize("count", [lambda data: len(read(data)), scanned], ids=["stream", "scan"])
@pytest.mark.parametrize("kept", [1, 43, 60])
def test_many_zeros_after_the_end_marker_are_a_warning_with_their_number(caplog, count, kept):
    samples = [(f"{number:02}.txt", b"x" * 700) for number in range(60)]
    whole = tar_bytes(samples).rstrip(b"\0")
    end = kept * (512 + 1024)
    for zeros, is_expected in (
        (RECORD_BYTES, True),
        (RECORD_BYTES - 511, True),
        (RECORD_BYTES + 1, False),
        (RECORD_BYTES + 512, False),
        (1_024_000, False),
    ):
        caplog.clear()
        assert count(whole.ljust(60 * 1536, b"\0")[:end] + bytes(1024 + zeros)) == kept
        message = f"x.tar: {zeros:,} bytes of zeros follow the end marker at byte {end}, expected"
        assert [message in record.getMessage() for record in caplog.records] == [True] * (
            not is_expected
        )


@pytest.mark.parametrize("count", [lambda data: len(read(data)), scanned], ids=["stream", "scan"])
@pytest.mark.parametrize("tail", [bytes(100) + b"x", b"x", bytes(511) + b"x"])
def test_other_bytes_after_the_end_marker_are_damage(count, tail):
    with pytest.raises(FormatError, match=r"x\.tar: "):
        count(tar_bytes([("a.txt", b"a")]) + tail)


@pytest.mark.parametrize("count", [lambda data: len(read(data)), scanned], ids=["stream", "scan"])
def test_a_shard_of_zeros_is_an_error_and_an_empty_one_a_warning(caplog, count):
    assert count(bytes(RECORD_BYTES)) == 0
    (record,) = caplog.records
    assert "x.tar: an archive without members" in record.getMessage()
    with pytest.raises(TruncatedError, match=r"x\.tar: has 20480 bytes, all of them zeros"):
        count(bytes(2 * RECORD_BYTES))


def sparse_file(map_blocks):
    """A GNU sparse file without content whose map goes on for many blocks."""
    member = tarfile.TarInfo("b.bin")
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[482] = 1
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    block = bytes(504) + b"\1" + bytes(7)
    return bytes(header) + block * (map_blocks - 1) + bytes(512)


def test_the_map_of_a_sparse_file_is_read_once_however_long_it_is():
    data = tar_bytes([("a.txt", b"a")])[:1024] + sparse_file(3000) + tar_bytes([("c.txt", b"c")])
    parser = SampleParser("x.tar")
    given = 0
    while parser.position < len(data):
        window = data[parser.position : parser.position + parser.needed_bytes]
        given += len(window)
        parser.feed(window)
    parser.finish(len(data), b"")
    assert [sample["__key__"] for sample in parser.samples] == ["a", "c"]
    assert given <= len(data) + 2 * 512  # headers of plain members are seen with their content
    assert re.match(
        r"x\.tar: skipped 1 member, the first of them '\S*b\.bin': links", parser.warnings[0]
    )
    assert read(data) == parser.samples
    assert names_in(data) == ["a.txt", "c.txt"]


def names_in(data):
    """What a scan of the headers finds."""
    members = iter_members(lambda at, size: data[at : at + size], len(data), origin="x.tar")
    return [member.name for member in members]


def verdict_of(function):
    try:
        return function()
    except EnergonError as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("kind", "accepted"), [(b"x", False), (b"X", False), (b"L", False), (b"K", False), (b"g", True)]
)
@pytest.mark.parametrize("behind", [bytes(1024), b""])
def test_scans_and_streams_agree_on_extended_headers_without_a_member(kind, accepted, behind):
    name = tarfile.TarInfo("long")
    name.type, name.size = kind, 20
    payload = b"20 path=somewhere/x\n" if kind in b"xXg" else b"n" * 20
    extended = name.tobuf(tarfile.USTAR_FORMAT) + payload.ljust(512, b"\0")
    data = tar_bytes([("a.txt", b"a")])[:1024] + extended + behind

    streamed, scanned = verdict_of(lambda: read(data)), verdict_of(lambda: names_in(data))
    if accepted and behind:
        assert streamed == [{"__key__": "a", "txt": b"a"}]
        assert scanned == ["a.txt"]
    else:
        assert streamed == scanned
        assert streamed[0] is TruncatedError
    if behind and not accepted:
        assert "the extended header at byte 1024 is followed by the end marker" in streamed[1]
    # With small windows it is the same.
    assert verdict_of(lambda: read(data, step=100)) == streamed
