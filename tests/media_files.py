"""Small files of every kind that decoders read, and damage to them."""

from __future__ import annotations

import gzip
import io
import json
import random
from functools import cache

import av
import cbor2
import msgpack
import numpy as np
import zstandard
from PIL import Image

from energon.decode.values import encode_tenbin
from tests.decode.videos import KINDS, encode_video


def saved(save, *arguments, **named):
    """Return the bytes that `save` writes to a file."""
    buffer = io.BytesIO()
    save(buffer, *arguments, **named)
    return buffer.getvalue()


@cache
def media_files() -> dict[str, bytes]:
    """Return a file for each part, by its name: the extension last."""
    pixels = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    values = {"a": [1, 2.5, "text", None, {"b": [[1], [2]]}], "c": "x" * 50}
    arrays = [np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros((2, 0, 3), np.int64)]

    files = {
        "jpg": saved(image.save, format="JPEG"),
        "progressive.jpg": saved(image.save, format="JPEG", progressive=True),
        "grey.jpg": saved(image.convert("L").save, format="JPEG"),
        "png": saved(image.save, format="PNG"),
        "palette.png": saved(image.quantize().save, format="PNG"),
        "webp": saved(image.save, format="WEBP"),
        "lossless.webp": saved(image.save, format="WEBP", lossless=True),
        "gif": saved(image.save, format="GIF"),
        "bmp": saved(image.save, format="BMP"),
        "tiff": saved(image.save, format="TIFF", compression="tiff_lzw"),
        "npy": saved(np.save, arrays[0]),
        "npz": saved(np.savez, *arrays),
        "packed.npz": saved(np.savez_compressed, *arrays),
        "ten": encode_tenbin(arrays),
        "json": json.dumps(values).encode(),
        "json.gz": gzip.compress(json.dumps(values).encode()),
        "msg": msgpack.packb(values),
        "cbor": cbor2.dumps(values),
        "zst": zstandard.ZstdCompressor().compress(json.dumps(values).encode() * 20),
        "wav": _wav(),
        "txt": b"text",
        "cls": b"12",
    }
    for number in (0, 5, 6, 8):
        kind = KINDS[number]
        files[f"{number}.mkv" if "mkv" in kind.name else f"{number}.mp4"] = encode_video(
            kind, frames=8
        )
    return files


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a file that differs somewhere from `data`, near the beginning most often."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 5, 20))):
        if not changed:
            break
        place = rng.randrange(min(len(changed), rng.choice((64, 1024, 1 << 30))))
        what = rng.random()
        if what < 0.5:
            changed[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif what < 0.7:
            numbers = (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f")
            changed[place : place + 4] = rng.choice(numbers)
        elif what < 0.8:
            del changed[place : place + rng.choice((1, 8, 1000))]
        elif what < 0.9:
            changed[place:place] = changed[place : place + rng.choice((1, 8, 1000))] * rng.choice(
                (1, 1, 50)
            )
        else:
            del changed[place:]
    return bytes(changed)


def _wav() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        samples = (np.sin(np.arange(4000) / 20) * 10_000).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(samples[None], "s16", "mono")
        frame.sample_rate, frame.pts = 8000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()
