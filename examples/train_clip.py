"""Train CLIP on image and text pairs from Parquet files and tar shards, on any number of ranks.

    python examples/train_clip.py DATA CHECKPOINT [--steps N] [--workers N]
    torchrun --nproc-per-node 2 examples/train_clip.py DATA CHECKPOINT [--steps N]

DATA is a folder with the Parquet files web/*.parquet, of columns image and caption, and a prepared
dataset of tar shards, photos; if it does not exist, small ones are created there. Two thirds of the
pairs come from web. Images go through the processor of CLIP, captions through its kind of
tokenizer. Each pair is contrasted with all others of the step, across ranks. CHECKPOINT
is written every 10 steps, and a run that finds one continues there, also after it was killed: a
step has the same pairs, with the same crops, on any number of ranks that divides MICRO_BATCHES.
"""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    PreTrainedTokenizerFast,
)

from energon import (
    CaptioningSample,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    ShardWriter,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    prepare_dataset,
)

IMAGE_SIZE, CROPPED_SIZE = 40, 32
TEXT_LENGTH = 8
MICRO_BATCHES = 6
"""Batches of a step, over all ranks: 1, 2, 3 or 6 of them."""
BATCH_SIZE = 8
COLORS = ("red", "green", "blue", "gold", "purple", "gray")
SHAPES = ("circle", "square", "triangle")


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words of captions."""
    words = Tokenizer(models.WordLevel({}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<s>", "</s>"]
    captions = [f"a {color} {shape}" for color in COLORS for shape in SHAPES]
    words.train_from_iterator(captions, trainers.WordLevelTrainer(special_tokens=special))
    words.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[(name, words.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        **{"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"},
    )


TOKENIZER = train_tokenizer()
PROCESSOR = CLIPImageProcessorPil(do_resize=False, do_center_crop=False)


@edataclass
class Pair(Sample):
    """An image and its text."""

    image: torch.Tensor
    """(3, CROPPED_SIZE, CROPPED_SIZE), float."""
    text: torch.Tensor
    """(TEXT_LENGTH,), tokens of the caption, padded."""


class PairEncoder(DefaultTaskEncoder):
    """Cuts a random square out of images in training, the middle one in validation."""

    decoder = SampleDecoder(image_decode="pilrgb")

    def __init__(self, *, is_training: bool = True) -> None:
        super().__init__()
        self.is_training = is_training

    def encode_sample(self, sample: CaptioningSample) -> Pair:
        """Return the inputs of the model."""
        room = IMAGE_SIZE - CROPPED_SIZE
        top = left = room // 2
        if self.is_training:
            top, left = self.current_rng.integers(0, room + 1, 2).tolist()
        crop = sample.image.crop((left, top, left + CROPPED_SIZE, top + CROPPED_SIZE))
        image = PROCESSOR(crop, return_tensors="pt")["pixel_values"][0]
        text = TOKENIZER(
            sample.caption, padding="max_length", max_length=TEXT_LENGTH, truncation=True
        )["input_ids"]
        return Pair.derive_from(sample, image=image, text=torch.tensor(text))


class Job(NamedTuple):
    """The ranks that train together."""

    rank: int
    world_size: int

    @classmethod
    def begin(cls) -> Job:
        """Return the job that torchrun has started, or one of a single rank."""
        job = cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        if job.world_size > 1:
            torch.distributed.init_process_group("gloo")
        return job

    def gather(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features of all ranks, through which gradients flow back to each."""
        return features if self.world_size == 1 else torch.cat(all_gather(features))

    def sum_gradients(self, model: nn.Module) -> None:
        """Make the gradients of all ranks those of the whole step."""
        if self.world_size > 1:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, save, and return the share of validation images that find their caption."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args(arguments)
    job = Job.begin()
    if job.rank == 0 and not options.data.exists():
        make_data(options.data)
    if job.world_size > 1:
        torch.distributed.barrier()
    config = WorkerConfig(
        rank=job.rank, world_size=job.world_size, num_workers=options.workers, lanes=MICRO_BATCHES
    )
    dataset = get_train_dataset(
        blend(options.data),
        worker_config=config,
        batch_size=BATCH_SIZE,
        task_encoder=PairEncoder(),
    )
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
            pairs = [next(batches) for _ in range(MICRO_BATCHES // job.world_size)]
            loss = train_step(model, pairs, job)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % options.save_every == 0 or step == options.steps:
                data = loader.save_state_global(global_dst_rank=0)
                if job.rank == 0:
                    save(
                        options.checkpoint,
                        model=model.state_dict(),
                        optimizer=optimizer.state_dict(),
                        data=data,
                        step=step,
                    )
    accuracy = 0.0
    if job.rank == 0:
        accuracy = validate(model, options.data)
        click.echo(f"step {step}: loss {loss:.4f}, accuracy {accuracy:.2f}")
    if job.world_size > 1:
        torch.distributed.destroy_process_group()
    return accuracy


def save(path: Path, **content: object) -> None:
    """Write a checkpoint: whenever the process is killed, there is a complete one."""
    new = path.with_name(f"{path.name}.new")
    torch.save(content, new)
    new.replace(path)


def blend(data: Path) -> dict[str, object]:
    """Return the datasets of training and validation, with two columns of the Parquet files."""
    fields = {"image": "image", "caption": "caption"}
    web = {
        "path": str(data / "web"),
        "read": {"sample_type": "CaptioningSample", "field_map": fields},
    }
    photos = {"path": str(data / "photos")}
    return {
        "splits": {
            "train": {"blend": [{**web, "weight": 2}, {**photos, "weight": 1}]},
            "val": web,
        }
    }


def make_model() -> CLIPModel:
    """Return a tiny CLIP; `from_pretrained` returns one of the Hub."""
    width = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = CLIPConfig(
        text_config={
            **width,
            "vocab_size": len(TOKENIZER),
            "max_position_embeddings": TEXT_LENGTH,
            "bos_token_id": TOKENIZER.bos_token_id,
            "eos_token_id": TOKENIZER.eos_token_id,
            "pad_token_id": TOKENIZER.pad_token_id,
        },
        vision_config={**width, "image_size": CROPPED_SIZE, "patch_size": 8},
        projection_dim=64,
    )
    return CLIPModel(config)


def features_of(model: CLIPModel, pairs: Sequence[Pair]) -> torch.Tensor:
    """Return features of images and of texts, of shape (number, 2, width) and length 1."""
    output = model(
        pixel_values=torch.cat([pair.image for pair in pairs]),
        input_ids=torch.cat([pair.text for pair in pairs]),
    )
    return torch.stack([output.image_embeds, output.text_embeds], dim=1)


def train_step(model: CLIPModel, pairs: Sequence[Pair], job: Job) -> float:
    """Add the gradients of a step; return its loss."""
    images, texts = job.gather(features_of(model, pairs)).unbind(1)
    scores = model.logit_scale.exp() * images @ texts.T
    own = torch.arange(len(scores))
    loss = (functional.cross_entropy(scores, own) + functional.cross_entropy(scores.T, own)) / 2
    # Every rank has the whole loss, and the gradients of all are added up.
    (loss / job.world_size).backward()
    job.sum_gradients(model)
    return loss.item()


@torch.no_grad()
def validate(model: CLIPModel, data: Path) -> float:
    """Return the share of validation images whose nearest caption is the right one."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_val_dataset(
        blend(data),
        worker_config=config,
        batch_size=BATCH_SIZE,
        task_encoder=PairEncoder(is_training=False),
    )
    pairs = list(dataset)
    images, texts = features_of(model, pairs).unbind(1)
    letters = torch.cat([pair.text for pair in pairs])
    found = letters[(images @ texts.T).argmax(1)]
    return (found == letters).all(1).float().mean().item()


def make_data(data: Path) -> None:
    """Write Parquet files, two of them for validation, and tar shards, of shapes in colors."""
    generator = np.random.default_rng(0)
    (data / "web").mkdir(parents=True)
    for name in ("train-00000", "train-00001", "validation-00000"):
        rows = []
        for number in range(100):
            image, caption = draw(generator)
            about = {"image": {"bytes": image, "path": f"{number}.png"}, "caption": caption}
            rows.append({**about, "url": f"https://example.org/{name}/{number}"})
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, data / "web" / f"{name}.parquet", row_group_size=25)
    with ShardWriter(str(data / "photos/%03d.tar"), maxcount=50) as writer:
        for number in range(100):
            image, caption = draw(generator)
            writer.write({"__key__": f"{number:05}", "png": image, "txt": caption})
    prepare_dataset(
        data / "photos",
        split_ratio={"train": 1},
        sample_type="CaptioningSample",
        field_map={"image": "png", "caption": "txt"},
    )


def draw(generator: np.random.Generator) -> tuple[bytes, str]:
    """Return a shape at a random place, as PNG, and what it is."""
    color, shape = str(generator.choice(COLORS)), str(generator.choice(SHAPES))
    left, top = (10 + generator.integers(-4, 5, 2)).tolist()
    box = (left, top, left + 20, top + 20)
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), "white")
    pencil = ImageDraw.Draw(image)
    if shape == "circle":
        pencil.ellipse(box, color)
    elif shape == "square":
        pencil.rectangle(box, color)
    else:
        pencil.polygon([(left, top + 20), (left + 10, top), (left + 20, top + 20)], color)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue(), f"a {color} {shape}"


if __name__ == "__main__":
    main()
