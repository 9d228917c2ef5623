"""Fine-tune on conversations with images: JSONL, packed sequences, a loss on answers only.

    python examples/finetune_chat.py DATA CHECKPOINT [--steps N] [--workers N]
    torchrun --nproc-per-node 2 examples/finetune_chat.py DATA CHECKPOINT [--steps N]

DATA is a folder with chats.jsonl.gz and the images that it names, in images/; if it does not exist,
a small one is created there. A line is a conversation: `{"images": ["7.png"], "messages": [{"role":
"user", "content": "<image>What is it?"}, {"role": "assistant", "content": "…"}]}`. Conversations
are packed into sequences of CONTEXT tokens, in which each attends only to itself, and images are
read when their pack is made. The loss covers only the answers of the assistant, and weighs all of
their tokens equally across ranks. CHECKPOINT is written every 10 steps, and a run that finds one
continues there, also after it was killed: a step has the same packs with any number of workers, and
on any number of ranks that divides MICRO_BATCHES.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from energon import (
    Batch,
    CachePool,
    Cooker,
    DefaultTaskEncoder,
    FileStore,
    Lazy,
    Sample,
    SampleDecoder,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    prepare_jsonl,
)
from energon.packing import Packer, pack_sequences

CONTEXT = 256
IMAGE_SIZE, PATCH_SIZE = 16, 8
PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2
"""Tokens that an image takes."""
PATCH, END = 256, 257
ROLES = {"system": 258, "user": 259, "assistant": 260}
VOCABULARY = 261
IGNORED = -100
"""The label of tokens that are not learned."""
MICRO_BATCHES = 6
"""Batches of a step, over all ranks: 1, 2, 3 or 6 of them."""
BATCH_SIZE = 2


@edataclass
class Conversation(Sample):
    """The tokens of a conversation. Its images are read later, since many of them wait."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """(length,): the token that comes next, where that is learned, or else IGNORED."""
    images: list[Lazy] | torch.Tensor


@edataclass
class Packed(Batch):
    """Packs of conversations."""

    tokens: torch.Tensor
    """(packs, CONTEXT)."""
    labels: torch.Tensor
    position_ids: torch.Tensor
    conversation: torch.Tensor
    """(packs, CONTEXT): which conversation of its pack a token is of."""
    images: torch.Tensor
    """(number, 3, IMAGE_SIZE, IMAGE_SIZE), in the order of their tokens."""


@cooker(need_cache=True)
def cook_chat(sample: dict, images: FileStore, cache: CachePool) -> Conversation:
    """Return the conversation of a line."""
    chat = sample["json"]
    pieces = [piece for message in chat["messages"] for piece in tokenize(**message)]
    tokens = torch.tensor([token for piece, _ in pieces for token in piece])
    learned = torch.tensor([is_answer for piece, is_answer in pieces for _ in piece])
    following = learned.roll(-1)
    following[-1] = False
    return Conversation(
        **basic_sample_keys(sample),
        tokens=tokens,
        labels=torch.where(following, tokens.roll(-1), IGNORED),
        images=[cache.get_lazy(images, name) for name in chat.get("images", ())],
    )


def tokenize(role: str, content: str) -> Iterator[tuple[list[int], bool]]:
    """Yield pieces of a message: their tokens, and whether they are learned."""
    yield [ROLES[role]], False
    is_answer = role == "assistant"
    first, *others = content.split("<image>")
    yield list(first.encode()), is_answer
    for text in others:
        yield [PATCH] * PATCHES, False
        yield list(text.encode()), is_answer
    yield [END], is_answer


class ChatEncoder(DefaultTaskEncoder):
    """Packs conversations."""

    cookers = (Cooker(cook_chat),)
    decoder = SampleDecoder(image_decode="torchrgb")
    # One that is longer than the context is left out, and counted in `loader.stats()`.
    select_samples_to_pack = Packer(
        CONTEXT, length=lambda sample: len(sample.tokens), too_long="leave_out"
    )

    def postencode_sample(self, sample: Conversation) -> Conversation:
        """Read the images of a conversation whose pack is made."""
        images = [image.get(sample) for image in sample.images]
        stacked = torch.stack(images) if images else torch.zeros(0, 3, IMAGE_SIZE, IMAGE_SIZE)
        return Conversation.extend(sample, images=stacked)

    def pack_selected_samples(self, samples: list[Conversation]) -> Packed:
        """Return a pack."""
        tokens = pack_sequences([sample.tokens for sample in samples], pad_to=CONTEXT)
        labels = [sample.labels for sample in samples]
        lengths = tokens.cu_seqlens.diff().long()
        return Packed(
            __key__=[sample.__key__ for sample in samples],
            tokens=tokens.values,
            labels=pack_sequences(labels, pad_to=CONTEXT, pad_value=IGNORED).values,
            position_ids=tokens.position_ids,
            conversation=torch.arange(len(lengths)).repeat_interleave(lengths),
            images=torch.cat([sample.images for sample in samples]),
        )

    def batch(self, packs: list[Packed]) -> Packed:
        """Stack packs; images, of which each has another number, are joined."""
        names = ("tokens", "labels", "position_ids", "conversation")
        return Packed(
            __key__=[key for pack in packs for key in pack.__key__],
            **{name: torch.stack([getattr(pack, name) for pack in packs]) for name in names},
            images=torch.cat([pack.images for pack in packs]),
        )


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, save, and return the loss of the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    if rank == 0 and not options.data.exists():
        make_data(options.data)
    if world_size > 1:
        torch.distributed.barrier()
    config = WorkerConfig(
        rank=rank, world_size=world_size, num_workers=options.workers, lanes=MICRO_BATCHES
    )
    dataset = get_train_dataset(
        chats(options.data),
        worker_config=config,
        batch_size=BATCH_SIZE,
        packing_buffer_size=64,
        task_encoder=ChatEncoder(),
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
            micro_batches = [next(batches) for _ in range(MICRO_BATCHES // world_size)]
            loss = train_step(model, micro_batches, world_size)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % options.save_every == 0 or step == options.steps:
                data = loader.save_state_global(global_dst_rank=0)
                if rank == 0:
                    save(
                        options.checkpoint,
                        model=model.state_dict(),
                        optimizer=optimizer.state_dict(),
                        data=data,
                        step=step,
                    )
    if rank == 0:
        click.echo(f"step {step}: loss {loss:.4f}")
    if world_size > 1:
        torch.distributed.destroy_process_group()
    return loss


def save(path: Path, **content: object) -> None:
    """Write a checkpoint: whenever the process is killed, there is a complete one."""
    new = path.with_name(f"{path.name}.new")
    torch.save(content, new)
    new.replace(path)


def chats(data: Path) -> dict[str, object]:
    """Return the training data: the conversations, and the folder of their images."""
    images = f"filesystem://{data.resolve() / 'images'}"
    return {
        "splits": {
            "train": {"path": str(data / "chats.jsonl.gz"), "aux": {"images": images}},
        }
    }


class Model(nn.Module):
    """A transformer of one layer, to which patches of images are tokens."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.patches = nn.Conv2d(3, width, PATCH_SIZE, stride=PATCH_SIZE)
        self.places = nn.Embedding(CONTEXT, width)
        self.heads = nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, VOCABULARY))

    def forward(self, batch: Packed) -> torch.Tensor:
        """Return predictions of the next token, of shape (packs, CONTEXT, vocabulary)."""
        hidden = self.tokens(batch.tokens)
        patches = self.patches(batch.images).flatten(2).transpose(1, 2)
        hidden[batch.tokens == PATCH] = patches.flatten(0, 1)
        hidden = hidden + self.places(batch.position_ids)
        order = torch.arange(CONTEXT)
        mask = batch.conversation[:, :, None] == batch.conversation[:, None, :]
        mask &= order[:, None] >= order
        query, key, value = self.heads(hidden).chunk(3, dim=-1)
        hidden = hidden + functional.scaled_dot_product_attention(query, key, value, mask)
        return self.out(hidden)


def train_step(model: Model, batches: Sequence[Packed], world_size: int) -> float:
    """Add the gradients of a step; return its loss, the mean over all tokens that are learned."""
    total = torch.zeros(2)
    for batch in batches:
        labels = batch.labels.flatten()
        scores = model(batch).flatten(0, 1)
        loss = functional.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
        loss.backward()
        total += torch.tensor([loss.item(), (labels != IGNORED).sum()])
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    if world_size > 1:
        for each in (total, *gradients):
            torch.distributed.all_reduce(each)
    # Batches have different numbers of such tokens: a mean of their means would weigh them wrongly.
    for each in gradients:
        each /= total[1]
    return float(total[0] / total[1])


def make_data(data: Path) -> None:
    """Write conversations about the colors of images, some of them without an image."""
    generator = np.random.default_rng(0)
    colors = ("red", "green", "blue", "yellow")
    (data / "images").mkdir(parents=True)
    with gzip.open(data / "chats.jsonl.gz", "wt") as file:
        for number in range(200):
            color = str(generator.choice(colors))
            messages = [{"role": "system", "content": "Be brief."}]
            chat: dict[str, object] = {"messages": messages}
            if number % 4:
                image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), color)
                image.save(data / f"images/{number}.png")
                chat["images"] = [f"{number}.png"]
                messages.append({"role": "user", "content": "<image>Which color is it?"})
                messages.append({"role": "assistant", "content": f"It is {color}."})
            for _ in range(generator.integers(number % 4 == 0, 4)):
                a, b = generator.integers(0, 5, 2).tolist()
                messages.append({"role": "user", "content": f"What is {a} + {b}?"})
                messages.append({"role": "assistant", "content": f"{a + b}."})
            file.write(json.dumps(chat) + "\n")
    prepare_jsonl(data / "chats.jsonl.gz")


if __name__ == "__main__":
    main()
