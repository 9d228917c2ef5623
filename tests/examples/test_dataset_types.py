"""Examples of dataset classes and sample types: the names that descriptions and programs use."""

from __future__ import annotations

import json

import pytest
import torch

import megatron.energon
from megatron.energon import (
    BaseCoreDataset,
    BaseWebdataset,
    BatchDataset,
    BlendDataset,
    CaptioningSample,
    CaptioningWebdataset,
    DefaultDecoderWebdataset,
    DefaultGenericWebdataset,
    DefaultTaskEncoder,
    GroupBatchDataset,
    ImageSample,
    ImageWebdataset,
    MixBatchDataset,
    OCRSample,
    OCRWebdataset,
    RepeatDataset,
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


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blend")
    for name in "ab":
        make_captions(folder / name, [7], prefix=name)
    entries = [{"path": name, "weight": 1} for name in "ab"]
    (folder / "blend.yaml").write_text(json.dumps({
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": entries}},
    }))  # fmt: skip
    return folder / "blend.yaml"


class WholeBatches(DefaultTaskEncoder):
    """Full batches of one dataset at a time."""

    def build_train_datasets(self, *, datasets, worker_config, batch_size, **settings):
        batches = [
            (
                BatchDataset(
                    RepeatDataset(each.dataset.build(), worker_config=worker_config),
                    batch_size=batch_size,
                    batcher=self.batch,
                    worker_config=worker_config,
                ),
                each.weight,
            )
            for each in datasets
        ]
        return BlendDataset(*batches, worker_config=worker_config)


class MixedBatches(DefaultTaskEncoder):
    """Batches in which datasets are mixed."""

    def build_train_datasets(self, *, datasets, worker_config, batch_size, **settings):
        samples = [
            (RepeatDataset(each.dataset.build(), worker_config=worker_config), each.weight)
            for each in datasets
        ]
        return MixBatchDataset(
            *samples, batch_size=batch_size, batch_mix_fn=self.batch, worker_config=worker_config
        )


class Groups(DefaultTaskEncoder):
    """A batch as soon as there are enough samples of a group."""

    def build_train_datasets(self, *, datasets, worker_config, batch_size, **settings):
        samples = RepeatDataset(
            BlendDataset(
                *((each.dataset.build(), 1) for each in datasets), worker_config=worker_config
            ),
            worker_config=worker_config,
        )
        return GroupBatchDataset(
            samples,
            fixed_batch_size=batch_size,
            sample_group_key=lambda sample: (sample.__key__[0], None),
            batcher=self.batch,
            worker_config=worker_config,
        )


@pytest.mark.parametrize(
    ("encoder", "pure"), [(WholeBatches(), True), (MixedBatches(), False), (Groups(), True)]
)
def test_wrappers_decide_what_a_batch_is_made_of(blend, encoder, pure):
    dataset = get_train_dataset(blend, worker_config=CONFIG, batch_size=4, task_encoder=encoder)
    loader = iter(get_loader(dataset))
    batches = [{key[0] for key in next(loader).__key__} for _ in range(12)]
    assert all(len(names) == 1 for names in batches) is pure
    assert set.union(*batches) == {"a", "b"}
