"""Train a classifier on WebDataset shards of images, as a stream and as a prepared dataset.

    python examples/train_imagenet.py SHARDS CHECKPOINT --stream [--steps N]
    python examples/train_imagenet.py SHARDS CHECKPOINT [--steps N]

SHARDS is a folder with tar files of parts jpg and cls, as people make them of ImageNet; if it does
not exist, small ones are created there. `stream` is a pipeline as it is written for webdataset,
with another import. `prepared` reads the same shards, in an order that does not depend on the
number of ranks and workers. The first run without --stream indexes them. The model is a ResNet of
transformers, tiny and untrained. If CHECKPOINT exists, the run continues where it was saved.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from transformers import ConvNextImageProcessorPil, ResNetConfig, ResNetForImageClassification

import energon.webdataset as wds
from energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
)

BATCH_SIZE = 16
CLASSES = 10
PROCESSOR = ConvNextImageProcessorPil(size={"shortest_edge": 32}, crop_pct=1.0)


def preprocess(image: Image.Image) -> torch.Tensor:
    """Return an image as the model takes it, (3, 32, 32)."""
    return PROCESSOR(image, return_tensors="pt")["pixel_values"][0]


def stream(shards: Path) -> Any:
    """Return batches of images and classes, read as a stream."""
    dataset = (
        wds.WebDataset(str(shards / "train-{000000..000003}.tar"), shardshuffle=100)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(preprocess, None)
        .batched(BATCH_SIZE, partial=False)
        .repeat()
    )
    return wds.WebLoader(dataset, batch_size=None, num_workers=0)


@edataclass
class Labeled(Sample):
    """An image and its class."""

    image: torch.Tensor
    label: int


def cook(sample: dict) -> Labeled:
    """Return a sample of the parts jpg and cls."""
    return Labeled(
        **basic_sample_keys(sample), image=preprocess(sample["jpg"]), label=sample["cls"]
    )


class ImageEncoder(DefaultTaskEncoder):
    """Batches labeled images."""

    decoder = SampleDecoder(image_decode="pilrgb")
    cookers = (Cooker(cook),)

    def encode_batch(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch as the stream does."""
        return batch.image, torch.as_tensor(batch.label)


def prepared(shards: Path, num_workers: int) -> Any:
    """Return batches of images and classes of the prepared dataset."""
    dataset = get_train_dataset(
        shards,
        worker_config=WorkerConfig.default_worker_config(num_workers=num_workers, lanes=8),
        batch_size=BATCH_SIZE,
        task_encoder=ImageEncoder(),
    )
    return get_savable_loader(dataset)


def make_model() -> ResNetForImageClassification:
    """Return a tiny ResNet; `from_pretrained("microsoft/resnet-50")` returns that of the Hub."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    config.num_labels = CLASSES
    return ResNetForImageClassification(config)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, save, and return the loss of the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--stream", action="store_true", help="read as webdataset does")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args(arguments)
    if not options.shards.exists():
        make_shards(options.shards)
    if not (options.stream or (options.shards / ".nv-meta").exists()):
        prepare_dataset(options.shards, split_ratio={"train": 1})
    loader = stream(options.shards) if options.stream else prepared(options.shards, options.workers)
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step, loss = 0, torch.zeros(())
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        step = saved["step"]
    batches = iter(loader)
    while step < options.steps:
        images, labels = next(batches)
        loss = functional.cross_entropy(model(pixel_values=images).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**content, "data": loader.state_dict(), "step": step}, options.checkpoint)
    click.echo(f"step {step}: loss {loss.item():.4f}")
    return loss.item()


def make_shards(folder: Path) -> None:
    """Write images of a single shade each, which tells their class."""
    generator = np.random.default_rng(0)
    with wds.ShardWriter(str(folder / "train-%06d.tar"), maxcount=50) as sink:
        for number in range(200):
            label = int(generator.integers(CLASSES))
            image = np.full((40, 48, 3), 25 * label + 10, np.uint8)
            sink.write({"__key__": f"{number:06}", "jpg": image, "cls": label})


if __name__ == "__main__":
    main()
