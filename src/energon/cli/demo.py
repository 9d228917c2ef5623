"""`energon demo`: datasets to try energon with, and a program that trains on them."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import click
import numpy as np
from PIL import Image, ImageDraw

from energon.cli.main import echo_json, echo_lines, is_quiet
from energon.cli.options import json_option
from energon.errors import ConfigError
from energon.io.address import is_remote, redact
from energon.io.atomic import write_atomic
from energon.prepare.dataset import prepare_dataset

SHAPES = ("circle", "square", "triangle")
COLORS = {"red": (200, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 210)}
SIZES = {"shapes": 400, "more_shapes": 150}
"""The number of samples of each dataset."""
WRITTEN = ("shapes", "more_shapes", "photos", "blend.yaml", "train.py", "state.json")
"""Files and folders that this command and `make demo` write."""
BLEND = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: ./shapes, weight: 3}
      - {path: ./more_shapes, weight: 1}
"""
PROGRAM = """\
import json
from pathlib import Path

from energon import WorkerConfig, get_savable_loader, get_train_dataset


def open_loader(num_workers):
    return get_savable_loader(
        get_train_dataset(
            Path(__file__).with_name("blend.yaml"),
            worker_config=WorkerConfig.default_worker_config(num_workers=num_workers),
            batch_size=8,
        )
    )


with open_loader(num_workers=2) as loader:
    for step, batch in zip(range(3), loader):
        print(step, batch.image.shape, batch.caption[0])  # ... train on the batch
    state = json.dumps(loader.state_dict())

with open_loader(num_workers=0) as loader:  # resumes with other workers, in the same order
    loader.load_state_dict(json.loads(state))
    batch = next(iter(loader))
    print(3, batch.image.shape, batch.caption[0])
"""


@click.command("demo")
@click.argument("folder", default="demo")
@json_option
def command(folder: str, as_json: bool) -> None:
    """Write two small datasets of captioned images to FOLDER, and a program that reads them.

    The program, train.py, loads batches of blend.yaml, saves the state and resumes. Files of an
    earlier demo are replaced.

    \b
    Example:
      energon demo
      energon demo ./try_energon
    """
    if is_remote(folder):
        raise ConfigError(f"{redact(folder)} is an address; expected a local folder")
    target = Path(folder)
    write_demo(target)
    blend = target / "blend.yaml"
    if as_json:
        echo_json({"path": folder, "blend": str(blend), "samples": SIZES})
    elif not is_quiet():
        sizes = ", ".join(f"{name} with {number} samples" for name, number in SIZES.items())
        echo_lines(
            (
                f"wrote {target}: {sizes}, {blend.name}",
                "Next, try:",
                f"  python {target / 'train.py'}",
                f"  energon info {target / 'shapes'}",
                f"  energon plan {blend} --batch-size 8",
                f"  energon view {blend}",
            )
        )


def write_demo(folder: Path) -> None:
    """Write and prepare the datasets, the metadataset that blends them, and the program."""
    clear(folder)
    for (name, num_samples), prefix in zip(SIZES.items(), "ab", strict=True):
        make_dataset(folder / name, prefix=prefix, num_samples=num_samples, per_shard=50)
        prepare_dataset(
            folder / name,
            split_ratio={"train": 9, "val": 1},
            sample_type="CaptioningSample",
            field_map={"image": "jpg", "caption": "txt"},
            num_workers=1,
        )
    write_atomic(folder / "train.py", PROGRAM)


def clear(folder: Path) -> None:
    """Make the folder, or delete the files of an earlier demo in it.

    Raises:
        ConfigError: If the folder has files of these names that no demo has written.
    """
    folder.mkdir(exist_ok=True)
    blend = folder / "blend.yaml"
    written = [folder / name for name in WRITTEN if (folder / name).exists()]
    if written and not (blend.exists() and blend.read_text() == BLEND):
        raise ConfigError(f"{written[0]} is not of a demo; name another folder")
    write_atomic(blend, BLEND)
    for path in written:
        if path.is_dir():
            shutil.rmtree(path)


def make_dataset(folder: Path, *, prefix: str, num_samples: int, per_shard: int) -> None:
    """Write shards of textured images with a shape on them, a caption and a JSON each."""
    random = np.random.default_rng(len(prefix) + num_samples)
    (folder / "shards").mkdir(parents=True)
    for start in range(0, num_samples, per_shard):
        with tarfile.open(folder / "shards" / f"{start // per_shard:04}.tar", "w") as tar:
            for number in range(start, min(start + per_shard, num_samples)):
                shape = SHAPES[random.integers(3)]
                color = list(COLORS)[random.integers(3)]
                caption = f"a {color} {shape} on paper, number {number}"
                labels = {"shape": shape, "color": color, "license": "CC0"}
                parts = {
                    "jpg": draw(random, shape, COLORS[color], f"{prefix} {number}"),
                    "txt": caption.encode(),
                    "json": json.dumps(labels).encode(),
                }
                add_sample(tar, f"{prefix}_{number:05}", parts)


def add_sample(tar: tarfile.TarFile, key: str, parts: dict[str, bytes]) -> None:
    """Append the parts of a sample to a shard."""
    for part, content in parts.items():
        member = tarfile.TarInfo(f"{key}.{part}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def draw(random: np.random.Generator, shape: str, color: tuple[int, int, int], text: str) -> bytes:
    """Return a JPEG of `shape` on rough paper, with `text` below."""
    image = draw_paper(random, (96, 96))
    pen = ImageDraw.Draw(image)
    x, y = random.integers(14, 40, 2).tolist()
    box = (x, y, x + 36, y + 36)
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "square":
        pen.rectangle(box, fill=color)
    else:
        pen.polygon([(x, y + 36), (x + 36, y + 36), (x + 18, y)], fill=color)
    pen.text((4, 82), text, fill=(30, 30, 30))
    return jpeg_of(image)


def draw_paper(random: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """Return an image of rough paper, of a size in pixels."""
    coarse = random.integers(150, 255, (12, 12, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC))
    noise = random.normal(0, 8, image.shape)
    return Image.fromarray(np.clip(image + noise, 0, 255).astype(np.uint8))


def jpeg_of(image: Image.Image) -> bytes:
    """Return the JPEG of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
