from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import soundfile
from PIL import Image

from energon import (
    Cooker,
    DefaultTaskEncoder,
    EPath,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_loader,
    get_train_dataset,
)
from energon.compat.megatron.datasets.webdataset import PreparesShards
from energon.compat.megatron.helpers import MediaFilterConfig, prepare_filesystem_dataset
from energon.errors import ConfigError, FormatError, NoSuchFileError, StorageAccessError
from energon.formats.media import AVMetadata, ImageMetadata, deserialize_media_metadata
from energon.formats.tables.part_table import PartTable, part_table_path
from energon.io.files import delete_file, list_files, write_bytes
from energon.prepare import media as media_surviving
from energon.prepare.dataset import prepare_dataset
from energon.prepare.engines import Engine, run_isolated
from energon.prepare.index import ShardFile
from energon.prepare.media import WORK_NAME, MediaFilter, prepare_media, prepare_remote_media
from energon.sources.files.open import SystemFileStore
from energon.sources.files.samples import WebdatasetFileStore
from energon.sources.files.store import DecodeFileStore, PrimaryFileStore
from tests.commands import ok, run
from tests.datasets import CRUDE, jpeg, write_crude, write_shard
from tests.decode.videos import KINDS, encode_video
from tests.servers.proxy import Fault
from tests.sources.distant import upload

BY_EXTENSION = MediaFilter("EXTENSION")
INLINE = Engine(num_workers=1)
VIDEO = encode_video(KINDS[0])


def sound():
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros((8000, 1)), 16000, format="FLAC")
    return buffer.getvalue()


def png(width, height):
    buffer = io.BytesIO()
    Image.new("LA", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


FILES = {
    "a/1.jpg": jpeg(1),
    "a/1.txt": b"text",
    "a/2.left.png": png(30, 20),
    "a/2.json": b"{}",
    "b/3.mp4": VIDEO,
    "b/3.flac": sound(),
    "b/4.bin": jpeg(4, size=(9, 7)),
    "b/5.jpg": b"\xff\xd8\xff damaged",
}
JPEG_1 = ImageMetadata(width=12, height=8, format="JPEG", mode="RGB")
PNG_2 = ImageMetadata(width=30, height=20, format="PNG", mode="LA")
JPEG_4 = ImageMetadata(width=9, height=7, format="JPEG", mode="RGB")
FLAC_3 = AVMetadata(
    audio_duration=0.5, audio_channels=1, audio_sample_rate=16000, audio_num_samples=8000
)


def make_shards(root):
    samples: dict[str, dict[str, bytes]] = {}
    for name, content in FILES.items():
        key, _, part = name.partition("/")[2].partition(".")
        samples.setdefault(f"{name[0]}/{key}", {})[part] = content
    write_shard(root / "0.tar", list(samples.items())[:2])
    write_shard(root / "1.tar", list(samples.items())[2:])


@pytest.fixture
def dataset(tmp_path):
    make_shards(tmp_path / "ds")
    prepare_dataset(tmp_path / "ds", **CRUDE)
    return tmp_path / "ds"


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "files"


@pytest.fixture(params=["dataset", "folder"])
def place(request):
    path = request.getfixturevalue(request.param)
    kind = WebdatasetFileStore if request.param == "dataset" else SystemFileStore
    return path, lambda: kind(path)


def known(store):
    found = {}
    for name in FILES:
        try:
            found[name] = store.get_media_metadata(name)
        except NoSuchFileError:
            continue
    return found


def test_headers_are_noted_by_file_name(place):
    path, open_store = place
    report = prepare_media(path, BY_EXTENSION, engine=INLINE)
    found = known(open_store())
    video = found.pop("b/3.mp4")
    assert found == {"a/1.jpg": JPEG_1, "a/2.left.png": PNG_2, "b/3.flac": FLAC_3}
    assert (video.video_width, video.video_height, video.video_num_frames) == (48, 32, 45)
    assert (video.video_duration, video.audio_sample_rate) == (4.5, 16000)
    assert report.stored == 4
    ((name, reason),) = report.failed
    assert name == "b/5.jpg"
    assert "UnidentifiedImageError" in reason


def test_files_that_end_too_early_are_reported(tmp_path):
    (tmp_path / "whole.mp4").write_bytes(VIDEO)
    header = VIDEO.index(b"moov") - 4
    cuts = {"header": VIDEO[: header + 600], "tables": VIDEO[:-300], "media": VIDEO[: header // 2]}
    mkv = encode_video(next(kind for kind in KINDS if kind.name == "mkv"), frames=8)
    for name, content in cuts.items():
        (tmp_path / f"{name}.mp4").write_bytes(content)
    (tmp_path / "half.mkv").write_bytes(mkv[: len(mkv) // 2])
    report = prepare_media(tmp_path, BY_EXTENSION, engine=INLINE)
    assert report.stored == 1
    assert sorted(name for name, _ in report.failed) == [
        "half.mkv",
        "header.mp4",
        "media.mp4",
        "tables.mp4",
    ]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (MediaFilter("GLOB", "*.jpg, b/*.flac"), ["a/1.jpg", "b/3.flac"]),
        (MediaFilter("GLOB", "b/4*"), ["b/4.bin"]),
        (MediaFilter("GLOB", "1.JPG"), ["a/1.jpg"]),
        (MediaFilter("HEADER"), ["a/1.jpg", "a/2.left.png", "b/3.mp4", "b/3.flac", "b/4.bin"]),
    ],
)
def test_files_are_chosen_by_pattern_or_by_content(place, chosen, names):
    path, open_store = place
    prepare_media(path, chosen, engine=INLINE)
    found = known(open_store())
    assert list(found) == names
    assert found.get("b/4.bin", JPEG_4) == JPEG_4


def test_only_what_has_changed_is_looked_at_again(place):
    path, open_store = place
    assert prepare_media(path, BY_EXTENSION, engine=INLINE).looked_at == (
        2 if path.name == "ds" else 5
    )
    assert prepare_media(path, BY_EXTENSION, engine=INLINE).looked_at == 0
    if path.name == "ds":
        write_shard(path / "1.tar", [("b/3", {"png": png(5, 6)})])
        prepare_dataset(path, **CRUDE)
    else:
        for name in ("b/3.mp4", "b/3.flac", "b/5.jpg"):
            (path / name).unlink()
        (path / "b/3.png").write_bytes(png(5, 6))
    assert prepare_media(path, BY_EXTENSION, engine=INLINE).looked_at == 1
    store = open_store()
    assert known(store) == {"a/1.jpg": JPEG_1, "a/2.left.png": PNG_2}
    assert store.get_media_metadata("b/3.png").width == 5


def test_preparing_again_keeps_what_is_known_of_shards_that_did_not_change(dataset):
    prepare_media(dataset, BY_EXTENSION, engine=INLINE)
    write_crude(dataset, [("a/1", {"jpg": jpeg(1, size=(3, 3)), "txt": b""})])
    store = WebdatasetFileStore(dataset)
    assert set(known(store)) == {"b/3.mp4", "b/3.flac"}
    assert prepare_media(dataset, BY_EXTENSION, engine=INLINE).looked_at == 1
    assert store.get_media_metadata("b/3.flac") == FLAC_3
    assert WebdatasetFileStore(dataset).get_media_metadata("a/1.jpg").width == 3


def test_two_filters_add_up(dataset):
    prepare_media(dataset, MediaFilter("GLOB", "*.flac"), engine=INLINE)
    report = prepare_media(dataset, MediaFilter("GLOB", "*.png"), engine=INLINE)
    assert (report.looked_at, report.stored) == (2, 2)
    with sqlite3.connect(dataset / ".nv-meta" / "index.sqlite") as connection:
        rows = connection.execute("SELECT strategy, patterns FROM media_filters").fetchall()
    connection.close()
    assert rows == [("GLOB", "*.flac"), ("GLOB", "*.png")]


def test_tables_are_those_of_the_format_and_known_to_stores_made_of_stores(dataset):
    prepare_media(dataset, BY_EXTENSION, engine=INLINE)
    connection = sqlite3.connect(dataset / ".nv-meta" / "index.sqlite")
    rows = connection.execute(
        "SELECT entry_key, metadata_type, metadata_json FROM media_metadata ORDER BY 1"
    ).fetchall()
    connection.close()
    assert rows[0] == ("a/1.jpg", "image", '{"width":12,"height":8,"format":"JPEG","mode":"RGB"}')
    assert rows[2][:2] == ("b/3.flac", "av")
    assert "video" not in rows[2][2]
    store = DecodeFileStore(WebdatasetFileStore(dataset), decoder=None)
    assert store.get_media_metadata("a/1.jpg") == JPEG_1
    assert PrimaryFileStore(store, "a/2").get_media_metadata(".left.png") == PNG_2


def test_without_metadata_the_error_says_what_to_run(dataset, folder, tmp_path):
    for store in (WebdatasetFileStore(dataset), SystemFileStore(folder)):
        with pytest.raises(ConfigError, match="energon prepare-media"):
            store.get_media_metadata("a/1.jpg")
    with pytest.raises(ConfigError, match="no media metadata"):
        SystemFileStore().get_media_metadata("/x.jpg")
    (dataset / ".nv-meta" / "index.sqlite").unlink()
    with pytest.raises(ConfigError, match="energon index"):
        prepare_media(dataset, BY_EXTENSION, engine=INLINE)


def test_damaged_metadata_are_an_error_that_says_so():
    with pytest.raises(FormatError, match="prepare-media"):
        deserialize_media_metadata("image", "{")
    with pytest.raises(FormatError, match="'hologram'"):
        deserialize_media_metadata("hologram", "{}")
    later = deserialize_media_metadata("av", '{"audio_channels":1,"audio_mood":"calm"}')
    assert later == AVMetadata(audio_channels=1)


def test_metadata_of_odd_shape_are_counted_apart(dataset):
    prepare_media(dataset, BY_EXTENSION, engine=INLINE)
    before = run("info", dataset, "--json")
    odd = {
        "image": ["{", "[]", "3", '{"width": "wide", "height": 1}', '{"width": null}', "x" * 99],
        "av": ["{", '"av"'],
        "hologram": ["{}"],
    }
    rows = [(f"{kind}{n}", kind, text) for kind in odd for n, text in enumerate(odd[kind])]
    rows.append(("blob", "image", b"\xff"))
    with sqlite3.connect(dataset / ".nv-meta" / "index.sqlite") as connection:
        connection.executemany("INSERT INTO media_metadata VALUES (?, ?, ?)", rows)
    connection.close()
    media = json.loads(before.stdout)["media"]
    assert json.loads(run("info", dataset, "--json").stdout)["media"] == {
        **media,
        "unreadable": {"count": len(rows)},
    }
    assert "- unreadable: metadata of 10 files; run" in run("info", dataset).stdout


def test_numbers_and_formats_of_odd_shape_are_not_counted(dataset):
    prepare_media(dataset, BY_EXTENSION, engine=INLINE)
    rows = [
        ("0", "image", '{"width": 4, "height": 6, "format": ["PNG"]}'),
        ("1", "av", '{"video_fps": 25, "video_duration": "long", "video_num_frames": 1e999}'),
        ("2", "av", '{"audio_sample_rate": "high", "audio_duration": 5}'),
    ]
    with sqlite3.connect(dataset / ".nv-meta" / "index.sqlite") as connection:
        connection.execute("DELETE FROM media_metadata")
        connection.executemany("INSERT INTO media_metadata VALUES (?, ?, ?)", rows)
    connection.close()
    output = run("info", dataset).stdout
    assert "- images: 1 (unknown), 4 to 4 by 6 to 6 pixels" in output
    assert "- video: 1 of unknown length" in output
    assert "audio" not in output.partition("- images")[2]


_SLOW = """
import sys, time
from energon.prepare import media
from energon.prepare.engines import Engine
from energon.prepare.media import MediaFilter
def progress(done, total):
    if done == 6:
        print("six are done", flush=True)
        time.sleep(60)
media.prepare_media(
    sys.argv[1], MediaFilter("EXTENSION"), engine=Engine(num_workers=1), progress=progress
)
"""


def test_a_run_that_was_killed_goes_on(tmp_path):
    for n in range(10):
        write_shard(tmp_path / f"{n}.tar", [(f"{n}", {"jpg": jpeg(n)})])
    prepare_dataset(tmp_path, **CRUDE)
    index = tmp_path / ".nv-meta" / "index.sqlite"
    before = index.read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "six are done\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert index.read_bytes() == before
    assert (tmp_path / ".nv-meta" / WORK_NAME).exists()
    report = prepare_media(tmp_path, BY_EXTENSION, engine=INLINE)
    assert 4 <= report.looked_at < 10
    assert report.stored == 10
    assert not (tmp_path / ".nv-meta" / WORK_NAME).exists()


def test_what_a_killed_run_left_counts_only_for_the_same_index(dataset):
    work = dataset / ".nv-meta" / WORK_NAME
    shutil.copy(dataset / ".nv-meta" / "index.sqlite", work)
    assert prepare_media(dataset, BY_EXTENSION, engine=INLINE).looked_at == 2
    work.write_bytes(b"no database")
    assert prepare_media(dataset, BY_EXTENSION, engine=INLINE).stored == 4


@dataclass(frozen=True)
class Deadly(MediaFilter):
    """Stands for a codec that crashes at some files."""

    deadly: tuple[str, ...] = ()

    def kind(self, name, head):
        if name.rpartition("/")[2] in self.deadly:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().kind(name, head)


@pytest.mark.slow
def test_files_that_crash_a_codec_are_left_out_and_named(place):
    chosen = Deadly("EXTENSION", deadly=("2.left.png", "3.flac"))
    path, _ = place
    report = prepare_media(path, chosen, engine=Engine(num_workers=2))
    assert report.stored == 2
    failed = {name.rpartition("/")[2]: reason for name, reason in report.failed}
    assert failed.keys() == {"2.left.png", "3.flac", "5.jpg"}
    assert "a codec has crashed" in failed["3.flac"]
    assert "a codec has crashed" in failed["2.left.png"]
    assert prepare_media(path, chosen).looked_at == 0


def test_shards_may_have_more_samples_than_processes_look_at_together(tmp_path, monkeypatch):
    monkeypatch.setattr(media_surviving, "PARTS_PER_JOB", 3)
    samples = [(f"{n}", {"jpg": jpeg(n), "txt": b"x"}) for n in range(10)]
    write_shard(tmp_path / "0.tar", samples)
    write_shard(tmp_path / "1.tar", [("t", {"txt": b"x"})])
    prepare_dataset(tmp_path, **CRUDE)
    report = prepare_media(tmp_path, Deadly("EXTENSION", deadly=("4.jpg",)))
    assert (report.stored, report.looked_at) == (9, 2)
    assert [name for name, _ in report.failed] == ["4.jpg"]


def test_shards_without_samples_are_done_without_a_process(tmp_path, monkeypatch):
    calls = []

    def recorded(engine, function, jobs, died):
        calls.extend(jobs)
        return run_isolated(engine, function, jobs, died)

    monkeypatch.setattr(media_surviving, "run_isolated", recorded)
    for number in range(2):
        write_shard(tmp_path / f"{number}.tar", [(f"{number}", {"jpg": jpeg(number)})])
    prepare_dataset(tmp_path, **CRUDE)
    emptied = tmp_path / "0.tar"
    write_shard(emptied, [])
    scan = ShardFile(emptied).scan()
    table = PartTable.from_scan(scan, shard_mtime_ns=emptied.stat().st_mtime_ns)
    part_table_path(emptied).write_bytes(table.to_bytes())
    report = prepare_media(tmp_path, BY_EXTENSION, engine=INLINE)
    assert (report.stored, report.looked_at) == (1, 2)
    assert [job.arguments[1] for job in calls] == ["1.tar"]
    assert prepare_media(tmp_path, BY_EXTENSION, engine=INLINE).looked_at == 0


@pytest.mark.parametrize("arguments", [("GLOB", None), ("EXTENSION", "*.jpg"), ("GLOB", "")])
def test_filters_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ConfigError, match="media filter"):
        MediaFilter(*arguments)


def test_a_dataset_in_an_object_store_gets_its_metadata_there(s3, dataset):
    address = upload(dataset, s3.address)
    result = ok("prepare-media", address, "--media-metadata-by-extension", "--num-workers", 1)
    assert "Done. Stored metadata for 4 files." in result.output
    assert WebdatasetFileStore(address).get_media_metadata("b/3.flac") == FLAC_3
    by_header = MediaFilterConfig.parse(None, header=True, extension=False)
    added = PreparesShards.add_media_metadata(EPath(address), media_filter=by_header, workers=1)
    assert added == 5
    assert WebdatasetFileStore(address).get_media_metadata("b/4.bin") == JPEG_4


@pytest.fixture
def remote(s3, folder):
    """The folder in an object store, and the proxy in front of that."""
    return upload(folder, s3.address), s3.proxy


def prepare_remote(address, *options):
    result = ok(
        *("prepare-media", address, "--media-metadata-by-extension", "--num-workers", 1, "--json"),
        *options,
    )
    return json.loads(result.stdout)


def test_a_folder_in_an_object_store_gets_its_metadata_there(remote, folder):
    address, proxy = remote
    write_bytes(f"{address}/c/6.jpg", jpeg(1) + bytes(2 << 20))
    proxy.plan([])
    report = prepare_remote(address)
    assert (report["files"], report["looked_at"]) == (5, 6)
    assert [failure["file"] for failure in report["failed"]] == ["b/5.jpg"]
    read = Counter(request.path.rpartition(".")[2] for request in proxy.requests if request.is_data)
    assert (read["jpg"], read["png"], read["flac"]) == (3, 1, 1), "only the beginning of each"
    assert read.keys() == {"jpg", "png", "flac", "mp4"}
    store = SystemFileStore(address)
    assert store.get_media_metadata("c/6.jpg") == JPEG_1
    prepare_media(folder, BY_EXTENSION, engine=INLINE)
    assert known(store) == known(SystemFileStore(folder))


def test_of_a_remote_folder_only_what_has_changed_is_looked_at_again(remote):
    address, proxy = remote
    prepare_remote(address)
    proxy.plan([])
    assert prepare_remote(address)["looked_at"] == 0
    assert [request for request in proxy.requests if request.is_data] == []
    write_bytes(f"{address}/b/5.jpg", jpeg(4, size=(9, 7)))
    delete_file(f"{address}/a/1.jpg")
    report = prepare_remote(address)
    assert (report["files"], report["looked_at"], report["failed"]) == (4, 1, [])
    store = SystemFileStore(address)
    assert store.get_media_metadata("b/5.jpg") == JPEG_4
    assert "a/1.jpg" not in known(store)


def test_a_remote_folder_is_continued_after_the_store_failed(remote, monkeypatch):
    address, proxy = remote
    monkeypatch.setattr(media_surviving, "FILES_PER_JOB", 1)
    monkeypatch.setenv("ENERGON_STORAGE_DEADLINE_SECONDS", "1")
    denied = Fault("status", status=403, code="AccessDenied")
    proxy.plan([None] * 3 + [denied] * 99, lambda request: request.is_data)
    with pytest.raises(StorageAccessError):
        prepare_remote_media(address, BY_EXTENSION, num_workers=1, progress=lambda *_: None)
    assert not EPath(f"{address}/.nv-meta/index.sqlite").is_file(), "nothing is half there"
    proxy.plan([])
    report = prepare_remote(address)
    assert report["files"] == 4
    assert 0 < report["looked_at"] < 5
    assert [each.key for each in list_files(f"{address}/.nv-meta")] == ["index.sqlite"]


def test_programs_prepare_remote_folders_and_load_what_refers_to_them(remote, tmp_path):
    address, _ = remote
    chosen = MediaFilterConfig.parse("*.JPG,2.*", header=False, extension=False)
    assert prepare_filesystem_dataset(EPath(address), chosen, progress=False, workers=1) == 2
    (tmp_path / "texts.jsonl").write_text('{"image": "a/1.jpg"}\n{"image": "a/2.left.png"}\n')
    ok("prepare", tmp_path / "texts.jsonl")
    (tmp_path / "meta.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\n"
        f"splits:\n  train:\n    path: texts.jsonl\n    aux:\n      images: filesystem://{address}\n"
    )

    @cooker
    def cook(sample, images):
        name = sample["json"]["image"]
        size = images.get_media_metadata(name)
        return TextSample(**basic_sample_keys(sample), text=f"{name} {size.width}x{size.height}")

    class Encoder(DefaultTaskEncoder):
        cookers = (Cooker(cook),)

    dataset = get_train_dataset(
        tmp_path / "meta.yaml",
        task_encoder=Encoder(),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=2,
        repeat=False,
    )
    (batch,) = get_loader(dataset)
    assert sorted(batch.text) == ["a/1.jpg 12x8", "a/2.left.png 30x20"]


def test_a_web_server_cannot_be_written_to():
    result = run("prepare-media", "http://127.0.0.1:9/files", "--media-metadata-by-extension")
    assert result.exit_code == 2
    assert "read only" in result.output


def test_the_command_tells_what_it_did(place):
    path, open_store = place
    result = run("prepare-media", path, "--media-metadata-by-extension", "--num-workers", 1)
    assert result.exit_code == 0
    assert "Done. Stored metadata for 4 files." in result.output
    assert "skipped b/5.jpg" in result.output
    assert len(known(open_store())) == 4


def test_the_command_wants_one_filter(folder):
    result = run("prepare-media", folder)
    assert result.exit_code == 2
    assert "choose the media files" in result.output
    result = run(
        "prepare-media", folder, "--media-metadata-by-header", "--media-metadata-by-glob", "*"
    )
    assert "cannot be combined" in result.output
    assert (
        "does not exist" in run("prepare-media", folder / "x", "--media-metadata-by-header").output
    )


def test_a_dataset_is_prepared_with_its_media_metadata(tmp_path):
    make_shards(tmp_path)
    ok(
        *("prepare", tmp_path, "--split-ratio", "1,0,0", "--non-interactive"),
        *("--media-metadata-by-glob", "*.jpg", "--num-workers", 1),
    )
    assert WebdatasetFileStore(tmp_path).get_media_metadata("a/1.jpg") == JPEG_1
