"""Measure what hooks cost: CPU time and calls per sample, beside a loop written by hand.

    python benchmarks/hooks.py [--data FOLDER] [--only SCENARIO] [--workers N]

Each scenario is one program. Times are CPU microseconds of this process per sample, the lowest
decile of many chunks, since others may use the machine; chunks of the loader, of the loop by hand
and of a calibration take turns, and all are scaled to the machine's best speed. Calls are counted
by `sys.setprofile`, so they come out the same on any machine. The loop by hand reads the same
samples in the same order and calls the same functions, with no keys, no positions and nothing to
resume.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import data
from energon import (
    Cooker,
    DefaultTaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_loader,
    get_train_dataset,
    stateless,
)
from energon.prepare.dataset import prepare_dataset
from energon.samples.sample import TextSample
from energon.sources.webdataset import WebdatasetSource

BATCH_SIZE = 32
PACK = 8


class Raw(DefaultTaskEncoder):
    """Hands samples on as they are in the shards."""

    decoder = None

    @stateless
    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


@stateless
def encode(sample: Any) -> Any:
    return sample


class Encoding(Raw):
    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return sample


@cooker
@stateless
def pass_on(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


@cooker
@stateless
def cook_text(sample: dict[str, Any]) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


class Decoding(DefaultTaskEncoder):
    """Decodes by extension, as task encoders do that say nothing else."""

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return sample

    @stateless
    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


class Cooking(Raw):
    cookers = (Cooker(pass_on),)


class CookingEncoding(Encoding):
    cookers = (Cooker(pass_on),)


class Typing(Encoding):
    cookers = (Cooker(cook_text),)


class Packing(Typing):
    @stateless
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + PACK] for at in range(0, len(samples), PACK)]

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> list[str]:
        return [sample.text for sample in samples]


class Grouping(Typing):
    @stateless
    def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
        return len(sample.text) % 4, None


class Scenario(NamedTuple):
    """A program.

    Args:
        kind: The dataset.
        encoder: Its hooks.
        by_hand: What the loop by hand does with a sample; None where there is none.
        settings: Of the dataset getter.
    """

    kind: str
    encoder: type[Raw]
    by_hand: Callable[[dict[str, Any]], Any] | None = None
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    samples_of: Callable[[Any], int] = len


def _cook_and_encode(sample: dict[str, Any]) -> Any:
    return encode(pass_on(sample))


def _cook_text_and_encode(sample: dict[str, Any]) -> Any:
    return encode(cook_text(sample))


def _type_and_encode(sample: dict[str, Any]) -> Any:
    return encode(TextSample(__key__=sample["__key__"], text=sample["txt"]))


def _decode_and_encode(sample: dict[str, Any]) -> Any:
    return encode(TextSample(__key__=sample["__key__"], text=sample["txt"].decode()))


def _in_pack(packs: Any) -> int:
    return sum(map(len, packs))


SCENARIOS = {
    "text": Scenario("text", Raw, lambda sample: sample),
    "text, encode": Scenario("text", Encoding, encode),
    "text, cooker": Scenario("text", Cooking, pass_on),
    "text, cooker + encode": Scenario("text", CookingEncoding, _cook_and_encode),
    "text, cooker to TextSample + encode": Scenario("text", Typing, _cook_text_and_encode),
    "typed + encode": Scenario("typed", Encoding, _type_and_encode),
    "typed, decoded + encode": Scenario("typed", Decoding, _decode_and_encode),
    "interleaved": Scenario("interleaved", Raw, lambda sample: sample),
    "interleaved, cooker": Scenario("interleaved", Cooking, pass_on),
    "packed": Scenario(
        "text",
        Packing,
        None,
        {"packing_buffer_size": 64, "batch_size": 1},
        _in_pack,
    ),
    "grouped": Scenario("text", Grouping),
}


def prepare(folder: Path, kind: str) -> Path:
    """Return the dataset of a kind, made if it is not there."""
    path, content = folder / kind, "text" if kind == "typed" else kind
    made = (path / "done").exists()
    data.write(path, content, num_samples=20_000 if content == "text" else 4_000, num_shards=4)
    if not made:
        typed = {"sample_type": "TextSample", "field_map": {"text": "txt"}}
        crude = {"sample_type": "CrudeWebdataset"}
        prepare_dataset(path, split_parts=["train:.*"], **(typed if kind == "typed" else crude))
    return path


def batches(path: Path, scenario: Scenario, num_workers: int) -> Iterator[Any]:
    """Yield the batches of a scenario, without an end."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers)
    dataset = get_train_dataset(
        path,
        worker_config=config,
        task_encoder=scenario.encoder(),
        **{"batch_size": BATCH_SIZE, "max_samples_per_sequence": 100, **scenario.settings},
    )
    with get_loader(dataset) as loader:
        yield from loader


def batches_by_hand(path: Path, function: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
    """Yield batches of samples in shuffled runs of 100, read in blocks and nothing else."""
    source = WebdatasetSource(path)
    random = np.random.default_rng(0)
    starts = np.arange(0, len(source) - 100, 100)
    while True:
        for run in np.array_split(random.permutation(starts), len(starts) // 16):
            ordinals = random.permutation((run[:, None] + np.arange(100)).ravel())
            keys = [(0, 0, ordinal) for ordinal in ordinals.tolist()]
            samples = source.read(ordinals, restore_keys=keys, subflavors={})
            for at in range(0, len(samples), BATCH_SIZE):
                yield [function(sample) for sample in samples[at : at + BATCH_SIZE]]


def calibrate() -> float:
    """Return the CPU seconds of a fixed piece of work, which collects no garbage."""
    start, sample = time.process_time(), {"txt": "text", "__key__": "key"}
    for _ in range(20_000):
        encode(sample)["txt"].startswith(sample["__key__"])
    return time.process_time() - start


def chunk(found: Iterator[Any], samples_of: Callable[[Any], int]) -> float:
    """Return the CPU microseconds of a sample, in the next 4,000."""
    done, start = 0, time.process_time()
    while done < 4_000:
        done += samples_of(next(found))
    return 1e6 * (time.process_time() - start) / done


def lowest_decile(chunks: list[float], calibrations: list[float], best: float) -> float:
    """Return what a sample takes where the machine is fast, at the best speed."""
    scaled = sorted(each * best / pace for each, pace in zip(chunks, calibrations, strict=True))
    return scaled[len(scaled) // 10]


def calls_per_sample(found: Iterator[Any], samples_of: Callable[[Any], int]) -> float:
    """Return how many Python functions are called for a sample."""
    calls = done = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        while done < 8_000:
            done += samples_of(next(found))
    finally:
        sys.setprofile(None)
    return calls / done


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "energon-hooks")
    parser.add_argument("--only")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=40)
    arguments = parser.parse_args()
    out = sys.stdout.write
    best = min(calibrate() for _ in range(50))
    out("| scenario | µs a sample | calls a sample | µs by hand | ratio |\n|---|---|---|---|---|\n")
    for name, scenario in SCENARIOS.items():
        if arguments.only not in (None, name):
            continue
        path = prepare(arguments.data, scenario.kind)
        found, samples_of = batches(path, scenario, arguments.workers), scenario.samples_of
        by_hand = batches_by_hand(path, scenario.by_hand) if scenario.by_hand else None
        for _ in range(3):
            chunk(found, samples_of)
        spent, loop, paces = [], [], []
        for _ in range(arguments.chunks):
            before = calibrate()
            spent.append(chunk(found, samples_of))
            if by_hand is not None:
                loop.append(chunk(by_hand, len))
            paces.append((before + calibrate()) / 2)
        best = min(best, *paces)
        calls = calls_per_sample(found, samples_of)
        found.close()  # type: ignore[attr-defined]
        ours = lowest_decile(spent, paces, best)
        out(f"| {name} | {ours:.1f} | {calls:.1f} ")
        if loop:
            hand = lowest_decile(loop, paces, best)
            out(f"| {hand:.1f} | {ours / hand:.1f} |\n")
        else:
            out("| - | - |\n")


if __name__ == "__main__":
    main()
