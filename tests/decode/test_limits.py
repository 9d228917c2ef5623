"""Parts that claim to be larger than memory: they fail, and nothing is taken for them before."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import multiprocessing
import re
import resource
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections import Counter

import av
import cbor2
import msgpack
import numpy as np
import pytest
import torch
import zstandard
from PIL import Image

import energon.webdataset as wds
from energon import get_savable_loader
from energon.decode.av import AVDecoder
from energon.decode.sample_decoder import SampleDecoder
from energon.decode.values import decode_tenbin, encode_tenbin
from energon.errors import DecodeError, FormatError
from energon.formats.compressed import Unpacked, decompressed
from energon.limits import LIMITS
from energon.prepare.dataset import prepare_dataset
from energon.prepare.importers.detect import ArchiveSource
from energon.prepare.importers.selection import select
from energon.webdataset import tenbin
from energon.webdataset.autodecode import Decoder, DecodingError, torch_loads, torch_video
from energon.webdataset.cache import FileCached
from energon.webdataset.reading.tar_samples import ShardOpening
from tests.datasets import jpeg, write_shard
from tests.decode.videos import KINDS, encode_video
from tests.media_files import saved
from tests.task_encoder.runs import config, val

MB = 1 << 20


def huge_jpeg(width=65_500, height=65_500):
    data = bytearray(saved(Image.new("RGB", (8, 8)).save, format="JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def huge_png():
    data = bytearray(saved(Image.new("RGB", (8, 8)).save, format="PNG"))
    data[16:24] = struct.pack(">II", 65_500, 65_500)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def huge_webp():
    body = saved(Image.new("RGB", (8, 8)).save, format="WEBP", lossless=True)[12:]
    canvas = b"VP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + b"\xfd\x3f\0" * 2
    frame = b"ANMF" + struct.pack("<I", 16 + len(body)) + bytes(6) + b"\7\0\0" * 2 + bytes(4) + body
    data = b"WEBP" + canvas + b"ANIM" + struct.pack("<I", 6) + bytes(6) + frame
    return b"RIFF" + struct.pack("<I", len(data)) + data


def huge_npy(shape="(137438953472,)"):
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117)
    return b"\x93NUMPY\1\0" + struct.pack("<H", 118) + header + b"\n"


def archive(entries, compression=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return buffer.getvalue()


def claiming(data, name, size):
    """Return an archive whose directory claims another size for one entry."""
    data = bytearray(data)
    entry = data.index(b"PK\1\2")
    while data[entry + 46 :][: len(name)] != name:
        entry = data.index(b"PK\1\2", entry + 4)
    data[entry + 24 : entry + 28] = struct.pack("<I", size)
    return bytes(data)


def overlapping(count, size):
    """Return an archive of which all entries are the same content."""
    data = archive({"x0.npy": bytes(size)}, zipfile.ZIP_STORED)
    start = data.index(b"PK\1\2")
    entry = data[start : start + 46 + 6]
    end = struct.pack("<4s4HIIH", b"PK\5\6", 0, 0, count, count, count * len(entry), start, 0)
    return data[:start] + entry * count + end


def huge_video(side):
    """Return a video of JPEGs that claim to be huge."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as container:
        stream = container.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuvj420p"
        for _ in range(2):
            container.mux(stream.encode(av.VideoFrame(16, 16, "yuvj420p")))
        container.mux(stream.encode())
    size = struct.pack(">HH", side, side)
    data = buffer.getvalue()
    for found in reversed(list(re.finditer(rb"\xff\xc0...", data, re.DOTALL))):
        data = data[: found.end()] + size + data[found.end() + 4 :]
    return data


def many_packets(tracks=1):
    """Return an MP4 file of a kilobyte that claims 80 million packets in each track."""

    def box(kind, *parts):
        content = b"".join(parts)
        return struct.pack(">I", 8 + len(content)) + kind + content

    def full(kind, *numbers, rest=b""):
        return box(kind, struct.pack(f">{1 + len(numbers)}I", 0, *numbers), rest)

    count = 80_000_000
    look = bytes(6) + b"\0\1" + bytes(16) + struct.pack(">HH", 16, 16) + bytes(50)
    tables = (
        full(b"stsd", 1, rest=box(b"mp4v", look)),
        full(b"stts", 1, count, 1),
        full(b"stsc", 1, 1, count, 1),
        full(b"stsz", 1, count),
        full(b"stco", 1, 40),
    )
    media = (
        full(b"mdhd", 0, 0, 1000, count, 0),
        full(b"hdlr", 0, rest=b"vide" + bytes(13)),
        box(b"minf", full(b"vmhd", 0, 0), box(b"stbl", *tables)),
    )
    head = full(b"tkhd", 0, 0, 1, 0, 0, *[0] * 14)
    track = box(b"trak", head, box(b"mdia", *media))
    movie = box(b"moov", full(b"mvhd", 0, 0, 1000, 1000, *[0] * 20), *[track] * tracks)
    return box(b"ftyp", b"isom" + bytes(4)) + box(b"mdat", bytes(100)) + movie


CLAIMS = {
    "jpg": huge_jpeg(),
    "png": huge_png(),
    "webp": huge_webp(),
    "gif": b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\2\0\0;",
    "bmp": b"BM" + bytes(8) + struct.pack("<IIiiHH", 54, 40, 65_500, 65_500, 1, 24) + bytes(24),
    "npy": huge_npy(),
    "npz": archive({"x.npy": huge_npy()}),
    "1.npz": claiming(archive({"x.npy": huge_npy()}), b"x.npy", 0xFFFFFFF0),
    "2.npz": overlapping(3000, MB),
    "3.npz": archive({"x.npy": huge_npy()}, zipfile.ZIP_LZMA),
    "ten": b"~TenBin~" + struct.pack("<q", 1 << 40) + bytes(64),
    "json": b"[" * 100_000 + b"]" * 100_000,
    "1.json": b'{"a":' * 500 + b"1" + b"}" * 500,
    "2.json": ("[" * 500 + "]" * 500).encode("utf-16"),
    "msg": b"\x91" * 500 + b"\0",
    "1.msg": b"\x91" * 5000 + b"\0",
    "cbor": b"\x81" * 500 + b"\0",
    "1.cbor": b"\x9b" + (1 << 40).to_bytes(8, "big"),
    "mp4": many_packets(),
    "avi": huge_video(15_000),
    "1.avi": huge_video(65_500),
}


IMAGES = ("jpg", "png", "webp", "gif", "bmp")


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def decode_all(answers):
    """Decode everything, in a process of its own; tell what came out, and the memory it took."""
    import torch  # noqa: F401  # takes memory as well

    decoders = [SampleDecoder(image, av_decode="torch") for image in ("rgb8", "pil", "torch", "l")]
    for decoder in decoders:
        decoder.decode("k.jpg", jpeg(0))
    AVDecoder(encode_video(KINDS[0])).get_video()
    before = peak_mb()
    results = []
    for part, data in CLAIMS.items():
        for decoder in decoders if part in IMAGES else decoders[:1]:
            try:
                results.append((part, repr(decoder.decode(f"k.{part}", data))))
            except DecodeError as error:
                results.append((part, str(error)))
            except BaseException as error:
                results.append((part, repr(error)))
    answers.put((results, peak_mb() - before))


@pytest.mark.slow
def test_what_claims_to_be_huge_fails_before_memory_is_taken():
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=decode_all, args=(answers,))
    process.start()
    results, taken_mb = answers.get(timeout=200)
    process.join()
    for part, said in results:
        assert said.startswith(f"k.{part}: "), said
        assert "MemoryError" not in said, said
    assert taken_mb < 150


def test_messages_say_what_is_there_and_which_limit_to_raise():
    for part, said in {
        "jpg": "65500 x 65500 pixels; expected at most 178956970 .*ENERGON_LIMIT_IMAGE_PIXELS",
        "npy": "needs 1099511627776 bytes, found 0",
        "1.npz": "unpacks to 4294967280 bytes; expected at most .*ENERGON_LIMIT_UNPACKED_BYTES",
        "json": "more than 400 levels deep; .*ENERGON_LIMIT_PART_DEPTH",
        "msg": "more than 400 levels deep",
        "mp4": "claims to have 80000000 packets; .*ENERGON_LIMIT_MEDIA_PACKETS",
        "avi": "not a complete audio or video",
    }.items():
        with pytest.raises(DecodeError, match=said):
            SampleDecoder("rgb8", av_decode="torch").decode(f"k.{part}", CLAIMS[part])


def test_a_worker_looks_up_the_limit_of_images_once(monkeypatch):
    monkeypatch.setenv(LIMITS["IMAGE_PIXELS"].variable, "95")
    limited = SampleDecoder("rgb8").with_limits()
    monkeypatch.delenv(LIMITS["IMAGE_PIXELS"].variable)
    SampleDecoder("rgb8").decode("k.jpg", jpeg(0))
    with pytest.raises(DecodeError, match=r"k\.jpg: the image has \d+ x \d+ pixels"):
        limited.decode("k.jpg", jpeg(0))


@pytest.mark.parametrize(
    ("limit", "value", "part", "data"),
    [
        ("IMAGE_PIXELS", 95, "jpg", jpeg(0)),
        ("IMAGE_PIXELS", 95, "png", saved(Image.new("RGB", (12, 8)).save, format="PNG")),
        ("IMAGE_PIXELS", 48 * 32 - 1, "mp4", encode_video(KINDS[0], frames=3)),
        ("DECODED_BYTES", 3 * 48 * 32 * 3 - 1, "mp4", encode_video(KINDS[0], frames=3)),
        ("UNPACKED_BYTES", 999, "gz", gzip.compress(bytes(1000))),
        ("UNPACKED_BYTES", 999, "npz", saved(np.savez_compressed, x=np.zeros(109))),
        ("DOCUMENT_BYTES", 3, "json", b"[12]"),
        ("DOCUMENT_BYTES", 3, "msg", msgpack.packb([1, 2, 3])),
        ("DOCUMENT_BYTES", 3, "cbor", cbor2.dumps([1, 2, 3])),
        ("PART_DEPTH", 2, "json", b"[[[1]]]"),
        ("PART_DEPTH", 2, "msg", msgpack.packb([[[1]]])),
        ("PART_DEPTH", 2, "msg", msgpack.packb([1, {"a": {"b": 1}}])),
        ("PART_DEPTH", 2, "cbor", cbor2.dumps([[[1]]])),
    ],
    ids=lambda value: value if isinstance(value, str | int) else "",
)
def test_every_limit_is_a_setting(limit, value, part, data, monkeypatch):
    decoder = SampleDecoder("rgb8", av_decode="torch")
    decoder.decode(f"k.{part}", data)
    monkeypatch.setenv(LIMITS[limit].variable, str(value))
    with pytest.raises(DecodeError, match=rf"k\.{part}: .*{LIMITS[limit].variable}"):
        decoder.decode(f"k.{part}", data)
    monkeypatch.setenv(LIMITS[limit].variable, str(value + 1))
    decoder.decode(f"k.{part}", data)


def test_audio_is_limited_by_what_a_clip_has(monkeypatch):
    video = encode_video(KINDS[0])
    samples = AVDecoder(video).get_audio().audio_clips[0]
    monkeypatch.setenv(LIMITS["DECODED_BYTES"].variable, str(samples.nbytes // 2))
    with pytest.raises(DecodeError, match="ask for shorter clips"):
        AVDecoder(video).get_audio()
    (clip,), _ = AVDecoder(video).get_audio_clips([(0, 1)])
    assert np.array_equal(clip, samples[:, : clip.shape[1]])
    # What keeps nothing is not limited.
    AVDecoder(video).check()


def test_brackets_in_strings_are_no_levels(monkeypatch):
    value = {"text": "[" * 1000 + '\\"[[' + "{" * 1000, "list": [[1]] * 600}
    for encoding in ("utf-8", "utf-16", "utf-32"):
        data = json.dumps(value).encode(encoding)
        assert SampleDecoder().decode("k.json", data) == value


def test_a_value_of_the_deepest_allowed_level_is_read():
    deep = b"[" * 400 + b"]" * 400
    assert json.dumps(SampleDecoder().decode("k.json", deep)).encode() == deep
    for part in ("msg", "cbor"):
        code = {"msg": b"\x91", "cbor": b"\x81"}[part]
        value = SampleDecoder().decode(f"k.{part}", code * 400 + b"\0")
        assert str(value) == "[" * 400 + "0" + "]" * 400


def test_a_progressive_jpeg_may_have_some_scans():
    data = saved(Image.new("RGB", (64, 64)).save, format="JPEG", progressive=True)
    assert SampleDecoder("rgb8").decode("k.jpg", data).shape == (64, 64, 3)
    last = data.rindex(b"\xff\xda")
    many = data[:last] + data[last:-2] * 200 + data[-2:]
    for spec in ("rgb8", "pil"):
        with pytest.raises(DecodeError, match=r"20\d scans; .*ENERGON_LIMIT_JPEG_SCANS"):
            SampleDecoder(spec).decode("k.jpg", many)


def test_archives_in_ordinary_use_are_read():
    arrays = {"a": np.arange(5), "b/c": np.zeros((3, 0)), "d.npy": np.float32(2)}
    expected = {name: array.tolist() for name, array in arrays.items()}
    for save in (np.savez, np.savez_compressed):
        found = SampleDecoder().decode("k.npz", saved(save, **arrays))
        assert {name: array.tolist() for name, array in found.items()} == expected
    large = saved(np.savez, x=np.zeros(200_000))
    assert SampleDecoder().decode("k.npz", large)["x"].shape == (200_000,)


def test_long_plain_audio_in_quicktime_is_no_bomb():
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mov") as container:
        stream = container.add_stream("pcm_s16le", rate=48_000, layout="mono")
        for number in range(40):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 300_000), np.int16), "s16", "mono")
            frame.sample_rate, frame.pts = 48_000, number * 300_000
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert AVDecoder(buffer.getvalue()).get_audio_duration() == 250


def test_a_playlist_opens_no_files_of_this_machine(tmp_path, monkeypatch):
    (tmp_path / "private.mp4").write_bytes(encode_video(KINDS[0]))
    monkeypatch.chdir(tmp_path)
    playlist = b"ffconcat version 1.0\nfile private.mp4\n"
    decoder = SampleDecoder(av_decode="AVDecoder").decode("k.mp4", playlist)
    with pytest.raises(DecodeError):
        decoder.get_video()
    with pytest.raises(DecodeError):
        SampleDecoder(av_decode="pyav").decode("k.mp4", playlist)


@pytest.mark.parametrize("part", CLAIMS)
def test_fluid_pipelines_have_the_same_limits(part):
    decode = Decoder("rgb8", torch_video)
    with pytest.raises(DecodingError, match="cannot be decoded"):
        decode({"__key__": "k", part: CLAIMS[part]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "value"),
    [
        (wds.jsonl_to_samples, b'"%s"\n'),
        (wds.msgpacks_to_samples, b"\xc6" + struct.pack(">I", 100_000_000) + b"%s"),
        (wds.cbors_to_samples, b"\x5a" + struct.pack(">I", 100_000_000) + b"%s"),
    ],
)
def test_records_in_streams_have_the_limits_of_documents(stage, value, tmp_path, monkeypatch):
    monkeypatch.setenv(LIMITS["DOCUMENT_BYTES"].variable, "1000000")
    path = tmp_path / "records.gz"
    with gzip.open(path, "wb") as file:
        start, end = value.split(b"%s")
        file.write(start)
        for _ in range(100):
            file.write(bytes(MB))
        file.write(end)
    tracemalloc.start()
    try:
        # Old releases of msgpack have a limit of their own, from which ours follows.
        refused = "more than 1000000 bytes; .*DOCUMENT_BYTES|exceeds max_bin_len"
        with pytest.raises(FormatError, match=refused):
            list(wds.DataPipeline(wds.SimpleShardList(str(path)), stage()))
        assert tracemalloc.get_traced_memory()[1] < 50 * MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("stage", "value"),
    [
        (wds.jsonl_to_samples, b"[" * 401 + b"]" * 401),
        (wds.msgpacks_to_samples, b"\x91" * 401 + b"\0"),
        (wds.cbors_to_samples, b"\x81" * 401 + b"\0"),
    ],
)
def test_records_in_streams_may_not_be_nested_deeper_than_parts(stage, value, tmp_path):
    path = tmp_path / "records"
    path.write_bytes(value)
    with pytest.raises(FormatError, match="nest"):
        list(wds.DataPipeline(wds.SimpleShardList(str(path)), stage()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_streams_are_unpacked_piece_by_piece(kind, tmp_path):
    path = tmp_path / f"zeros.{kind}"
    opener = {"gz": gzip.open, "zst": zstandard.open}[kind]
    with opener(path, "wb") as file:
        for _ in range(100):
            file.write(bytes(MB))
    opened = ShardOpening().open(str(path))
    tracemalloc.start()
    try:
        total, zeros = 0, bytes(MB)
        while data := opened.stream.read(MB):
            assert data == zeros[: len(data)]
            total += len(data)
        assert total + len(opened.head) == 100 * MB
        assert tracemalloc.get_traced_memory()[1] < 80 * MB
    finally:
        tracemalloc.stop()
        opened.stream.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pack"),
    [
        ("gz", gzip.compress),
        ("zlib", zlib.compress),
        ("bz2", bz2.compress),
        ("xz", lzma.compress),
        ("zstd", zstandard.compress),
    ],
)
def test_compressed_data_are_unpacked_as_far_as_the_limit(monkeypatch, kind, pack):
    data = pack(b"first ") + pack(b"second")
    assert decompressed(data, kind) == decompressed(memoryview(data), kind) == b"first second"
    with pytest.raises(DecodeError, match="incomplete or damaged"):
        decompressed(data[:-1], kind)
    # A kilobyte of zstd, all of which is unpacked at once, stands for 32 MiB.
    most = 80 if kind == "zstd" else 20
    bomb = pack(bytes(2 * most * MB))
    monkeypatch.setenv(LIMITS["UNPACKED_BYTES"].variable, str(MB))
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="ENERGON_LIMIT_UNPACKED_BYTES"):
            decompressed(bomb, kind)
        assert tracemalloc.get_traced_memory()[1] < most * MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_parts_of_compressed_archives_are_limited_as_compressed_parts(tmp_path, monkeypatch, kind):
    monkeypatch.setenv(LIMITS["UNPACKED_BYTES"].variable, str(MB))
    path = tmp_path / f"0.tar.{kind}"
    with tarfile.open(path, f"w:{kind}") as tar:
        member = tarfile.TarInfo("0.bin")
        member.size = 2 * MB
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(FormatError, match=f"{2 * MB} bytes.*ENERGON_LIMIT_UNPACKED_BYTES"):
        list(wds.WebDataset(str(path), shardshuffle=False))
    with pytest.raises(FormatError, match="ENERGON_LIMIT_UNPACKED_BYTES"):
        list(ArchiveSource(select([tmp_path])).samples(""))


@pytest.mark.parametrize("kind", ["gz", "zstd"])
def test_no_read_returns_more_than_it_was_asked_for(kind):
    content = bytes(range(256)) * 4096
    packed = {"gz": gzip.compress, "zstd": zstandard.compress}[kind](content) * 2
    stream = io.BufferedReader(Unpacked(io.BytesIO(packed), kind, origin="packed"))
    assert stream.read(1000) == (content * 2)[:1000]
    assert stream.read() == (content * 2)[1000:]
    assert len(Unpacked(io.BytesIO(packed), kind, origin="packed").read(10)) <= 10


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_streams_after_any_padding_are_read(kind):
    pack = {"gz": gzip.compress, "xz": lzma.compress}[kind]
    packed = pack(b"first ") + bytes(MB) + pack(b"second") + bytes(MB)
    assert Unpacked(io.BytesIO(packed), kind, origin="packed").read(-1) == b"first second"


def test_cached_items_are_unpacked_as_far_as_the_limit(tmp_path, monkeypatch):
    path = tmp_path / "items"
    list(FileCached(path)([bytes(2 * MB)]))
    monkeypatch.setenv(LIMITS["UNPACKED_BYTES"].variable, str(MB))
    with pytest.raises(FormatError, match="item 0.*ENERGON_LIMIT_UNPACKED_BYTES"):
        list(FileCached(path)([]))


def test_tensors_are_limited_by_what_they_claim(monkeypatch):
    wide = saved(lambda file: torch.save({"x": [torch.zeros(1).expand(1 << 40)]}, file))
    with pytest.raises(DecodeError, match="4398046511104 bytes; .*ENERGON_LIMIT_DECODED_BYTES"):
        torch_loads(wide)
    monkeypatch.setenv(LIMITS["UNPACKED_BYTES"].variable, "100000")
    packed = archive(dict(entries(saved(lambda file: torch.save(torch.zeros(99_999), file)))))
    with pytest.raises(DecodeError, match="ENERGON_LIMIT_UNPACKED_BYTES"):
        torch_loads(packed)
    value = {"bytearray": [torch.ones(3), 5], "x": torch.nn.Linear(2, 2).state_dict()}
    found = torch_loads(saved(lambda file: torch.save(value, file)))
    assert found["bytearray"][0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("old", [False, True])
def test_whatever_torch_saves_of_tensors_is_loaded(old):
    marked, twice = torch.ones(2), [1, 2]
    marked.note = "its own"
    value = {
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "state": torch.nn.BatchNorm1d(3).state_dict(),
        "numbers": (1, 2.5, 3j, None, True, {4, 5}, 1 << 80),
        "bytes": [b"\0\xff" * 100, "text"],
        "shape": torch.ones(2, 3).shape,
        "kinds": [torch.float16, torch.device("cpu"), torch.strided],
        "views": [torch.arange(10)[::2], torch.arange(6).reshape(2, 3).T],
        "sparse": torch.eye(3).to_sparse(),
        "small": torch.tensor([1, 2], dtype=torch.uint16 if not old else torch.uint8),
        "marked": marked,
        "counts": Counter("aab"),
        "shared": [twice, twice],
    }
    data = saved(lambda file: torch.save(value, file, _use_new_zipfile_serialization=not old))
    found, expected = torch_loads(data), value
    assert found.keys() == expected.keys()
    for name in ("numbers", "bytes", "shape", "kinds", "counts", "shared"):
        assert found[name] == expected[name]
    assert found["marked"].note == "its own"
    assert found["sparse"].to_dense().tolist() == torch.eye(3).tolist()
    assert found["small"].tolist() == [1, 2]
    assert found["views"][1].tolist() == [[0, 3], [1, 4], [2, 5]]


def entries(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


@pytest.mark.parametrize("length", [1 << 40, -1, 1 << 62, 63])
def test_streams_of_tenbins_take_memory_for_what_is_there_only(length, tmp_path):
    path = tmp_path / "x.ten"
    path.write_bytes(b"~TenBin~" + struct.pack("<q", length) + bytes(64))
    with pytest.raises(DecodeError), path.open("rb") as stream:
        tenbin.read(stream, n=1)


def test_sizes_of_tenbins_do_not_wrap_around():
    data = bytearray(encode_tenbin([np.zeros((2, 2), np.uint8)]))
    data[16 + 24 : 16 + 40] = struct.pack("<2q", 1 << 33, 1 << 31)
    with pytest.raises(DecodeError, match="needs 18446744073709551616 bytes"):
        decode_tenbin(bytes(data))


@pytest.mark.parametrize("workers", [0, 1])
def test_one_huge_image_fails_and_the_run_goes_on(tmp_path, workers):
    write_shard(
        tmp_path / "shards/0.tar",
        [(f"s{n}", {"jpg": huge_jpeg() if n == 3 else jpeg(n)}) for n in range(10)],
    )
    prepare_dataset(tmp_path, split_parts=["val:.*"], sample_type="CrudeWebdataset")
    dataset = val(tmp_path, worker_config=config(num_workers=workers), batch_size=1)
    with get_savable_loader(dataset) as batches:
        assert len(list(batches)) == 9
        assert batches.stats()["failed"] == 1
