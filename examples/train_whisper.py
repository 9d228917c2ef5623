"""Train Whisper on WAV files with transcripts, in batches of similar length.

    python examples/train_whisper.py DATA CHECKPOINT [--steps N] [--workers N]
    torchrun --nproc-per-node 2 examples/train_whisper.py DATA CHECKPOINT

DATA is a prepared dataset of parts wav and txt; if it does not exist, a small one is created there,
in which each letter is a tone. Whisper pads all recordings to the same length, so batches are
grouped by the length of their transcripts. The model is tiny and untrained, and the feature
extractor that of Whisper. If CHECKPOINT exists, the run continues where it was saved.
"""

from __future__ import annotations

import argparse
import io
import os
import wave
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from energon import (
    Batch,
    Cooker,
    DefaultTaskEncoder,
    Sample,
    ShardWriter,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
)

RATE = 16_000
SECONDS = 5
"""The length to which Whisper pads recordings; 30 for its weights on the Hub."""
LANES = 4
"""A run can continue on any number of ranks that divides this."""
LETTERS = "abcdef"
BUCKETS = {8: 16, 24: 8}
"""Most letters of a transcript in each group of batches, and how many recordings make a batch."""
PADDING, START, END = 0, 1, 2
"""Tokens; letters follow."""
IGNORED = -100
"""The label of padding."""

EXTRACT = WhisperFeatureExtractor(feature_size=16, sampling_rate=RATE, chunk_length=SECONDS)


@edataclass
class Recording(Sample):
    """The features of a recording, and the tokens of its transcript."""

    features: torch.Tensor
    """(16, frames): as many frames for all recordings."""
    labels: torch.Tensor


@edataclass
class Recordings(Batch):
    """A batch; labels are padded with IGNORED."""

    features: torch.Tensor
    labels: torch.Tensor


def cook(sample: dict) -> Recording:
    """Return a sample of the parts wav and txt."""
    (sound,) = sample["wav"].get_audio().audio_clips
    signal = sound.mean(dim=0).numpy()
    features = EXTRACT(signal, sampling_rate=RATE, return_tensors="pt")["input_features"][0]
    letters = [LETTERS.index(letter) + END + 1 for letter in sample["txt"]]
    return Recording(
        **basic_sample_keys(sample), features=features, labels=torch.tensor([*letters, END])
    )


class SpeechEncoder(DefaultTaskEncoder):
    """Groups recordings by the length of their transcripts."""

    cookers = (Cooker(cook),)

    def batch_group_criterion(self, sample: Recording) -> tuple[int, int]:
        """Return the bucket of a recording, and how many make a batch of it."""
        bucket = next(longest for longest in BUCKETS if len(sample.labels) <= longest)
        return bucket, BUCKETS[bucket]

    def batch(self, samples: list[Recording]) -> Recordings:
        """Return a batch."""
        labels = [sample.labels for sample in samples]
        return Recordings.from_samples(
            samples,
            labels=pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        )


def make_model() -> WhisperForConditionalGeneration:
    """Return a tiny Whisper; `from_pretrained("openai/whisper-small")` returns that of the Hub."""
    config = WhisperConfig(
        vocab_size=END + 1 + len(LETTERS),
        num_mel_bins=16,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=EXTRACT.nb_max_frames // 2,
        max_target_positions=32,
        pad_token_id=PADDING,
        bos_token_id=START,
        decoder_start_token_id=START,
        eos_token_id=END,
    )
    return WhisperForConditionalGeneration(config)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, save, and return the loss of the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=40)
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
        options.data,
        worker_config=config,
        batch_size=None,  # the group says
        task_encoder=SpeechEncoder(),
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
            batch = next(batches)
            loss = train_step(model, batch)
            share_gradients(model, world_size)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0 and step % 20 == 0:
                number, length = batch.labels.shape
                click.echo(
                    f"step {step}: {number} recordings, transcripts of up to {length} tokens"
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


def share_gradients(model: WhisperForConditionalGeneration, world_size: int) -> None:
    """Replace the gradients by their mean over all ranks."""
    for each in model.parameters() if world_size > 1 else ():
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        torch.distributed.all_reduce(each.grad)
        each.grad /= world_size


def train_step(model: WhisperForConditionalGeneration, batch: Recordings) -> float:
    """Add the gradients of a batch; return its loss."""
    loss = model(input_features=batch.features, labels=batch.labels).loss
    loss.backward()
    return loss.item()


def make_data(folder: Path) -> None:
    """Write recordings of words, of which each letter is a tone."""
    generator = np.random.default_rng(0)
    with ShardWriter(folder / "%03d.tar", maxcount=50) as writer:
        for number in range(200):
            letters = generator.integers(len(LETTERS), size=generator.integers(2, 20))
            tones = [400 * (letter + 1) for letter in letters]
            time = np.arange(RATE // 4) / RATE
            sound = np.concatenate([np.sin(2 * np.pi * tone * time) for tone in tones])
            with wave.open(buffer := io.BytesIO(), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(RATE)
                file.writeframes((20_000 * sound).astype(np.int16).tobytes())
            text = "".join(LETTERS[letter] for letter in letters)
            writer.write({"__key__": f"{number:04}", "wav": buffer.getvalue(), "txt": text})
    prepare_dataset(folder, split_ratio={"train": 1}, sample_type="CrudeWebdataset")


if __name__ == "__main__":
    main()
