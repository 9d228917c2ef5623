"""Examples of dataset classes and sample types: the names that descriptions and programs use."""

from __future__ import annotations

import json

import pytest
import torch

import megatron.energon
from megatron.energon import (
    BaseCoreDataset,
    BaseWebdataset,
    CaptioningSample,
    CaptioningWebdataset,
    DefaultDecoderWebdataset,
    DefaultGenericWebdataset,
    ImageSample,
    ImageWebdataset,
    OCRSample,
    OCRWebdataset,
    VQASample,
    VQAWebdataset,
    WorkerConfig,
    get_loader,
    get_train_dataset,
    get_val_dataset,
)
from tests.datasets import jpeg, make_captions, write_shard

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)
CLASSES = {
    CaptioningWebdataset: (CaptioningSample, "image caption"),
    ImageWebdataset: (ImageSample, "image"),
    OCRWebdataset: (
        OCRSample,
        "image text lines_boxes lines_text words_boxes words_text chars_boxes chars_text",
    ),
    VQAWebdataset: (VQASample, "image context answers"),
}
PARTS = {
    "image": "jpg",
    "caption": "json[caption]",
    "text": "json[text]",
    "context": "json[context]",
    "answers": "json[answers]",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = make_captions(tmp_path_factory.mktemp("types") / "ds", [3])
    texts = {"caption": "a", "text": "b", "context": "c", "answers": ["d"]}
    parts = {"jpg": jpeg(0), "txt": b"a", "json": json.dumps(texts).encode()}
    write_shard(root / "shards/000.tar", [(f"k{n}", parts) for n in range(3)])
    megatron.energon.BaseWebdatasetFactory.prepare_dataset(
        root, ["shards/000.tar"], split_parts_patterns=[("train", ".*"), ("val", ".*")], workers=1
    )
    return root


@pytest.mark.parametrize("kind", CLASSES)
def test_the_classes_build_on_one_another(kind):
    order = (DefaultDecoderWebdataset, DefaultGenericWebdataset, BaseWebdataset, BaseCoreDataset)
    for base in order:
        assert issubclass(kind, base)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_description_names_the_class_of_a_dataset(root, kind):
    sample_type, names = CLASSES[kind]
    lines = [f"  {name}: {PARTS[name]}\n" for name in names.split() if name in PARTS]
    (root / ".nv-meta" / f"{kind.__name__}.yaml").write_text(
        f"__module__: megatron.energon\n__class__: {kind.__name__}\nfield_map:\n{''.join(lines)}"
    )
    dataset = get_val_dataset(
        root,
        worker_config=CONFIG,
        batch_size=None,
        dataset_config=f"{kind.__name__}.yaml",
    )
    sample = next(iter(get_loader(dataset)))
    assert isinstance(sample, sample_type)
    assert type(sample).__name__ == sample_type.__name__
    assert sample.__key__ == "k0"
    # Images are always (C, H, W).
    assert sample.image.shape == (3, 8, 12)


def test_datasets_are_iterated_and_have_no_numbers(root):
    for dataset in (
        get_val_dataset(root, worker_config=CONFIG, batch_size=1),
        get_train_dataset(root, worker_config=CONFIG, batch_size=1, virtual_epoch_length=5),
    ):
        assert isinstance(dataset, torch.utils.data.IterableDataset)
        assert len(list(dataset)) in (3, 5)
        with pytest.raises(TypeError):
            dataset[0]
