"""Train a vision-language model: questions in shards, videos in a folder, packed sequences.

    python examples/train_vlm.py DATA CHECKPOINT [--steps N] [--workers N]
    torchrun --nproc-per-node 2 examples/train_vlm.py DATA CHECKPOINT

DATA is a folder with the prepared dataset questions and the folder videos, whose files the
questions name; if it does not exist, small ones are created there. Packing needs only the lengths
of texts, so a window of 64 questions contains no frames: they are decoded when their pack is made.
If CHECKPOINT exists, the run continues where it was saved, with any number of workers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import av
import click
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from energon import (
    AVDecoder,
    Batch,
    CachePool,
    Cooker,
    DefaultTaskEncoder,
    FileStore,
    Lazy,
    Sample,
    ShardWriter,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    edataclass,
    get_savable_loader,
    get_single_frames_uniform,
    get_train_dataset,
    prepare_dataset,
)
from energon.packing import Packer, pack_sequences

CONTEXT = 192
FRAMES = 4
"""Frames of a video; each is one token."""
FRAME_SIZE = (16, 16)
FRAME, END, VOCABULARY = 256, 257, 258
IGNORED = -100
"""The label of tokens that are not learned."""
BATCH_SIZE = 2
LANES = 4
"""A run can continue on any number of ranks that divides this."""


@edataclass
class Question(Sample):
    """The tokens of a question and its answer. The video is read later."""

    tokens: torch.Tensor
    labels: torch.Tensor
    video: Lazy[AVDecoder] | torch.Tensor


@edataclass
class Packed(Batch):
    """Packs of questions."""

    tokens: torch.Tensor
    """(packs, CONTEXT)."""
    labels: torch.Tensor
    position_ids: torch.Tensor
    question: torch.Tensor
    """(packs, CONTEXT): which question of its pack a token is of."""
    frames: torch.Tensor
    """(number, 3, height, width), in the order of their tokens."""


@cooker(need_cache=True)
def cook(sample: dict, videos: FileStore, cache: CachePool) -> Question:
    """Return a sample of the part json; its video is fetched meanwhile."""
    about = sample["json"]
    question = [*[FRAME] * FRAMES, *about["question"].encode()]
    answer = [*about["answer"].encode(), END]
    tokens = torch.tensor([*question, *answer])
    labels = torch.full_like(tokens, IGNORED)
    labels[len(question) - 1 : -1] = tokens[len(question) :]
    return Question(
        **basic_sample_keys(sample),
        tokens=tokens,
        labels=labels,
        video=cache.get_lazy(videos, about["video"]),
    )


class VideoEncoder(DefaultTaskEncoder):
    """Packs questions."""

    cookers = (Cooker(cook),)
    select_samples_to_pack = Packer(CONTEXT, length=lambda sample: len(sample.tokens))

    def postencode_sample(self, sample: Question) -> Question:
        """Decode frames of the video of a question whose pack is made."""
        video = sample.video.get(sample)
        frames = get_single_frames_uniform(video, FRAMES, video_out_frame_size=FRAME_SIZE)
        return Question.extend(sample, video=frames)

    def pack_selected_samples(self, samples: list[Question]) -> Packed:
        """Return a pack."""
        packed = pack_sequences([sample.tokens for sample in samples], pad_to=CONTEXT)
        labels = [sample.labels for sample in samples]
        lengths = packed.cu_seqlens.diff().long()
        return Packed(
            __key__=[sample.__key__ for sample in samples],
            tokens=packed.values,
            labels=pack_sequences(labels, pad_to=CONTEXT, pad_value=IGNORED).values,
            position_ids=packed.position_ids,
            question=torch.arange(len(lengths)).repeat_interleave(lengths),
            frames=torch.cat([sample.video for sample in samples]),
        )

    def batch(self, packs: list[Packed]) -> Packed:
        """Stack packs; frames, of which each has another number, are joined."""
        names = ("tokens", "labels", "position_ids", "question")
        return Packed(
            __key__=[key for pack in packs for key in pack.__key__],
            **{name: torch.stack([getattr(pack, name) for pack in packs]) for name in names},
            frames=torch.cat([pack.frames for pack in packs]),
        )


class Model(nn.Module):
    """A transformer of one layer, to which frames are tokens."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.frames = nn.Linear(3 * FRAME_SIZE[0] * FRAME_SIZE[1], width)
        self.places = nn.Embedding(CONTEXT, width)
        self.heads = nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, VOCABULARY))

    def forward(self, batch: Packed) -> torch.Tensor:
        """Return predictions of the next token, of shape (packs, CONTEXT, vocabulary)."""
        hidden = self.tokens(batch.tokens)
        hidden[batch.tokens == FRAME] = self.frames(batch.frames.flatten(1) / 255)
        hidden = hidden + self.places(batch.position_ids)
        order = torch.arange(CONTEXT)
        mask = batch.question[:, :, None] == batch.question[:, None, :]
        mask &= order[:, None] >= order
        query, key, value = self.heads(hidden).chunk(3, dim=-1)
        hidden = hidden + functional.scaled_dot_product_attention(query, key, value, mask)
        return self.out(hidden)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, save, and return the loss of the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=30)
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
        questions(options.data),
        worker_config=config,
        batch_size=BATCH_SIZE,
        packing_buffer_size=64,
        task_encoder=VideoEncoder(),
    )
    torch.manual_seed(0)
    model = Model()
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
            batch = next(batches)
            loss = train_step(model, batch)
            share_gradients(model, world_size)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0 and step % 15 == 0:
                used = (batch.labels != IGNORED).sum().item()
                click.echo(
                    f"step {step}: {len(batch.__key__)} questions in {len(batch.tokens)} packs, "
                    f"{used} tokens learned"
                )
        data = loader.save_state_global(global_dst_rank=0)
        if rank == 0:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**content, "data": data, "step": step}, options.checkpoint)
    if rank == 0:
        click.echo(f"step {step}: loss {loss:.4f}")
    if world_size > 1:
        torch.distributed.destroy_process_group()
    return loss


def questions(data: Path) -> dict[str, object]:
    """Return the training data: the questions, and the folder of their videos."""
    videos = f"filesystem://{data.resolve() / 'videos'}"
    return {"splits": {"train": {"path": str(data / "questions"), "aux": {"videos": videos}}}}


def share_gradients(model: Model, world_size: int) -> None:
    """Replace the gradients by their mean over all ranks."""
    for each in model.parameters() if world_size > 1 else ():
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        torch.distributed.all_reduce(each.grad)
        each.grad /= world_size


def train_step(model: Model, batch: Packed) -> float:
    """Add the gradients of a batch; return its loss."""
    scores = model(batch)
    loss = functional.cross_entropy(
        scores.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED
    )
    loss.backward()
    return loss.item()


def make_data(data: Path) -> None:
    """Write videos that grow brighter or darker, and questions about them."""
    generator = np.random.default_rng(0)
    (data / "videos").mkdir(parents=True)
    for number in range(8):
        with av.open(data / f"videos/{number}.mp4", "w") as container:
            stream = container.add_stream("mpeg4", rate=4)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            for shade in range(0, 240, 20)[:: -1 if number % 2 else 1]:
                image = np.full((32, 32, 3), shade, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image)))
            container.mux(stream.encode(None))
    with ShardWriter(data / "questions/%03d.tar", maxcount=50) as writer:
        for number in range(200):
            video = int(generator.integers(8))
            answer = "darker" if video % 2 else "brighter"
            text = "How does it change?" if number % 2 else "What happens in this video?"
            about = {"video": f"{video}.mp4", "question": text, "answer": answer}
            writer.write({"__key__": f"{number:04}", "json": about})
    prepare_dataset(data / "questions", split_ratio={"train": 1}, sample_type="CrudeWebdataset")


if __name__ == "__main__":
    main()
