"""Examples of preparing data: shards to write, questions to answer, files on disk."""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import tarfile
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from PIL import Image

from megatron.energon import (
    CaptioningSample,
    CrudeSample,
    OCRSample,
    WorkerConfig,
    get_loader,
    get_val_dataset,
)
from tests.cli.test_prepare_assistant import Terminal
from tests.commands import run
from tests.datasets import jpeg, write_shard

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


def prepare_crude(path, *split_parts):
    """Prepare crude samples with options instead of answers."""
    parts = [word for part in split_parts for word in ("--split-parts", part)]
    words = ("--sample-type", "CrudeWebdataset", "--non-interactive", "--num-workers", "1")
    done = run("prepare", path, *parts, *words)
    assert done.exit_code == 0, done.output


def captions(numbers):
    return [
        (
            f"sample_{n:04}",
            {
                "jpg": jpeg(n),
                "txt": f"caption {n}".encode(),
                "detail.json": json.dumps({"n": n}).encode(),
                "json": json.dumps({"caption": f"My nice image {n}"}).encode(),
            },
        )
        for n in numbers
    ]


def load(path, split_part="train", **settings):
    dataset = get_val_dataset(
        path, split_part=split_part, worker_config=CONFIG, batch_size=None, **settings
    )
    return list(get_loader(dataset))


# Writing shards

WRITER = """
import {module} as wds


if __name__ == '__main__':
    # Wherever your dataset comes from
    my_dataset = MY_DATASET

    with wds.ShardWriter("parts/data-%d.tar", maxcount=10000) as shard_writer:
        for key, data in my_dataset:
            sample = {{
                "__key__": key,
                "png": data['image'],
            }}
            shard_writer.write(sample)
"""


def test_shards_are_written_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    images = [np.full((4, 6, 3), n, np.uint8) for n in range(3)]
    mine = [(f"key{n}", {"image": image}) for n, image in enumerate(images)]
    program = WRITER.format(module="energon.webdataset")
    exec(program, {"__name__": "__main__", "MY_DATASET": mine})
    terminal = Terminal(tmp_path)
    terminal.answer("Split ratio", "1,0,0")
    terminal.answer("Sample type", "Crude sample")
    terminal.answer("write this to", "y")
    assert terminal.end()[1] == 0
    found = load(tmp_path)
    assert [sample["__key__"] for sample in found] == ["key0", "key1", "key2"]
    assert [round(float(sample["png"].mean()) * 255) for sample in found] == [0, 1, 2]


# Splits


@pytest.mark.slow
@pytest.mark.parametrize("access", ["txt", "json[caption]"])
def test_the_assistant_splits_by_ratio_and_maps_fields(tmp_path, access):
    for shard in range(10):
        numbers = range(2 * shard, 2 * shard + 2)
        write_shard(tmp_path / f"shard_{shard:04}.tar", captions(numbers))
    terminal = Terminal(tmp_path)
    terminal.answer("Split ratio", "8,1,1")
    terminal.answer("Sample type", "CaptioningWebdataset")
    terminal.answer("Map fields to parts?", "Yes")
    terminal.answer("image (torch.Tensor)", "jpg")
    terminal.answer("caption (str)", access)
    terminal.answer("write this to", "y")
    assert terminal.end()[1] == 0
    sizes = {part: len(load(tmp_path, part)) for part in ("train", "val", "test")}
    assert sizes == {"train": 16, "val": 2, "test": 2}
    sample = load(tmp_path)[0]
    assert isinstance(sample, CaptioningSample)
    assert sample.image.shape == (3, 8, 12)
    assert sample.caption == ("caption 0" if access == "txt" else "My nice image 0")


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        ("{}_shard_{:04}.tar", ["train:shards/train_.*", "val:shards/val_.*"]),
        ("{}/shard_{:05}.tar", ["train:shards/train/.*", "val:shards/val/.*"]),
    ],
)
def test_splits_are_told_by_prefix_or_folder(tmp_path, monkeypatch, names, patterns):
    for number, part in enumerate(["train", "train", "val"]):
        path = tmp_path / "shards" / names.format(part, number)
        write_shard(path, captions([2 * number, 2 * number + 1]))
    monkeypatch.chdir(tmp_path)
    prepare_crude("./", *patterns)
    assert [len(load(tmp_path, part)) for part in ("train", "val")] == [4, 2]
    assert isinstance(load(tmp_path)[0], CrudeSample)


# Code beside a dataset

SAMPLE_LOADER = """
import torch


def sample_loader(raw: dict) -> dict:
    return dict(
        __key__=raw["__key__"],
        image=raw["jp2"],
        text="\\n".join(line["text"] for line in raw["mp"]["lines"]),
        lines_boxes=torch.tensor(
            [
                (line["l"], line["t"], line["r"] - line["l"], line["b"] - line["t"])
                for line in raw["mp"]["lines"]
            ],
            dtype=torch.int64,
        ),
        lines_text=[line["text"] for line in raw["mp"]["lines"]],
        words_boxes=torch.tensor(
            [
                (line["l"], line["t"], line["r"] - line["l"], line["b"] - line["t"])
                for line in raw["mp"]["words"]
            ],
            dtype=torch.int64,
        ),
        words_text=[line["text"] for line in raw["mp"]["words"]],
        chars_boxes=torch.tensor(
            [
                (line["l"], line["t"], line["r"] - line["l"], line["b"] - line["t"])
                for line in raw["mp"]["chars"]
            ],
            dtype=torch.int64,
        ),
        chars_text=[line["text"] for line in raw["mp"]["chars"]],
    )


def part_filter(part: str) -> bool:
    return part in ("jp2", "mp")
"""
PAGE = {
    "identifier": "componentsbenefi00andr",
    "pageno": 25,
    "size": {"w": 2286, "h": 3179},
    "lines": [
        {"l": 341, "t": 569, "b": 609, "r": 1974, "text": "CHAPTER 4  ADVANCED TRAFFIC CONTROL"},
        {"l": 401, "t": 770, "b": 815, "r": 2065, "text": "A variety of traffic control systems"},
    ],
    "words": [
        {"l": 341, "t": 577, "b": 609, "r": 544, "text": "CHAPTER"},
        {"l": 583, "t": 578, "b": 607, "r": 604, "text": "4"},
    ],
    "chars": [{"t": 579, "b": 609, "l": 341, "r": 363, "text": "C"}],
}


@pytest.fixture
def pages(tmp_path):
    """A dataset of scanned pages, with its sample loader."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), (255, 0, 0)).save(buffer, "JPEG2000")
    samples = []
    for page in ("0025", "0075"):
        key = f"636f6d706f6e656e747362656e6566693030616e6472({page})"
        parts = {
            "jp2": buffer.getvalue(),
            "lines.png": jpeg(1),
            "mp": msgpack.packb(PAGE),
            "words.png": jpeg(2),
        }
        samples.append((key, parts))
    write_shard(tmp_path / "parts/segs-000000.tar", samples)
    prepare_crude(tmp_path, "train:.*")
    meta = tmp_path / ".nv-meta"
    (meta / "sample_loader.py").write_text(SAMPLE_LOADER)
    (meta / "dataset.yaml").write_text(
        """
sample_type:
  __module__: megatron.energon
  __class__: OCRSample
sample_loader: sample_loader.py:sample_loader
part_filter: sample_loader.py:part_filter
"""
    )
    return tmp_path


def test_a_sample_loader_reads_a_format_of_its_own(pages):
    first, second = load(pages, allow=("code",))
    assert isinstance(first, OCRSample)
    assert first.__key__.endswith("(0025)")
    assert second.__key__.endswith("(0075)")
    assert first.text.splitlines()[0].startswith("CHAPTER 4")
    assert first.lines_boxes.tolist() == [[341, 569, 1633, 40], [401, 770, 1664, 45]]
    assert first.words_text == ["CHAPTER", "4"]
    assert first.chars_boxes.dtype == torch.int64
    assert first.chars_text == ["C"]
    assert first.image.shape == (3, 6, 8)


def test_the_same_dataset_can_be_crude(pages):
    (pages / ".nv-meta" / "crude.yaml").write_text(
        """
__module__: megatron.energon
__class__: CrudeWebdataset
subflavors:
  example_crude_selector: foobar
"""
    )
    first, _ = load(pages, dataset_config="crude.yaml")
    assert first["mp"] == PAGE
    assert first["__subflavors__"] == {"example_crude_selector": "foobar"}


# Files on disk

DATASET_YAML = """
sample_type:
  __module__: megatron.energon
  __class__: CaptioningSample
field_map:
  image: jpg
  caption: txt
"""
SPLIT_YAML = """
exclude: []
split_parts:
  train:
  - shards/shard_000.tar
  - shards/shard_001.tar
  val:
  - shards/shard_002.tar
  test:
  - shards/shard_003.tar
"""
EXCLUDES = """
exclude:
  - shards/shard_004.tar
  - shards/shard_001.tar/000032
  - shards/shard_001.tar/000032
split_parts:
  train:
  - shards/shard_000.tar
  - shards/shard_001.tar
  - shards/shard_004.tar
"""
COUNTS = {"shards/shard_000.tar": 3, "shards/shard_001.tar": 4, "shards/shard_002.tar": 2,
          "shards/shard_003.tar": 1, "shards/shard_004.tar": 2}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """Shards and indexes; the files below `.nv-meta` are written by hand."""
    number = 29
    for shard, count in COUNTS.items():
        samples = [
            (f"{n:06}", {"jpg": jpeg(n), "txt": b"text"}) for n in range(number, number + count)
        ]
        write_shard(tmp_path / shard, samples)
        number += count
    prepare_crude(tmp_path, "train:.*")
    meta = tmp_path / ".nv-meta"
    (meta / "dataset.yaml").write_text(DATASET_YAML)
    (meta / "split.yaml").write_text(SPLIT_YAML)
    return tmp_path


def keys(path, split_part):
    return [sample.__key__ for sample in load(path, split_part)]


def test_descriptions_and_splits_written_by_hand(files):
    assert {path.name for path in (files / ".nv-meta").iterdir()} >= {
        "dataset.yaml",
        "split.yaml",
        ".info.json",
        "index.sqlite",
        "index.uuid",
    }
    assert isinstance(load(files)[0], CaptioningSample)
    assert [len(keys(files, part)) for part in ("train", "val", "test")] == [7, 2, 1]


def test_shards_and_samples_are_excluded(files):
    (files / ".nv-meta" / "split.yaml").write_text(EXCLUDES)
    assert keys(files, "train") == [f"{n:06}" for n in (29, 30, 31, 33, 34, 35)]


def test_the_index_says_at_which_byte_everything_is(tmp_path):
    sizes = {"json": 31, "png": 30168, "txt": 16}
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for key in ("00000", "00001", "00002"):
            for part, size in sizes.items():
                member = tarfile.TarInfo(f"{key}.{part}")
                member.size, member.mtime = size, 0.5
                tar.addfile(member, io.BytesIO(bytes(size)))
    prepare_crude(tmp_path, "train:.*")
    with contextlib.closing(sqlite3.connect(tmp_path / ".nv-meta" / "index.sqlite")) as index:
        columns = "tar_file_id, sample_key, sample_index, byte_offset, byte_size"
        samples = index.execute(f"SELECT {columns} FROM samples ORDER BY 3").fetchall()
        columns = "tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size"
        parts = index.execute(f"SELECT {columns} FROM sample_parts ORDER BY 4").fetchall()
    assert samples == [
        (0, "00000", 0, 0, 35840),
        (0, "00001", 1, 35840, 35840),
        (0, "00002", 2, 71680, 35840),
    ]
    assert parts[:6] == [
        (0, 0, "json", 1536, 31),
        (0, 0, "png", 3584, 30168),
        (0, 0, "txt", 35328, 16),
        (0, 1, "json", 37376, 31),
        (0, 1, "png", 39424, 30168),
        (0, 1, "txt", 71168, 16),
    ]
    content = Path(tmp_path / "0.tar").read_bytes()
    assert content[37376 - 512 :].startswith(b"00001.json")
