"""A vision-language program: images through a processor of Hugging Face, texts, packs.

    python benchmarks/adapters/vision_language.py PATH --workers N --seconds S

The text is the same for energon and for Megatron-Energon: this Python has one `megatron.energon`.
Prints a line of JSON: seconds until the first batch, images per second, CPU time per image.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

# What torchvision describes, where its own library is for another build of torch.
_operators = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from transformers import CLIPImageProcessor  # noqa: E402

from megatron import energon  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent))
from measure import process_tree, tree_cpu_seconds  # noqa: E402

LENGTH, IMAGE_TOKENS = 2048, 49


@dataclass
class Encoded(energon.Sample):
    pixels: torch.Tensor
    tokens: torch.Tensor


@dataclass
class Pack(energon.Sample):
    pixels: torch.Tensor
    tokens: torch.Tensor
    cu_lengths: torch.Tensor


@energon.stateless
def cook(sample: dict[str, Any]) -> Any:
    """Make a sample of an image and its caption."""
    return energon.CaptioningSample(
        **energon.basic_sample_keys(sample), image=sample["jpg"], caption=sample["txt"]
    )


class Encoder(energon.DefaultTaskEncoder):
    """Prepares images and tokens, and packs them to sequences; a batch is one pack."""

    decoder = energon.SampleDecoder(image_decode="pilrgb")
    cookers = [energon.Cooker(cook)]  # noqa: RUF012 - as the documentation of both has it

    def __init__(self) -> None:
        super().__init__()
        self.processor = CLIPImageProcessor()

    @energon.stateless
    def encode_sample(self, sample: Any) -> Encoded:
        pixels = self.processor(images=sample.image, return_tensors="pt")["pixel_values"]
        text = torch.frombuffer(bytearray(sample.caption.encode()), dtype=torch.uint8).long()
        tokens = torch.cat([torch.full((IMAGE_TOKENS,), -200), text])
        return Encoded.derive_from(sample, pixels=pixels, tokens=tokens)

    def select_samples_to_pack(self, samples: list[Encoded]) -> list[list[Encoded]]:
        packs: list[list[Encoded]] = []
        free = 0
        for sample in sorted(samples, key=lambda each: -len(each.tokens)):
            if len(sample.tokens) > free:
                packs.append([])
                free = LENGTH
            packs[-1].append(sample)
            free -= len(sample.tokens)
        return packs

    @energon.stateless
    def pack_selected_samples(self, samples: list[Encoded]) -> Pack:
        lengths = torch.tensor([0] + [len(sample.tokens) for sample in samples])
        tokens = torch.cat([sample.tokens for sample in samples])
        return Pack.derive_from(
            samples[0],
            pixels=torch.cat([sample.pixels for sample in samples]),
            tokens=torch.nn.functional.pad(tokens, (0, LENGTH - len(tokens))),
            cu_lengths=lengths.cumsum(0),
        )

    @energon.stateless
    def batch(self, packs: list[Pack]) -> dict[str, Any]:
        (pack,) = packs
        return {"pixels": pack.pixels, "tokens": pack.tokens[None], "cu_lengths": pack.cu_lengths}


def loaded(path: str, encoder: Encoder, workers: int) -> Iterator[dict[str, Any]]:
    """Return the batches of a loader."""
    dataset = energon.get_train_dataset(
        path,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=workers),
        batch_size=1,
        packing_buffer_size=PACKING_BUFFER,
        shuffle_buffer_size=SHUFFLE_BUFFER,
        max_samples_per_sequence=100,
        task_encoder=encoder,
    )
    return iter(energon.get_savable_loader(dataset))


def by_hand(path: str, encoder: Encoder, _: int) -> Iterator[dict[str, Any]]:
    """Yield the batches of the hooks alone, for images in memory: no loader can be faster."""
    parts: dict[str, dict[str, bytes]] = {}
    with tarfile.open(min(Path(path).glob("*.tar"))) as archive:
        for member in archive:
            key, _, part = member.name.partition(".")
            content = archive.extractfile(member)
            parts.setdefault(key, {})[part] = content.read() if content else b""
    while True:
        encoded: list[Encoded] = []
        for key, sample in parts.items():
            image = Image.open(BytesIO(sample["jpg"])).convert("RGB")
            crude = energon.CaptioningSample(
                __key__=key, __restore_key__=(), image=image, caption=sample["txt"].decode()
            )
            encoded.append(encoder.encode_sample(crude))
            if len(encoded) == PACKING_BUFFER:
                for pack in encoder.select_samples_to_pack(encoded):
                    yield encoder.batch([encoder.pack_selected_samples(pack)])
                encoded = []


def main() -> None:
    """Run the program, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--by-hand", action="store_true", help="the hooks without a loader")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    loop = by_hand if arguments.by_hand else loaded
    batches = loop(arguments.path, Encoder(), arguments.workers)
    next(batches)
    first = time.perf_counter() - begin
    for _ in range(5):
        next(batches)
    count, cpu, begin = 0, tree_cpu_seconds(), time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < arguments.seconds:
        count += len(next(batches)["pixels"])
    figures = {
        "first_batch_seconds": first,
        "images_per_second": count / elapsed,
        "cpu_seconds_per_image": (tree_cpu_seconds() - cpu) / count,
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()
    # Workers of some libraries do not end by themselves.
    for pid in process_tree()[1:]:
        os.kill(pid, 9)
    os._exit(0)


PACKING_BUFFER, SHUFFLE_BUFFER = 100, 1000

if __name__ == "__main__":
    main()
