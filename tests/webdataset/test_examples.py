"""The examples of webdataset's README, on local files and a local web server."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from itertools import islice
from random import randrange

import numpy as np
import pytest
import torch
from PIL import Image

import energon.webdataset as wds
from tests.servers.web import web_server
from tests.webdataset.shards import tar_bytes

SIZE = 48
PATCH = 16


def png(seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    for shard in range(4):
        members = []
        for number in range(shard * 5, shard * 5 + 5):
            label = {"annotations": [{"category_id": number % 3}] if number % 4 else []}
            members += [
                (f"{number:06}.json", json.dumps(label).encode()),
                (f"{number:06}.png", png(number)),
            ]
        (folder / f"train-{shard:06}.tar").write_bytes(tar_bytes(members))
    return folder


@pytest.fixture(scope="module")
def url(folder):
    with web_server(folder) as server:
        yield f"{server.url}/train-{{000000..000003}}.tar"


def preprocess(sample):
    image, label = sample
    try:
        label = label["annotations"][0]["category_id"]
    except Exception:
        label = 0
    return 1 - image, label


def get_patches(src):
    for image, label in src:
        h, w = image.shape[:2]
        for _ in range(16):
            y, x = randrange(h - PATCH), randrange(w - PATCH)
            yield image[y : y + PATCH, x : x + PATCH], label


def test_a_fluid_pipeline_over_a_web_server(url):
    dataset = wds.WebDataset(url).shuffle(1000).decode("rgb").to_tuple("png", "json")
    assert isinstance(dataset, torch.utils.data.IterableDataset)
    assert isinstance(dataset, torch.utils.data.Dataset)
    for image, label in dataset:
        assert image.shape == (SIZE, SIZE, 3)
        assert image.dtype == np.float32
        assert "annotations" in label
        break
    dataset = dataset.map(preprocess)
    assert {label for _, label in dataset} == {0, 1, 2}
    dataset = dataset.compose(get_patches).shuffle(10000)
    patches = list(dataset)
    assert len(patches) == 20 * 16
    assert patches[0][0].shape == (PATCH, PATCH, 3)


def test_a_complete_pipeline(url):
    dataset = wds.WebDataset(url).shuffle(1000).decode("rgb").to_tuple("png", "json")
    dataset = dataset.map(preprocess).compose(get_patches).batched(16)
    with wds.WebLoader(dataset, num_workers=2, batch_size=None) as first:
        loader = first.unbatched().shuffle(1000).batched(12)
        batches = list(loader)
    assert batches[0][0].shape == (12, PATCH, PATCH, 3)
    assert sum(len(batch[1]) for batch in batches) == 20 * 16


def patches_of_samples(src):
    for sample in src:
        yield from (
            {"__key__": sample["__key__"], "big.jpg": patch, "json": sample["json"]}
            for patch, _ in get_patches([(sample["png"].permute(1, 2, 0), None)])
        )


def test_an_explicit_pipeline(url):
    dataset = wds.DataPipeline(
        wds.SimpleShardList(url),
        wds.shuffle(100),
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.shuffle(1000),
        wds.decode("torchrgb"),
        patches_of_samples,
        wds.shuffle(10000),
        wds.to_tuple("big.jpg", "json"),
        wds.batched(16),
    )
    batch = next(iter(dataset))
    assert batch[0].shape == (16, PATCH, PATCH, 3)
    assert len(batch[1]) == 16


def test_decoding_with_a_function_of_samples(url):
    def my_sample_decoder(sample):
        result = {"__key__": sample["__key__"]}
        for key, value in sample.items():
            if key == "png" or key.endswith(".png"):
                result[key] = np.asarray(Image.open(io.BytesIO(value)))
        return result

    dataset = wds.Processor(wds.map, my_sample_decoder)(wds.WebDataset(url))
    assert next(iter(dataset))["png"].shape == (SIZE, SIZE, 3)


def test_decoders_of_ones_own(url):
    def my_png_decoder(key, value):
        if not key.endswith(".png"):
            return None
        assert isinstance(value, bytes)
        return np.asarray(Image.open(io.BytesIO(value)))

    dataset = wds.WebDataset(url)
    decoded = wds.Decoder(my_png_decoder, wds.torch_video, wds.torch_audio)(dataset)
    sample = next(iter(decoded))
    assert sample["png"].shape == (SIZE, SIZE, 3)
    assert "annotations" in sample["json"]

    def my_decoder(value):
        return np.asarray(Image.open(io.BytesIO(value)))

    decoded = wds.Decoder(wds.handle_extension(".png", my_decoder))(dataset)
    assert next(iter(decoded))["png"].shape == (SIZE, SIZE, 3)


SPECIFICATION = """\
dataset:
  - shards: train-{000000..000001}.tar
    scaleprob: 0.3
  - shards: train-000002.tar
    scale: [1.0, 3.0]
  - shards: train-000003.tar
    extensions: png
    scale: [0.3, 1.0]
"""


def test_a_specification_in_yaml(folder):
    (folder / "spec.yaml").write_text(SPECIFICATION)
    samples = list(wds.WebDataset(str(folder / "spec.yaml")))
    assert len(samples) == 20
    assert samples[0]["__options__"] == {"scaleprob": 0.3}
    assert samples[10]["__options__"] == {"scale": (1.0, 3.0)}
    assert "json" in samples[14]
    assert "json" not in samples[15]
    mixed = wds.mixture(str(folder / "spec.yaml"), longest=True)
    assert sorted(s["__key__"] for s in mixed) == [f"{n:06}" for n in range(20)]


@pytest.mark.parametrize("variable", ["WDS_REWRITE", "GOPEN_REWRITE"])
def test_addresses_are_rewritten_by_the_environment(folder, monkeypatch, variable):
    monkeypatch.setenv(variable, f"gs://={folder}/")
    assert len(list(wds.WebDataset("gs://train-000000.tar"))) == 5
    monkeypatch.setenv(variable, f"gs://=pipe:cat {folder}/")
    dataset = wds.WebDataset("gs://train-000000.tar", allow=("shell",))
    assert len(list(dataset)) == 5


def test_objects_are_asked_of_aistore(folder, tmp_path, monkeypatch):
    target = tmp_path / "v1" / "objects" / "bucket"
    target.mkdir(parents=True)
    (target / "a.tar").write_bytes((folder / "train-000000.tar").read_bytes())
    with web_server(tmp_path) as server:
        monkeypatch.setenv("AIS_ENDPOINT", server.url)
        monkeypatch.setenv("USE_AIS_FOR", "gs")
        assert len(list(wds.WebDataset("gs://bucket/a.tar"))) == 5


def test_a_shard_that_was_copied(folder):
    path = str(folder / "train-000000.tar")
    dataset = wds.DataPipeline(wds.SimpleShardList(path), wds.tarfile_to_samples())
    shown = repr(next(iter(dataset)))
    assert shown.startswith(f"{{'__key__': '000000', '__url__': '{path}', 'json': b'")


def test_archives_of_tar_itself(tmp_path):
    (tmp_path / "dataset").mkdir()
    for number in range(3):
        (tmp_path / f"dataset/{number}.txt").write_text("text")
        (tmp_path / f"dataset/{number}.cls").write_text(str(number))
    command = ["tar", "--sort=name", "-cf", "dataset.tar", "dataset/"]
    subprocess.run(command, cwd=tmp_path, check=True)
    dataset = wds.WebDataset(str(tmp_path / "dataset.tar")).decode()
    assert list(dataset.to_tuple("__key__", "txt", "cls")) == [
        (f"dataset/{n}", "text", n) for n in range(3)
    ]


def augment_wds(input, output, maxcount=999999999, allow=()):
    src = wds.DataPipeline(
        wds.SimpleShardList(input),
        wds.tarfile_to_samples(allow=allow),
        wds.decode("pil"),
        wds.to_tuple("__key__", "jpg;png", "json"),
        wds.map_tuple(None, lambda image: torch.from_numpy(np.array(image) / 255), None),
    )
    with wds.TarWriter(output) as dst:
        for key, image, _ in islice(src, 0, maxcount):
            image = image.numpy()
            image -= np.amin(image)
            image /= np.amax(image)
            dst.write({"__key__": key, "png": image, "cls": 0})


def test_offline_augmentation_of_a_shard(folder, url, tmp_path):
    output = str(tmp_path / "_temp.tar")
    address = url.replace("{000000..000003}", "000000")
    augment_wds(f"pipe:curl -L -s {address} || true", output, maxcount=5, allow=("shell",))
    listed = subprocess.run(["tar", "tf", output], capture_output=True, text=True, check=True)
    expected = [f"{n:06}.{field}" for n in range(5) for field in ("cls", "png")]
    assert listed.stdout.split() == expected


def test_the_old_switch_allows_everything(folder, monkeypatch):
    monkeypatch.setenv("WDS_SECURE", "0")
    assert len(list(wds.WebDataset(f"pipe:cat {folder}/train-000000.tar"))) == 5


def test_standard_input_is_a_shard(folder):
    program = (
        "import energon.webdataset as wds\n"
        "print(len(list(wds.WebDataset('-'))))\n"
        "import sys\n"
        "assert 'torch' not in sys.modules"
    )
    with open(folder / "train-000000.tar", "rb") as shard:
        done = subprocess.run(
            [sys.executable, "-c", program], stdin=shard, capture_output=True, text=True
        )
    assert done.stdout.strip() == "5", done.stderr


@pytest.mark.parametrize("suffix", ["tgz", "tar.gz", "tar.bz2", "tar.xz", "tar.zst"])
def test_samples_in_one_field_of_compressed_archives(tmp_path, suffix):
    path = str(tmp_path / f"small.{suffix}")
    with wds.TarWriter(path) as writer:
        for number in range(4):
            writer.write({"__key__": str(number), "mp": {"n": number, "text": "x" * number}})
    dataset = wds.WebDataset(path).decode().map(lambda sample: sample["mp"])
    assert [sample["n"] for sample in dataset] == [0, 1, 2, 3]
    assert os.path.getsize(path) < 1000
