"""Train a model that captions images, with random crops, padded captions and checkpoints.

    python examples/train_captioner.py DATA CHECKPOINT [--steps N] [--workers N]
    torchrun --nproc-per-node 2 examples/train_captioner.py DATA CHECKPOINT

DATA is a prepared dataset of images and captions; if it does not exist, a small one of colored
shapes is created there. If CHECKPOINT exists, the run continues where it was saved, with any number
of workers and the same crops as an uninterrupted run.
"""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from energon import (
    Batch,
    CaptioningSample,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    ShardWriter,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
)

IMAGE_SIZE, CROPPED_SIZE = 20, 16
BATCH_SIZE = 16
LANES = 4
"""A run can continue on any number of ranks that divides this."""
BEGIN, END = 1, 2
"""Tokens beside bytes; 0 is padding."""
COLORS = ("red", "green", "blue", "gold", "gray")


@edataclass
class Captioned(Sample):
    """An image and the tokens of its caption."""

    image: torch.Tensor
    tokens: torch.Tensor


@edataclass
class CaptionedBatch(Batch):
    """Images, and tokens padded with zeros to the longest caption."""

    image: torch.Tensor
    tokens: torch.Tensor


class CaptionEncoder(DefaultTaskEncoder):
    """Crops images, and turns captions into tokens."""

    decoder = SampleDecoder(image_decode="torchrgb")

    def encode_sample(self, sample: CaptioningSample) -> Captioned:
        """Return the fields of a batch."""
        top, left = self.current_rng.integers(0, IMAGE_SIZE - CROPPED_SIZE + 1, 2).tolist()
        return Captioned.derive_from(
            sample,
            image=sample.image[:, top : top + CROPPED_SIZE, left : left + CROPPED_SIZE],
            tokens=torch.tensor([BEGIN, *sample.caption.encode(), END]),
        )

    def batch(self, samples: list[Captioned]) -> CaptionedBatch:
        """Return a batch."""
        return CaptionedBatch.from_samples(samples)


class Model(nn.Module):
    """A GRU that writes a caption, beginning with what a linear layer sees."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.image = nn.Linear(3 * CROPPED_SIZE**2, width)
        self.tokens = nn.Embedding(256, width)
        self.text = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 256)

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of the next tokens, (batch, length, 256)."""
        seen = self.image(image.flatten(1))[None]
        hidden, _ = self.text(self.tokens(tokens), seen)
        return self.out(hidden)

    @torch.no_grad()
    def caption(self, image: torch.Tensor, *, limit: int = 24) -> str:
        """Return the likeliest caption of an image."""
        tokens = [BEGIN]
        while tokens[-1] != END and len(tokens) < limit:
            scores = self(image[None], torch.tensor([tokens]))
            tokens.append(int(scores[0, -1].argmax()))
        return bytes(token for token in tokens if token > END).decode(errors="replace")


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, save, and return the loss of the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args(arguments)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    if rank == 0 and not options.data.exists():
        make_data(options.data)
    if world_size > 1:
        torch.distributed.barrier()
    config = WorkerConfig(
        rank=rank, world_size=world_size, num_workers=options.workers, lanes=LANES
    )
    dataset = get_train_dataset(
        options.data,
        worker_config=config,
        batch_size=BATCH_SIZE,
        task_encoder=CaptionEncoder(),
    )
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, loss = 0, 0.0
    with get_savable_loader(dataset) as loader:
        if options.checkpoint.exists():
            saved = torch.load(options.checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.restore_state_global(saved["data"])
            step = saved["step"]
        batches = iter(loader)
        while step < options.steps:
            batch = next(batches)
            loss = train_step(model, batch)
            share_gradients(model, world_size)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        data = loader.save_state_global(global_dst_rank=0)
        if rank == 0:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**content, "data": data, "step": step}, options.checkpoint)
            click.echo(f"step {step}: loss {loss:.4f}")
            click.echo(f"a caption: {model.caption(next(batches).image[0])!r}")
    if world_size > 1:
        torch.distributed.destroy_process_group()
    return loss


def share_gradients(model: Model, world_size: int) -> None:
    """Replace the gradients by their mean over all ranks."""
    for each in model.parameters() if world_size > 1 else ():
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        torch.distributed.all_reduce(each.grad)
        each.grad /= world_size


def train_step(model: Model, batch: CaptionedBatch) -> float:
    """Add the gradients of a batch; return its loss."""
    scores = model(batch.image, batch.tokens[:, :-1])
    labels = batch.tokens[:, 1:]
    loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=0)
    loss.backward()
    return loss.item()


def make_data(folder: Path) -> None:
    """Write images of one color, with captions that say so."""
    generator = np.random.default_rng(0)
    with ShardWriter(folder / "%03d.tar", maxcount=250) as writer:
        for number in range(1000):
            color = str(generator.choice(COLORS))
            image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), color)
            image.save(buffer := io.BytesIO(), "PNG")
            caption = f"a {color} square"
            writer.write({"__key__": f"{number:04}", "png": buffer.getvalue(), "txt": caption})
    prepare_dataset(
        folder,
        split_ratio={"train": 1},
        sample_type="CaptioningSample",
        field_map={"image": "png", "caption": "txt"},
    )


if __name__ == "__main__":
    main()
