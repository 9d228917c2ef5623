"""The main job from end to end: make data, prepare, blend, train, save, resume elsewhere.

    python examples/demo.py [FOLDER]

Writes the datasets of `energon demo` to FOLDER (default: demo) and trains a small torch model with
two workers. Halfway through, it saves the state of the loader and continues with different numbers
of ranks and workers, in the order that the first run would have had. Finally, it measures how fast
photos are decoded, in this process and in workers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, track
from torch import nn

from energon import (
    CaptioningSample,
    DefaultTaskEncoder,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon.cli.demo import SHAPES, add_sample, draw_paper, jpeg_of, write_demo

BATCH_SIZE = 8
STEPS = 40
console = Console()


@edataclass
class Batch:
    """What a training step takes: images (N, 3, 64, 64) and the shape in each as a number."""

    __key__: list[str]
    images: torch.Tensor
    labels: torch.Tensor


class Encoder(DefaultTaskEncoder):
    """Crops at random, and reads the label out of the caption."""

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        """Return the sample with a random crop of 64 x 64 pixels."""
        _, height, width = sample.image.shape
        top = int(torch.randint(height - 63, ()))
        left = int(torch.randint(width - 63, ()))
        crop = sample.image[:, top : top + 64, left : left + 64]
        return CaptioningSample.derive_from(sample, image=crop, caption=sample.caption)

    def batch(self, samples: list[CaptioningSample]) -> Batch:
        """Return images and labels as tensors."""
        labels = [SHAPES.index(sample.caption.split()[2]) for sample in samples]
        return Batch(
            __key__=[sample.__key__ for sample in samples],
            images=torch.stack([sample.image for sample in samples]),
            labels=torch.tensor(labels),
        )


def make_photos(folder: Path, *, num_samples: int) -> None:
    """Write a shard of images as large as photos, each with a caption."""
    random = np.random.default_rng(0)
    (folder / "shards").mkdir(parents=True)
    with tarfile.open(folder / "shards/0000.tar", "w") as tar:
        for number in track(range(num_samples), f"writing {folder.name}", console=console):
            photo = jpeg_of(draw_paper(random, (1024, 768)))
            add_sample(tar, f"photo_{number:03}", {"jpg": photo, "txt": b"a grey square on paper"})


def prepare(folder: Path) -> None:
    """Prepare a dataset as a user would, with the command line."""
    command = [sys.executable, "-m", "energon", "prepare", str(folder), "--non-interactive"]
    settings = {
        "--split-ratio": "train:1",
        "--sample-type": "CaptioningSample",
        "--field-map": json.dumps({"image": "jpg", "caption": "txt"}),
        "--num-workers": "2",
    }
    subprocess.run([*command, *(word for pair in settings.items() for word in pair)], check=True)


def open_loader(  # noqa: ANN201
    path: Path, *, rank: int, world_size: int, num_workers: int, epoch_length: int = 0
):
    """Return the loader of one rank."""
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers, seed_offset=7)
    dataset = get_train_dataset(
        path,
        worker_config=config,
        batch_size=BATCH_SIZE,
        max_samples_per_sequence=20,
        virtual_epoch_length=epoch_length,
        task_encoder=Encoder(),
    )
    return get_savable_loader(dataset)


def make_model() -> nn.Module:
    """Return a classifier of 64 x 64 images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, len(SHAPES)),
    )


def train(path: Path) -> tuple[dict, list[list[str]]]:
    """Train with two workers; return the state after half the steps, and the keys after it."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = open_loader(path, rank=0, world_size=1, num_workers=2)
    keys: list[list[str]] = []
    state: dict = {}
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=STEPS)
        for step, batch in enumerate(loader):
            if step == STEPS // 2:
                keys.clear()
            keys.append(batch.__key__)
            loss = nn.functional.cross_entropy(model(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.update(task, advance=1, description=f"training, loss {loss.item():.3f}")
            if step + 1 == STEPS // 2:
                state = loader.state_dict()
            if step + 1 == STEPS:
                break
    loader.close()
    return state, keys


def resume(path: Path, state: dict, *, world_size: int, num_workers: int) -> list[list[str]]:
    """Continue from `state` with simulated ranks; return the keys in global order."""
    loaders = [
        open_loader(path, rank=rank, world_size=world_size, num_workers=num_workers)
        for rank in range(world_size)
    ]
    for loader in loaders:
        loader.load_state_dict(state)
    batches = [iter(loader) for loader in loaders]
    # Global batch g is delivered by rank g % world_size, whichever rank delivered those before.
    keys = [next(batches[g % world_size]).__key__ for g in range(STEPS // 2, STEPS)]
    for loader in loaders:
        loader.close()
    return keys


def measure(path: Path, *, seconds: float = 3) -> None:
    """Print how many photos a second the loader delivers, without and with workers."""
    rates = {}
    for num_workers in (0, 2):
        loader = open_loader(
            path, rank=0, world_size=1, num_workers=num_workers, epoch_length=1_000_000
        )
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        start = time.perf_counter()
        count = 0
        while (elapsed := time.perf_counter() - start) < seconds:
            next(batches)
            count += BATCH_SIZE
        rates[num_workers] = count / elapsed
        loader.close()
    report(rates)


def report(rates: dict[int, float]) -> None:
    """Print the photos a second by number of workers, and why two are hardly faster than none."""
    for num_workers, rate in rates.items():
        console.print(f"  {num_workers} workers: {rate:,.0f} photos/s")
    if (gain := rates[2] / rates[0]) < 1.2:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        console.print("  " + why_workers_gain_little(gain, cores, os.getloadavg()[0]))


def why_workers_gain_little(gain: float, cores: int, load: float) -> str:
    """Return why two workers cannot do twice the work of this process."""
    if cores < 2:
        why = "there is one core, which decodes all the time without them, too"
    elif load > cores + 1:
        why = f"other programs use the {cores} cores as well, the load is {load:.1f}"
    else:
        why = f"the {cores} cores do not work independently, as two threads of one core do not"
    return f"Workers make it {gain:.1f} times as fast here: {why}."


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default="demo")
    folder = parser.parse_args().folder
    path = folder / "blend.yaml"
    console.print("writing two datasets, as `energon demo` does")
    write_demo(folder)

    state, expected = train(path)
    text = json.dumps(state)
    (folder / "state.json").write_text(text)
    console.print(f"saved after {STEPS // 2} steps: {len(text)} bytes of JSON")
    for world_size, num_workers in ((1, 0), (2, 1), (3, 2), (8, 0)):
        keys = resume(path, state, world_size=world_size, num_workers=num_workers)
        if keys != expected:
            raise SystemExit(f"the order differs with {world_size} ranks, {num_workers} workers")
        console.print(
            f"resumed with world size {world_size}, {num_workers} workers each: "
            f"the next {len(keys)} batches are identical"
        )
    make_photos(folder / "photos", num_samples=32)
    prepare(folder / "photos")
    console.print("throughput, photos of 1024 x 768 decoded, cropped and batched:")
    measure(folder / "photos")


if __name__ == "__main__":
    main()
