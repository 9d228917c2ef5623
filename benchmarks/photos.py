"""Photographs that public Python packages come with, and noise, as JPEGs of a size."""

from __future__ import annotations

import bz2
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

PHOTOGRAPHS = {
    "scikit-image==0.25.2": [
        f"skimage/data/{name}"
        for name in ("coffee.png", "astronaut.png", "rocket.jpg", "motorcycle_left.png")
    ],
    "scikit-learn==1.6.1": [f"sklearn/datasets/images/{name}.jpg" for name in ("china", "flower")],
    "scipy==1.9.3": ["scipy/misc/face.dat"],
}
"""Files by the wheel that has them, from small photographs to the one of 1024 by 768 pixels."""
PLATFORM = ["--python-version", "3.11", "--platform", "manylinux2014_x86_64"]
"""Of the wheels, on any machine: they are only unzipped."""


def jpegs(folder: Path, width: int, height: int, quality: int) -> list[bytes]:
    """Return the photographs as JPEGs; `folder` keeps what was downloaded.

    Photographs are scaled down and cropped to the size, never enlarged, which would make them
    smoother than any camera does. A size that most are smaller than is filled by four of them.
    """
    whole = photographs(folder)
    large = [fitted(each, width, height) for each in whole if covers(each, width, height)]
    parts = [fitted(each, width // 2, height // 2) for each in whole]
    joined = [collage(parts[first : first + 4]) for first in range(0, len(parts) - 3, 3)]
    images = large if len(large) > len(joined) else large + joined
    return [encoded(each, quality) for each in images]


def noise(folder: Path, width: int, height: int) -> list[bytes]:
    """Return JPEGs with smooth areas and a lot of noise; `folder` is not used."""
    random = np.random.default_rng(7)
    found = []
    for _ in range(16):
        coarse = Image.fromarray(random.integers(0, 255, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
        pixels = np.clip(smooth + random.normal(0, 13, (height, width, 3)), 0, 255)
        found.append(encoded(Image.fromarray(pixels.astype(np.uint8)), 85))
    return found


def photographs(folder: Path) -> list[Image.Image]:
    """Return all photographs in their own sizes."""
    return [
        opened(archive.read(name))
        for wheel, names in PHOTOGRAPHS.items()
        for archive in [zipfile.ZipFile(downloaded(wheel, folder))]
        for name in names
    ]


def downloaded(wheel: str, folder: Path) -> Path:
    """Return the file of a wheel."""
    name = wheel.replace("-", "_").replace("==", "-")
    if not list(folder.glob(f"{name}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *PLATFORM]
        command += ["--only-binary=:all:", "--dest", str(folder), wheel]
        subprocess.run(command, check=True)
    (path,) = folder.glob(f"{name}-*.whl")
    return path


def opened(content: bytes) -> Image.Image:
    """Return the image of a file; scipy's has bare pixels."""
    if content.startswith(b"BZ"):
        pixels = np.frombuffer(bz2.decompress(content), np.uint8)
        return Image.fromarray(pixels.reshape(768, 1024, 3))
    return Image.open(io.BytesIO(content)).convert("RGB")


def covers(image: Image.Image, width: int, height: int) -> bool:
    """Return whether an image has at least this size."""
    return image.width >= width and image.height >= height


def fitted(image: Image.Image, width: int, height: int) -> Image.Image:
    """Return the middle of an image, scaled down as far as the size permits."""
    scale = max(width / image.width, height / image.height)
    size = max(width, round(scale * image.width)), max(height, round(scale * image.height))
    scaled = image.resize(size, Image.Resampling.LANCZOS)
    left, top = (scaled.width - width) // 2, (scaled.height - height) // 2
    return scaled.crop((left, top, left + width, top + height))


def collage(parts: list[Image.Image]) -> Image.Image:
    """Return an image of four of equal size."""
    rows = [np.hstack([np.asarray(each) for each in pair]) for pair in (parts[:2], parts[2:])]
    return Image.fromarray(np.vstack(rows))


def encoded(image: Image.Image, quality: int) -> bytes:
    """Return an image as a JPEG."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
