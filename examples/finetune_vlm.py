"""Fine-tune a vision-language model of the Qwen2.5-VL or the LLaVA family on conversations.

    python examples/finetune_vlm.py DATA CHECKPOINT [--family llava] [--plan] [--steps N]
    torchrun --nproc-per-node 2 examples/finetune_vlm.py DATA CHECKPOINT [--steps N]

DATA is a folder with chats.jsonl and the prepared dataset images, whose files the conversations
name; if it does not exist, a small one is created there. Models and processors are classes of
transformers. Here they are tiny and untrained, so that nothing is downloaded: replace `qwen` or
`llava` by the two calls of `from_pretrained` that their docstrings show.

Conversations are packed into sequences of CONTEXT tokens. Images are read and processed when their
pack is made. With --plan, packs are planned for all ranks from the measure "tokens", and all ranks
take equally long for a step. The loss covers only the answers, and weighs all of their tokens
equally across ranks. CHECKPOINT is written every 10 steps, and a run that finds one continues
there, with any number of workers and on any number of ranks that divides MICRO_BATCHES.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)

from energon import (
    Batch,
    CachePool,
    Cooker,
    DefaultTaskEncoder,
    FileStore,
    Lazy,
    PlannedPacks,
    Sample,
    SampleDecoder,
    ShardWriter,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    open_file_store,
    prepare_jsonl,
)
from energon.packing import Packer, chat_messages, chat_tokens, pack_sequences

CONTEXT = 256
MICRO_BATCHES = 6
"""Packs of a step, over all ranks: 1, 2, 3 or 6 of them."""
IGNORED = -100
"""The label of tokens that are not learned."""

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are processes


@edataclass
class Chat(Sample):
    """A conversation. Its images are read later, since many conversations wait for their pack."""

    messages: list[dict[str, Any]]
    sizes: list[tuple[int, int]]
    """Width and height of each image."""
    images: list[Lazy]


@edataclass
class Tokens(Sample):
    """The tokens of a conversation, and the inputs that its images become."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """(length,): the token itself where it is learned, or else IGNORED."""
    images: list[Lazy]
    pixels: dict[str, torch.Tensor]


@edataclass
class Pack(Batch):
    """A pack of conversations: a micro-batch."""

    tokens: torch.Tensor
    """(CONTEXT,)."""
    labels: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    """(conversations + 1,), or one more for the padding."""
    max_seqlen: int
    pixels: dict[str, torch.Tensor]
    """What the model takes of images, such as `pixel_values`."""


@cooker(need_cache=True)
def cook(sample: dict, images: FileStore, cache: CachePool) -> Chat:
    """Return the conversation of a line."""
    names = sample["json"].get("images", ())
    return Chat(
        **basic_sample_keys(sample),
        messages=chat_messages(sample["json"]),
        sizes=sizes_of(images, names),
        images=[cache.get_lazy(images, name) for name in names],
    )


def sizes_of(images: FileStore, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return width and height of images, from the index."""
    found = [images.get_media_metadata(name) for name in names]
    return [(each.width, each.height) for each in found]


class ChatEncoder(DefaultTaskEncoder):
    """Packs conversations, and gives images to the processor."""

    cookers = (Cooker(cook),)
    decoder = SampleDecoder(image_decode="pilrgb")
    # One that is longer than the context is left out, and counted in `loader.stats()`.
    select_samples_to_pack = Packer(
        CONTEXT, length=lambda sample: len(sample.tokens), too_long="leave_out"
    )

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor = processor

    def preencode_sample(self, chat: Chat) -> Tokens:
        """Return a conversation as tokens, those of its images included."""
        found = chat_tokens(self.processor, chat.messages, image_sizes=chat.sizes)
        tokens = torch.from_numpy(found.tokens)
        return Tokens.derive_from(
            chat,
            tokens=tokens,
            labels=tokens.where(torch.from_numpy(found.loss_mask), IGNORED),
            images=chat.images,
            pixels={},
        )

    def postencode_sample(self, sample: Tokens) -> Tokens:
        """Read and process the images of a conversation whose pack is made."""
        images = [image.get(sample) for image in sample.images]
        pixels = self.processor.image_processor(images, return_tensors="pt") if images else {}
        return Tokens.extend(sample, pixels=dict(pixels))

    def pack_selected_samples(self, samples: list[Tokens]) -> Pack:
        """Return a pack."""
        tokens = pack_sequences([sample.tokens for sample in samples], pad_to=CONTEXT)
        labels = [sample.labels for sample in samples]
        pixels = [sample.pixels for sample in samples if sample.pixels]
        names = pixels[0] if pixels else ()
        return Pack(
            __key__=[sample.__key__ for sample in samples],
            tokens=tokens.values,
            labels=pack_sequences(labels, pad_to=CONTEXT, pad_value=IGNORED).values,
            position_ids=tokens.position_ids,
            cu_seqlens=tokens.cu_seqlens,
            max_seqlen=tokens.max_seqlen,
            pixels={name: torch.cat([each[name] for each in pixels]) for name in names},
        )

    def batch(self, packs: list[Pack]) -> Pack:
        """Return the only pack of a micro-batch."""
        (pack,) = packs
        return pack


@dataclass
class Family:
    """A processor and a model that fits it."""

    processor: Any
    model: torch.nn.Module
    has_3d_positions: bool = False

    def logits(self, pack: Pack) -> torch.Tensor:
        """Return predictions of the next token, (CONTEXT, vocabulary).

        From positions, the model finds the conversations, which attend only to themselves; kernels
        for variable lengths take the offsets.
        """
        positions = pack.position_ids[None]
        if self.has_3d_positions:
            positions = torch.cat([positions[None], self.positions_3d(pack)])
        offsets, longest = pack.cu_seqlens, pack.max_seqlen
        output = self.model(
            input_ids=pack.tokens[None],
            position_ids=positions,
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=longest,
            max_length_k=longest,
            use_cache=False,
            **pack.pixels,
        )
        return output.logits[0]

    def positions_3d(self, pack: Pack) -> torch.Tensor:
        """Return positions in time, height and width, (3, 1, CONTEXT), as Qwen-VL takes them."""
        grids = pack.pixels.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        is_image = (pack.tokens == self.processor.image_token_id).int()
        found, used = [], 0
        for start, stop in pack.cu_seqlens.unfold(0, 2, 1).tolist():
            of_images = pack.tokens[start:stop] == self.processor.vision_start_id
            here = int(of_images.sum())
            positions, _ = self.model.model.get_rope_index(
                pack.tokens[None, start:stop],
                is_image[None, start:stop],
                grids[used : used + here],
            )
            found.append(positions)
            used += here
        return torch.cat(found, dim=2)


class ImageProcessor(Qwen2_5_VLProcessor):
    """The processor of Qwen2.5-VL without that of videos, which needs torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.vision_start_id = tokenizer.convert_tokens_to_ids("<|vision_start|>")


def qwen() -> Family:
    """Return a tiny model of the Qwen2.5-VL family.

    With weights of the Hub:

        processor = AutoProcessor.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct")
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            "Qwen/Qwen2.5-VL-3B-Instruct", attn_implementation="flash_attention_2"
        )
    """
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    of_images = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = train_tokenizer(*marks, *of_images)
    images = Qwen2VLImageProcessorPil(
        patch_size=14, size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    )
    processor = ImageProcessor(images, tokenizer, chat_template=CHATML)
    config = Qwen2_5_VLConfig(
        text_config={
            **TINY,
            "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": TINY["hidden_size"],
            "fullatt_block_indexes": [1],
        },
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
    )
    return Family(processor, Qwen2_5_VLForConditionalGeneration(config), has_3d_positions=True)


def llava() -> Family:
    """Return a tiny model of the LLaVA family.

    With weights of the Hub:

        processor = AutoProcessor.from_pretrained("llava-hf/llava-1.5-7b-hf")
        model = LlavaForConditionalGeneration.from_pretrained("llava-hf/llava-1.5-7b-hf")
    """
    tokenizer = train_tokenizer("<pad>", "<s>", "</s>", "<image>")
    size = {"height": 56, "width": 56}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=size),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=VICUNA,
    )
    config = LlavaConfig(
        text_config={"model_type": "llama", **TINY, "vocab_size": len(tokenizer)},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return Family(processor, LlavaForConditionalGeneration(config))


FAMILIES = {"qwen": qwen, "llava": llava}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
CHATML = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] %}{% if part['type'] == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The chat template of Qwen2.5-VL, without tools."""
VICUNA = """\
{% for message in messages %}{{ message['role'].upper() }}: \
{% for part in message['content'] if part['type'] == 'image' %}<image>
{% endfor %}{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}\
{% endfor %}{% if message['role'] == 'assistant' %}</s>{% else %} {% endif %}{% endfor %}\
{% if add_generation_prompt %}ASSISTANT: {% endif %}"""
"""The chat template of LLaVA 1.5."""


def train_tokenizer(*special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and some words."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator([question for question, _ in QUESTIONS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=special[0])


def count_tokens(sample: dict) -> int:
    """Return the tokens of a decoded line for Qwen2.5-VL: the measure "tokens".

    The variable IMAGES names the dataset of the images.
    """
    chat = sample["json"]
    sizes = sizes_of(image_store(os.environ["IMAGES"]), chat.get("images", ()))
    return len(chat_tokens(processor_of("qwen"), chat_messages(chat), image_sizes=sizes).tokens)


@cache
def image_store(path: str) -> FileStore:
    """Return the images of conversations, opened once in each process."""
    return open_file_store(path)


@cache
def processor_of(family: str) -> Any:
    """Return the processor of a family, made once in each process."""
    return FAMILIES[family]().processor


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, save, and return the loss of the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="qwen")
    parser.add_argument("--plan", action="store_true", help="plan packs from the measure 'tokens'")
    parser.add_argument("--steps", type=int, default=20)
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
    torch.manual_seed(0)
    family = FAMILIES[options.family]()
    config = WorkerConfig(
        rank=rank, world_size=world_size, num_workers=options.workers, lanes=MICRO_BATCHES
    )
    packing = {"pack": PlannedPacks(length="tokens", context=CONTEXT, too_long="leave_out")}
    dataset = get_train_dataset(
        chats(options.data),
        worker_config=config,
        batch_size=1,
        task_encoder=ChatEncoder(family.processor),
        **(packing if options.plan else {"packing_buffer_size": 64}),
    )
    optimizer = torch.optim.AdamW(family.model.parameters(), lr=2e-3)
    step, loss = 0, 0.0
    with get_savable_loader(dataset) as loader:
        if options.checkpoint.exists():
            saved = torch.load(options.checkpoint)
            family.model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.restore_state_global(saved["data"])
            step = saved["step"]
        batches = iter(loader)
        while step < options.steps:
            packs = [next(batches) for _ in range(MICRO_BATCHES // world_size)]
            loss = train_step(family, packs, world_size)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % options.save_every == 0 or step == options.steps:
                data = loader.save_state_global(global_dst_rank=0)
                if rank == 0:
                    save(
                        options.checkpoint,
                        model=family.model.state_dict(),
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
    """Return the training data: the conversations, and the dataset of their images."""
    aux = {"images": str(data.resolve() / "images")}
    return {"splits": {"train": {"path": str(data / "chats.jsonl"), "aux": aux}}}


def train_step(family: Family, packs: Sequence[Pack], world_size: int) -> float:
    """Add the gradients of a step; return its loss, the mean over all tokens that are learned."""
    total = torch.zeros(2)
    for pack in packs:
        logits, labels = family.logits(pack)[:-1], pack.labels[1:]
        loss = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        loss.backward()
        total += torch.tensor([loss.item(), (labels != IGNORED).sum()])
    parameters = list(family.model.parameters())
    for each in parameters:  # those of images have none if no pack of this rank has an image
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
    if world_size > 1:
        for value in (total, *(each.grad for each in parameters)):
            torch.distributed.all_reduce(value)
    # Packs have different numbers of such tokens: a mean of their means would weigh them wrongly.
    for each in parameters:
        each.grad /= total[1]
    return float(total[0] / total[1])


QUESTIONS = (
    ("<image>Which color is it?", "It is {color}."),
    ("<image>\nIs it wide or high?", "It is {shape}."),
    ("Look: <image> What do you see?", "An image that is {color} and {shape}."),
)


def make_data(data: Path) -> None:
    """Write conversations about the colors of images, some of them without an image."""
    generator = np.random.default_rng(0)
    colors = ("red", "green", "blue", "yellow")
    with (
        ShardWriter(data / "images/%03d.tar", maxcount=50) as images,
        (data / "chats.jsonl").open("w") as file,
    ):
        for number in range(120):
            width, height = generator.integers(30, 160, 2).tolist()
            color, shape = str(generator.choice(colors)), "wide" if width > height else "high"
            messages = [{"role": "system", "content": "Be brief."}]
            chat: dict[str, object] = {"messages": messages}
            if number % 4:
                image = io.BytesIO()
                Image.new("RGB", (width, height), color).save(image, "PNG")
                images.write({"__key__": f"{number:04}", "png": image.getvalue()})
                chat["images"] = [f"{number:04}.png"]
                question, answer = QUESTIONS[generator.integers(len(QUESTIONS))]
                messages.append({"role": "user", "content": question})
                answer = answer.format(color=color, shape=shape)
                messages.append({"role": "assistant", "content": answer})
            for _ in range(generator.integers(number % 4 == 0, 4)):
                a, b = generator.integers(0, 5, 2).tolist()
                messages.append({"role": "user", "content": f"What is {a} + {b}?"})
                messages.append({"role": "assistant", "content": f"{a + b}."})
            file.write(json.dumps(chat) + "\n")
    # With the sizes of images in the index, their tokens are counted before they are read.
    options = "--non-interactive --split-ratio 1 --media-metadata-by-extension"
    command = [sys.executable, "-m", "energon", "prepare", str(data / "images"), *options.split()]
    subprocess.run(command, check=True, capture_output=True)
    prepare_jsonl(data / "chats.jsonl")


if __name__ == "__main__":
    main()
