"""Train speech recognition: WAV files with transcripts, batches of similar length, CTC.

    python examples/train_asr.py DATA CHECKPOINT [--steps N] [--workers N]
    torchrun --nproc-per-node 2 examples/train_asr.py DATA CHECKPOINT

DATA is a prepared dataset of parts wav and txt; if it does not exist, a small one is created there,
in which each letter is a tone. All batches have about the same number of frames: many short
recordings, or a few long ones. If CHECKPOINT exists, the run continues where it was saved.
"""

from __future__ import annotations

import argparse
import io
import os
import wave
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from energon import (
    Batch,
    Cooker,
    DefaultTaskEncoder,
    Sample,
    ShardWriter,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
)

RATE = 8000
HOP = 200
"""Samples of a frame."""
LANES = 4
"""A run can continue on any number of ranks that divides this."""
LETTERS = "abcdef"
FRAMES_OF_A_BATCH = 960
BUCKETS = (60, 120, 240)
"""Most frames of a recording in each group of batches; longer ones are left out."""


@edataclass
class Recording(Sample):
    """The spectrum of a recording, and its letters as numbers from 1 on."""

    frames: torch.Tensor
    """(length, HOP // 2 + 1)."""
    letters: torch.Tensor


@edataclass
class Recordings(Batch):
    """A batch, padded with zeros; lengths say what is not padding."""

    frames: torch.Tensor
    letters: torch.Tensor
    frame_counts: torch.Tensor
    letter_counts: torch.Tensor


def cook(sample: dict) -> Recording:
    """Return a sample of the parts wav and txt."""
    with wave.open(io.BytesIO(sample["wav"])) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    signal = torch.from_numpy(sound[: len(sound) // HOP * HOP].astype(np.float32) / 32768)
    spectrum = torch.fft.rfft(signal.view(-1, HOP)).abs()
    text = sample["txt"].decode()
    return Recording(
        **basic_sample_keys(sample),
        frames=torch.log1p(spectrum),
        letters=torch.tensor([LETTERS.index(letter) + 1 for letter in text]),
    )


class SpeechEncoder(DefaultTaskEncoder):
    """Groups recordings by length."""

    cookers = (Cooker(cook),)
    decoder = None

    def batch_group_criterion(self, sample: Recording) -> tuple[int, int]:
        """Return the bucket of a recording, and how many make a batch of it."""
        bucket = next(limit for limit in BUCKETS if len(sample.frames) <= limit)
        return bucket, FRAMES_OF_A_BATCH // bucket

    def batch(self, samples: list[Recording]) -> Recordings:
        """Return a batch."""
        return Recordings.from_samples(
            samples,
            frame_counts=torch.tensor([len(sample.frames) for sample in samples]),
            letter_counts=torch.tensor([len(sample.letters) for sample in samples]),
        )


class Model(nn.Module):
    """Scores of the letters, and of none, for each frame."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(HOP // 2 + 1, width), nn.GELU(), nn.Linear(width, len(LETTERS) + 1)
        )

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return logarithms of probabilities, (batch, length, letters)."""
        return self.layers(frames).log_softmax(-1)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, save, and return the loss of the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=40)
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
        batch_size=None,  # the group says
        task_encoder=SpeechEncoder(),
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
            if rank == 0 and step % 20 == 0:
                shape = tuple(batch.frames.shape[:2])
                click.echo(f"step {step}: {shape[0]} recordings of {shape[1]} frames")
        data = loader.save_state_global(global_dst_rank=0)
        if rank == 0:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**content, "data": data, "step": step}, options.checkpoint)
    if rank == 0:
        click.echo(f"step {step}: loss {loss:.4f}")
    if world_size > 1:
        torch.distributed.destroy_process_group()
    return loss


def share_gradients(model: Model, world_size: int) -> None:
    """Replace the gradients by their mean over all ranks."""
    for each in model.parameters() if world_size > 1 else ():
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        torch.distributed.all_reduce(each.grad)
        each.grad /= world_size


def train_step(model: Model, batch: Recordings) -> float:
    """Add the gradients of a batch; return its loss."""
    scores = model(batch.frames).transpose(0, 1)
    loss = functional.ctc_loss(scores, batch.letters, batch.frame_counts, batch.letter_counts)
    loss.backward()
    return loss.item()


def make_data(folder: Path) -> None:
    """Write recordings of words, of which each letter is a tone."""
    generator = np.random.default_rng(0)
    with ShardWriter(folder / "%03d.tar", maxcount=50) as writer:
        for number in range(200):
            letters = generator.integers(len(LETTERS), size=generator.integers(2, 20))
            tones = [400 * (letter + 1) for letter in letters]
            time = np.arange(RATE // 4) / RATE
            sound = np.concatenate([np.sin(2 * np.pi * tone * time) for tone in tones])
            with wave.open(buffer := io.BytesIO(), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(RATE)
                file.writeframes((20_000 * sound).astype(np.int16).tobytes())
            text = "".join(LETTERS[letter] for letter in letters)
            writer.write({"__key__": f"{number:04}", "wav": buffer.getvalue(), "txt": text})
    prepare_dataset(folder, split_ratio={"train": 1}, sample_type="CrudeWebdataset")


if __name__ == "__main__":
    main()
