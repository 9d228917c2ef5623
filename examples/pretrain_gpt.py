"""Pre-train a GPT on token files: packed sequences, a curriculum, checkpoints for any world size.

    python examples/pretrain_gpt.py CORPORA CHECKPOINT [--steps N]
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py CORPORA CHECKPOINT [--steps N]

The model is a GPT of the Llama family, as in torchtitan; the token files are those of Megatron-LM.
CORPORA is a folder with the token files web.bin, web.idx, code.bin and code.idx, as `energon pack
--to tokens` writes them; if it does not exist, small ones are created there. Documents are
concatenated and cut into sequences, and each attends only to itself. The share of code grows during
the run. CHECKPOINT is written every 10 steps, and a run that finds one continues there, also after
it was killed: a step has the same sequences on any number of ranks that divides MICRO_BATCHES. On
SIGTERM, which clusters send before they take a node away, it saves after the step and ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from energon import TokensSample, WorkerConfig, get_savable_loader, get_train_dataset
from energon.formats.tokens import token_index_bytes

VOCABULARY = 512
CONTEXT = 64
MICRO_BATCHES = 6
"""Batches of a step, over all ranks: 1, 2, 3 or 6 of them."""
BATCH_SIZE = 2


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, save, and return the loss of the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpora", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    options = parser.parse_args(arguments)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 and not options.corpora.exists():
        make_corpora(options.corpora)
    if world_size > 1:
        torch.distributed.barrier()
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0, lanes=MICRO_BATCHES)
    dataset = get_train_dataset(blend(options.corpora), worker_config=config, batch_size=BATCH_SIZE)
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, loss = 0, 0.0
    with get_savable_loader(dataset) as loader:
        if options.checkpoint.exists():
            saved = torch.load(options.checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.restore_state_global(saved["data"])
            step = saved["step"]
        batches = iter(loader)
        stopping = Flag(signal.SIGTERM)
        while step < options.steps:
            loss = 0.0
            for _ in range(MICRO_BATCHES // world_size):
                part = loss_of(model, next(batches)) / MICRO_BATCHES
                part.backward()
                loss += part.item()
            loss, is_last = sum_over_ranks(model, loss, stopping.is_set, world_size)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % options.save_every == 0 or step == options.steps or is_last:
                data = loader.save_state_global(global_dst_rank=0)
                if rank == 0:
                    save(
                        options.checkpoint,
                        model=model.state_dict(),
                        optimizer=optimizer.state_dict(),
                        data=data,
                        step=step,
                    )
            if is_last:
                break
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


def blend(corpora: Path) -> dict[str, object]:
    """Return the training mix: less and less of the web, more and more code."""
    read = {"unit": "sequence", "length": CONTEXT + 1, "overlap": 1}
    return {
        "splits": {
            "train": {
                "blend": [
                    {"path": str(corpora / "web.idx"), "read": read, "weight": 1},
                    {
                        "path": str(corpora / "code.idx"),
                        "read": read,
                        "weight": {0: 0.1, 40: 0.1, 120: "ramp to 1"},
                    },
                ]
            }
        }
    }


def make_model() -> LlamaForCausalLM:
    """Return a tiny GPT of the Llama family; `from_pretrained` returns one of the Hub."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, batch: TokensSample) -> torch.Tensor:
    """Return the loss of a batch; the first token of a document is not predicted by another one.

    From positions, the model finds the documents, which attend only to themselves.
    """
    tokens = torch.as_tensor(batch.tokens)
    positions = torch.as_tensor(batch.positions)
    output = model(input_ids=tokens[:, :-1], position_ids=positions[:, :-1], use_cache=False)
    labels = tokens[:, 1:].masked_fill(positions[:, 1:] == 0, -100)
    return functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


class Flag:
    """Whether a signal has come."""

    def __init__(self, number: signal.Signals) -> None:
        self.is_set = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, self.set)

    def set(self, *_: object) -> None:
        """Note that the signal has come."""
        self.is_set = True


def sum_over_ranks(
    model: LlamaForCausalLM, loss: float, is_last: bool, world_size: int
) -> tuple[float, bool]:
    """Sum gradients and loss over the ranks, which have a share of the step each.

    Also return whether any rank has to stop, on which all ranks have to agree.
    """
    if world_size == 1:
        return loss, is_last
    total = torch.tensor([loss, float(is_last)])
    for each in (total, *(parameter.grad for parameter in model.parameters())):
        if each is not None:
            torch.distributed.all_reduce(each)
    return float(total[0]), bool(total[1])


def make_corpora(folder: Path) -> None:
    """Write token files of documents that count upwards, by one or by two."""
    folder.mkdir(parents=True)
    for name, by in (("web", 1), ("code", 2)):
        generator = np.random.default_rng(by)
        lengths = generator.integers(8, 120, 200).tolist()
        documents = [
            (generator.integers(VOCABULARY) + by * np.arange(length)) % VOCABULARY
            for length in lengths
        ]
        np.concatenate(documents).astype(np.uint16).tofile(folder / f"{name}.bin")
        with open(folder / f"{name}.idx", "wb") as file:
            file.writelines(token_index_bytes(np.dtype(np.uint16), lengths))


if __name__ == "__main__":
    main()
