"""Measure what hooks cost: CPU time and calls per sample, beside a loop written by hand.

    python benchmarks/hooks.py [--data FOLDER] [--only SCENARIO] [--workers N]

Each scenario is one program. Times are CPU microseconds of this process per sample, the lowest
decile of many chunks, since others may use the machine; chunks of the loader, of the loop by hand
and of a calibration take turns, and all are scaled to the machine's best speed. Calls are counted
by `sys.setprofile`, so they come out the same on any machine. The loop by hand is what one would
write for a single program: it reads as many samples at once in the same kind of order, and has the
keys of samples, their sources where hooks have them, samples that are skipped, and a state with
each batch. It has no lanes, no seeds, no hooks that yield, no statistics and no reports.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import data
from energon import (
    Cooker,
    DefaultTaskEncoder,
    SkipSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_loader,
    get_train_dataset,
    stateless,
)
from energon.prepare.dataset import prepare_dataset
from energon.samples.provenance import record_sources
from energon.samples.sample_types import TextSample
from energon.sources.files.samples import WebdatasetFileStore
from energon.sources.files.store import FileStore
from energon.sources.source import SampleSelection
from energon.sources.webdataset import WebdatasetSource
from energon.stages.lane import MAX_BLOCK_BYTES

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


@stateless
def cook_with_caption(sample: dict[str, Any], captions: FileStore[bytes]) -> TextSample:
    text = captions.get(f"{sample['__key__']}.txt", sample)
    return TextSample(**basic_sample_keys(sample), text=text)


class LookingUp(Raw):
    cookers = (Cooker(cook_with_caption),)


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
        samples_of: Returns how many samples a batch has.
        has_sources: Whether the samples that hooks get have sources.
        opens: What the loop by hand opens, and passes on with each sample.
        parts: The parts that the loop by hand reads; None for all.
    """

    kind: str
    encoder: type[Raw]
    by_hand: Callable[..., Any] | None = None
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    samples_of: Callable[[Any], int] = len
    has_sources: bool = True
    opens: Callable[[Path], Any] | None = None
    parts: tuple[str, ...] | None = None


def _cook_and_encode(sample: dict[str, Any]) -> Any:
    return encode(pass_on(sample))


def _cook_text_and_encode(sample: dict[str, Any]) -> Any:
    return encode(cook_text(sample))


def _type_and_encode(sample: dict[str, Any]) -> Any:
    return encode(_typed(sample, sample["txt"]))


def _decode_and_encode(sample: dict[str, Any]) -> Any:
    return encode(_typed(sample, sample["txt"].decode()))


def _typed(sample: dict[str, Any], text: Any) -> TextSample:
    return TextSample(
        __key__=sample["__key__"],
        __restore_key__=sample["__restore_key__"],
        __subflavors__=sample["__subflavors__"],
        __sources__=sample["__sources__"],
        text=text,
    )


def _join(first: dict[str, Any], second: dict[str, Any]) -> Any:
    return TextSample.from_joined(_typed(first, first["txt"]), _typed(second, second["txt"]))


def _in_pack(packs: Any) -> int:
    return sum(map(len, packs))


SCENARIOS = {
    "text": Scenario("text", Raw, lambda sample: sample, has_sources=False),
    "text, encode": Scenario("text", Encoding, encode, has_sources=False),
    "text, cooker": Scenario("text", Cooking, pass_on),
    "text, cooker + encode": Scenario("text", CookingEncoding, _cook_and_encode),
    "text, cooker to TextSample + encode": Scenario("text", Typing, _cook_text_and_encode),
    "typed + encode": Scenario("typed", Encoding, _type_and_encode, parts=("txt",)),
    "typed, decoded + encode": Scenario("typed", Decoding, _decode_and_encode, parts=("txt",)),
    "interleaved": Scenario("interleaved", Raw, lambda sample: sample, has_sources=False),
    "interleaved, cooker": Scenario("interleaved", Cooking, pass_on),
    "joined": Scenario("joined", Raw, _join, parts=("txt",)),
    "text, cooker that looks up a file": Scenario(
        "looked up", LookingUp, cook_with_caption, opens=WebdatasetFileStore
    ),
    "packed": Scenario(
        "text",
        Packing,
        None,
        {"packing_buffer_size": 64, "batch_size": 1},
        _in_pack,
    ),
    "grouped": Scenario("text", Grouping),
}


DOCUMENTS = {
    "joined": (
        ("typed", "typed"),
        "join: [{path: typed}, {path: typed}], "
        "joiner: {__module__: energon, __class__: TextSample}",
    ),
    "looked up": (("text",), "path: text, aux: {captions: text}"),
}
"""Metadatasets by kind: the datasets whose samples come together, and what is read."""


def prepare(folder: Path, kind: str) -> Path:
    """Return the dataset of a kind, made if it is not there."""
    if kind in DOCUMENTS:
        datasets, node = DOCUMENTS[kind]
        for dataset in datasets:
            prepare(folder, dataset)
        path = folder / f"{kind}.yaml"
        header = "__module__: energon\n__class__: MetadatasetV2\n"
        path.write_text(f"{header}splits: {{train: {{{node}}}}}\n")
        return path
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


def batches_by_hand(
    paths: Sequence[Path], scenario: Scenario, *, start: tuple[int, int, int] = (0, 0, 0)
) -> Iterator[tuple[list[Any], bytes]]:
    """Yield batches of samples in shuffled runs of 100, and the state after each.

    Args:
        paths: Datasets whose samples come together.
        scenario: The program.
        start: A state, unpickled: epoch, window and row in it.
    """
    sources, skipped = (
        [WebdatasetSource(path, SampleSelection(parts=scenario.parts)) for path in paths],
        0,
    )
    source, function = sources[0], scenario.by_hand or encode
    opened = () if scenario.opens is None else (scenario.opens(paths[0]),)
    rows_read = max(1, int(MAX_BLOCK_BYTES / source.mean_sample_bytes) // BATCH_SIZE) * BATCH_SIZE
    *place, row = start
    for epoch, window, ordinals in windows_by_hand(len(source), *place):
        for read in np.split(ordinals[row:], range(rows_read, len(ordinals) - row, rows_read)):
            keys = [(0, epoch, ordinal) for ordinal in read.tolist()]
            blocks = [each.read(read, restore_keys=keys, subflavors={}) for each in sources]
            members = [block.samples(0, len(read)) for block in blocks]
            if scenario.has_sources:
                for path, samples in zip(paths, members, strict=True):
                    record_sources(str(path), samples)
            together = list(zip(*members, strict=True))
            for at in range(0, len(together), BATCH_SIZE):
                batch = []
                for samples in together[at : at + BATCH_SIZE]:
                    try:
                        batch.append(function(*samples, *opened))
                    except SkipSample:
                        skipped += 1
                row += min(BATCH_SIZE, len(together) - at)
                yield batch, pickle.dumps((epoch, window, row))
        row = 0


def windows_by_hand(
    num_samples: int, epoch: int, window: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield windows of 16 runs whose samples are mixed, with epoch and number, from one on."""
    starts = np.arange(0, num_samples - 100, 100)
    while True:
        runs = np.random.default_rng((0, epoch)).permutation(starts)
        windows = np.array_split(runs, len(starts) // 16)
        while window < len(windows):
            ordinals = (windows[window][:, None] + np.arange(100)).ravel()
            yield epoch, window, np.random.default_rng((0, epoch, window)).permutation(ordinals)
            window += 1
        epoch, window = epoch + 1, 0


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
        by_hand = None
        if scenario.by_hand:
            names, _ = DOCUMENTS.get(scenario.kind, ((scenario.kind,), ""))
            by_hand = batches_by_hand([arguments.data / name for name in names], scenario)
        for _ in range(3):
            chunk(found, samples_of)
        spent, loop, paces = [], [], []
        for _ in range(arguments.chunks):
            before = calibrate()
            spent.append(chunk(found, samples_of))
            if by_hand is not None:
                loop.append(chunk(by_hand, lambda found: len(found[0])))
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
