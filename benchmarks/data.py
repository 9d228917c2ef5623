"""Make the datasets that the benchmarks read, the same ones on every machine.

    python benchmarks/data.py FOLDER [--scale 0.1]

text: 200k samples of json + txt, about 300 bytes. image: 15k JPEGs of about 70 kB with txt and
json. large: 100 samples of 8 MB. interleaved: 10k samples of 12 parts. shards10k: 10,000 shards.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

SHARDS = {"text": 20, "image": 15, "large": 10, "interleaved": 10, "shards10k": 10_000}
SAMPLES = {"text": 200_000, "image": 15_000, "large": 100, "interleaved": 10_000}
Parts = dict[str, bytes]


def tar_member(name: str, content: bytes) -> bytes:
    """Return a ustar header and the padded content."""
    header = bytearray(512)
    header[0 : len(name)] = name.encode()
    header[100:108] = b"0000644\0"
    header[108:124] = b"0000000\0" * 2
    header[124:136] = b"%011o\0" % len(content)
    header[136:148] = b"%011o\0" % 0
    header[148:156] = b" " * 8
    header[156:157] = b"0"
    header[257:265] = b"ustar\x0000"
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content + bytes(-len(content) % 512)


def text(number: int, random: np.random.Generator) -> Parts:
    """Return a sample of two small parts."""
    words = " ".join(f"w{word}" for word in random.integers(0, 9999, 8).tolist())
    about = {"id": number, "source": "synthetic", "tags": words.split(), "score": number / 7}
    return {"json": json.dumps(about).encode(), "txt": (words * 2).encode()}


def image(number: int, random: np.random.Generator) -> Parts:
    """Return a JPEG, its caption and metadata. 200 pictures come again, with other comments."""
    jpeg = _jpegs()[number % 200]
    comment = b"\xff\xfe" + (len(str(number)) + 2).to_bytes(2, "big") + str(number).encode()
    about = json.dumps({"id": number, "width": 500, "height": 375}).encode()
    return {
        "jpg": jpeg[:2] + comment + jpeg[2:],
        "txt": f"picture {number} of a synthetic landscape".encode(),
        "json": about,
    }


def large(number: int, random: np.random.Generator) -> Parts:
    """Return 8 MB that do not compress, with metadata."""
    return {"bin": random.bytes(8_400_000), "json": json.dumps({"id": number}).encode()}


def interleaved(number: int, random: np.random.Generator) -> Parts:
    """Return six small pictures and six texts."""
    parts: Parts = {}
    for place in range(6):
        parts[f"{place}.jpg"] = random.bytes(2_800)
        parts[f"{place}.txt"] = f"text {place} of document {number}, ".encode() * 8
    return parts


KINDS: dict[str, Callable[[int, np.random.Generator], Parts]] = {
    "text": text,
    "image": image,
    "large": large,
    "interleaved": interleaved,
}


def write(folder: Path, kind: str, *, num_samples: int, num_shards: int) -> None:
    """Write a dataset, unless it is there."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    bounds = np.linspace(0, num_samples, num_shards + 1).astype(int).tolist()
    for shard in range(num_shards):
        random = np.random.default_rng(shard)
        with open(folder / f"{kind}-{shard:05}.tar", "wb") as file:
            for number in range(bounds[shard], bounds[shard + 1]):
                for part, content in KINDS[kind](number, random).items():
                    file.write(tar_member(f"{number:08}.{part}", content))
            file.write(bytes(10_240))
    (folder / "done").touch()


def samples_of(kind: str, num_samples: int) -> Iterator[tuple[str, Parts]]:
    """Yield the samples without writing them, for peers with formats of their own."""
    random = np.random.default_rng(0)
    for number in range(num_samples):
        yield f"{number:08}", KINDS[kind](number, random)


_JPEGS: list[bytes] = []


def _jpegs() -> list[bytes]:
    if not _JPEGS:
        random = np.random.default_rng(7)
        for _ in range(200):
            coarse = Image.fromarray(random.integers(0, 255, (12, 16, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.float32)
            noise = random.normal(0, 13, (375, 500, 3))
            pixels = np.clip(smooth + noise, 0, 255).astype(np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG", quality=85)
            _JPEGS.append(buffer.getvalue())
    return _JPEGS


def main() -> None:
    """Write all datasets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()
    for kind, num_samples in SAMPLES.items():
        write(
            arguments.folder / kind,
            kind,
            num_samples=max(100, int(num_samples * arguments.scale)),
            num_shards=SHARDS[kind],
        )
    write(
        arguments.folder / "shards10k",
        "text",
        num_samples=max(1000, int(20_000 * arguments.scale)),
        num_shards=max(100, int(SHARDS["shards10k"] * arguments.scale)),
    )


if __name__ == "__main__":
    main()
