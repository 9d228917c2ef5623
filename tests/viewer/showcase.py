"""A dataset worth looking at: landscapes, and a sample of every other kind of part."""

from __future__ import annotations

import colorsys
import io
import json
import wave
from pathlib import Path

import msgpack
import numpy as np
from PIL import Image, ImageDraw

from energon.prepare.dataset import prepare_dataset
from tests.datasets import write_shard
from tests.decode.videos import KINDS, encode_video

TIMES = ("dawn", "noon", "dusk", "night")
SIZES = ((320, 240), (360, 240), (240, 300), (300, 300))
_HUES = {"dawn": (0.95, 0.08), "noon": (0.57, 0.52), "dusk": (0.75, 0.04), "night": (0.66, 0.72)}
_LIGHT = {"dawn": (0.55, 0.95), "noon": (0.75, 0.98), "dusk": (0.45, 0.9), "night": (0.12, 0.35)}


def landscape(seed: int) -> bytes:
    """A JPEG of hills under a sky."""
    rng = np.random.default_rng(seed)
    width, height = SIZES[seed % len(SIZES)]
    time = TIMES[seed % 7 % len(TIMES)]
    (top, bottom), (dark, bright) = _HUES[time], _LIGHT[time]
    sky = np.array(
        [
            colorsys.hsv_to_rgb(
                (top + share * ((bottom - top + 0.5) % 1 - 0.5)) % 1,
                0.55 - 0.3 * share,
                dark + share * (bright - dark),
            )
            for share in np.linspace(0, 1, height)
        ]
    )
    pixels = np.broadcast_to(sky[:, None] * 255, (height, width, 3)).astype(np.uint8)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    draw = ImageDraw.Draw(image)
    x, y = rng.uniform(0.15, 0.85) * width, rng.uniform(0.15, 0.4) * height
    size = rng.uniform(0.06, 0.1) * width
    disc = (245, 240, 215) if time == "night" else (255, 236, 170)
    draw.ellipse((x - size, y - size, x + size, y + size), fill=disc)
    hue = (0.33 + rng.uniform(-0.2, 0.25)) % 1
    for layer in range(4):
        base = height * (0.5 + 0.13 * layer)
        waves = sum(
            np.sin(np.arange(width) / rng.uniform(18, 90) + rng.uniform(0, 6)) * height * 0.035
            for _ in range(3)
        )
        light = (0.6 - 0.12 * layer) * (0.45 if time == "night" else 1)
        color = tuple(int(255 * c) for c in colorsys.hsv_to_rgb(hue, 0.35 + 0.1 * layer, light))
        line = [(n, base + wave) for n, wave in enumerate(waves.tolist())]
        draw.polygon([(0, height), *line, (width, height)], fill=color)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def _image_sample(n: int) -> tuple[str, dict[str, bytes]]:
    time = TIMES[n % 7 % len(TIMES)]
    width, height = SIZES[n % len(SIZES)]
    about = {
        "time": time,
        "width": width,
        "height": height,
        "score": round(0.4 + n * 37 % 60 / 100, 2),
    }
    caption = f"Hills at {time}" + " under a wide and quiet sky" * (n % 3) + "."
    parts = {"jpg": landscape(n), "txt": caption.encode(), "json": json.dumps(about).encode()}
    return f"view_{n:04d}", parts


def tone(seconds: float = 2.0, rate: int = 8000) -> bytes:
    """A WAV file of a chord that swells."""
    time = np.arange(int(seconds * rate)) / rate
    sound = sum(np.sin(2 * np.pi * pitch * time) for pitch in (220, 277, 330))
    sound *= np.abs(np.sin(np.pi * time)) * np.exp(-0.5 * time)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((sound * 9000).astype(np.int16).tobytes())
    return buffer.getvalue()


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _mixed() -> list[tuple[str, dict[str, bytes]]]:
    chat = [
        {"role": "user", "content": "<image>\nWhat time of day is it?"},
        {"role": "assistant", "content": "The low sun and the long colors say that it is dusk."},
        {"role": "user", "content": "And here?\n<image>"},
        {"role": "assistant", "content": "Night: the moon is up, and the hills are dark."},
    ]
    pages = {
        "sequence": [
            "A walk in three images.",
            "a.jpg",
            "We set out early.",
            "b.jpg",
            "Then it got late.",
        ]
    }
    grid = np.hypot(*np.meshgrid(np.linspace(-3, 3, 64), np.linspace(-2, 2, 48)))
    video = encode_video(KINDS[7], frames=40, size=(192, 128))
    return [
        (
            "chat",
            {
                "a.jpg": landscape(9),
                "b.jpg": landscape(3),
                "json": json.dumps({"messages": chat}).encode(),
            },
        ),
        (
            "essay",
            {"a.jpg": landscape(3), "b.jpg": landscape(5), "json": json.dumps(pages).encode()},
        ),
        ("sound", {"wav": tone(), "txt": b"a chord that swells"}),
        ("video", {"webm": video, "txt": b"colors that move to the left"}),
        ("grid", {"npy": _npy(np.cos(grid * 2).astype(np.float32))}),
        ("tokens", {"tokens.npy": _npy(np.arange(65, 91).astype(np.int32))}),
        ("packed", {"msg": msgpack.packb({"boxes": [[1, 2, 3, 4]], "name": "a tree"})}),
    ]


def make_showcase(root: Path, *, images: int = 240) -> Path:
    """Write the datasets `views` and `mixed`, and `blend.yaml` of both; return the blend."""
    samples = [_image_sample(n) for n in range(images)]
    for shard in range(4):
        part = samples[shard * images // 4 : (shard + 1) * images // 4]
        write_shard(root / f"views/shards/{shard:03}.tar", part)
    write_shard(root / "mixed/shards/000.tar", _mixed())
    for name in ("views", "mixed"):
        prepare_dataset(
            root / name, split_parts=["train:.*", "val:.*"], sample_type="CrudeWebdataset"
        )
    blend = root / "blend.yaml"
    blend.write_text(
        "splits:\n"
        "  train:\n"
        "    blend:\n"
        '      - {path: views, weight: {0: 0.9, 4000: "ramp to 0.5"}}\n'
        '      - {path: mixed, weight: {0: 0.1, 4000: "ramp to 0.5"}}\n'
        "  val: {path: views}\n"
    )
    return blend
