"""Configurations whose order, states and files are recorded.

`python -m tests.golden.runs` records them anew, after a change that is meant to alter one of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon.prepare.dataset import prepare_dataset
from energon.prepare.jsonl import prepare_jsonl
from tests.commands import run
from tests.datasets import jpeg, make_captions, make_crude, write_shard
from tests.golden.commands import command_results
from tests.token_files import numbered, write_tokens

RECORDED = Path(__file__).parent / "golden.json"
TOPOLOGIES = [(1, 1), (8, 1), (8, 4), (6, 3)]
"""Lanes and ranks."""
NUM_BATCHES = 120
SAVED_AT = (0, 7, 50)
NUM_AFTER = 20


def _name(sample: Any) -> str:
    name: str = sample["__key__"] if isinstance(sample, dict) else sample.__key__
    return name


class Keys(DefaultTaskEncoder):
    """Batches of keys."""

    decoder = None

    def batch(self, samples):
        return [_name(sample) for sample in samples]


class Packs(Keys):
    """Packs of samples, up to 25 characters of keys each."""

    def select_samples_to_pack(self, samples):
        packs, size = [[]], 0
        for sample in samples:
            size += len(_name(sample))
            if size > 25:
                packs.append([])
                size = len(_name(sample))
            packs[-1].append(sample)
        return packs

    def pack_selected_samples(self, samples):
        return samples

    def batch(self, samples):
        return [[_name(sample) for sample in pack] for pack in samples]


class Groups(Keys):
    """Batches of samples whose keys end alike."""

    def batch_group_criterion(self, sample):
        return int(_name(sample)[-1], 36) % 3, 4


class Skips(Keys):
    """Leaves out some samples, and repeats others with a random number."""

    def encode_sample(self, sample):
        if _name(sample).endswith("7"):
            return
        yield sample
        if np.random.rand() < 0.3:
            yield sample


def write_datasets(root: Path) -> None:
    """Write a dataset of every kind, and documents that blend them."""
    make_captions(root / "large", [40, 25, 60], prefix="l")
    make_captions(root / "small", [20, 17], prefix="m")
    make_crude(root / "crude", [30, 1, 12], prefix="c")
    write_tokens(root / "tokens/a", numbered([9, 14, 3, 40, 22, 8]))
    (root / "lines.jsonl").write_text("".join(f'{{"text": "{n}"}}\n' for n in range(50)))
    prepare_jsonl(root / "lines.jsonl")
    (root / "table").mkdir()
    for number in range(2):
        column = pa.array([f"row {n}" for n in range(23)])
        pq.write_table(pa.table({"text": column}), root / f"table/{number}.parquet")
    (root / "folder").mkdir()
    for number in range(15):
        (root / f"folder/{number:02}.jpg").write_bytes(jpeg(number))
        (root / f"folder/{number:02}.txt").write_text(f"caption {number}")
    for name, split in DOCUMENTS.items():
        head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
        (root / f"{name}.yaml").write_text(yaml.safe_dump({**head, "splits": {"train": split}}))


WINDOWS = {"path": "tokens/a", "read": {"unit": "sequence", "length": 5, "overlap": 1}}
DOCUMENTS: dict[str, Any] = {
    "blend": {"blend": [{"path": "large", "weight": 5}, {"path": "small", "weight": 2}]},
    "epochized": {
        "blend_epochized": [
            {"path": "large", "repetitions": 2},
            {"path": "small", "repetitions": 0.7},
        ]
    },
    "nested": {
        "blend": [
            {"weight": 1, "concat": [{"path": "small"}, {"path": "crude"}]},
            {"weight": 2, "blend": [{"path": "large", "weight": 1}, {"path": "crude"}]},
            {"weight": 1, "path": "lines.jsonl"},
        ]
    },
    "token files": {"path": "tokens/a"},
    "token windows": WINDOWS,
    "kinds": {
        "blend": [
            {**WINDOWS, "weight": 2},
            {"path": "table", "weight": 1},
            {"path": "folder", "weight": 1},
        ]
    },
    "subset": {
        "blend": [
            {"path": "large", "weight": 1, "subset": {"range": ["20%", "60%"]}},
            {"path": "small", "weight": 1, "shuffle_over_epochs_multiplier": 3},
        ]
    },
    "limited": {
        "blend": [
            {"path": "large", "weight": 1},
            {"path": "small", "weight": 3, "max_epochs": 2},
        ]
    },
    "curve": {
        "blend": [
            {"path": "large", "weight": {0: 1, 100: 5}},
            {"path": "small", "weight": 2},
        ]
    },
}

Options = dict[str, Any]
CONFIGURATIONS: dict[str, tuple[str, type[Keys], Options]] = {
    "one dataset": ("large", Keys, {}),
    "one dataset, buffered": ("large", Keys, {"shuffle_buffer_size": 10}),
    "one dataset, slices": ("large", Keys, {"max_samples_per_sequence": 4}),
    "one dataset, both": (
        "large",
        Keys,
        {"max_samples_per_sequence": 4, "shuffle_buffer_size": 10, "parallel_shard_iters": 3},
    ),
    "drop last": ("large", Keys, {"batch_drop_last": True, "repeat": False}),
    "one epoch": ("large", Keys, {"repeat": False}),
    "several epochs": ("small", Keys, {"shuffle_over_epochs_multiplier": 4}),
    "all epochs": ("small", Keys, {"shuffle_over_epochs_multiplier": -1}),
    **{name: (f"{name}.yaml", Keys, {}) for name in DOCUMENTS},
    "blend, in batches": ("blend.yaml", Keys, {"blend_unit": "batch"}),
    "blend, packed": ("blend.yaml", Packs, {"packing_buffer_size": 12}),
    "blend, grouped": ("blend.yaml", Groups, {"batch_size": None}),
    "blend, some left out": ("blend.yaml", Skips, {}),
    "virtual epochs": ("blend.yaml", Keys, {"virtual_epoch_length": 9}),
    **{name: (name, Keys, {}) for name in ("lines.jsonl", "table", "folder")},
}


def global_batches(
    root: Path, name: str, topology: tuple[int, int], state: Any = None, start: int = 0
) -> tuple[list[Any], Iterator[Any]]:
    """Open all ranks of a run; return their loaders, and their batches in the global order."""
    path, encoder, options = CONFIGURATIONS[name]
    lanes, world_size = topology
    loaders = [
        get_savable_loader(
            get_train_dataset(
                root / path,
                worker_config=WorkerConfig(
                    rank=rank, world_size=world_size, num_workers=0, lanes=lanes, seed_offset=5
                ),
                task_encoder=encoder(),
                **{"batch_size": 3, **options},
            )
        )
        for rank in range(world_size)
    ]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)

    def endless(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader
            if not (CONFIGURATIONS[name][2].get("virtual_epoch_length")):
                return

    iterators = [endless(loader) for loader in loaders]

    def taken() -> Iterator[Any]:
        at = start
        while (batch := next(iterators[at % world_size], None)) is not None:
            yield batch
            at += 1

    return loaders, taken()


def digest(batches: Any) -> str:
    """Return a short hash of a list of batches of keys."""
    return hashlib.blake2b(json.dumps(batches).encode(), digest_size=9).hexdigest()


def order(root: Path, name: str, topology: tuple[int, int]) -> list[Any]:
    """Return the number of batches and a hash of their keys."""
    batches = list(islice(global_batches(root, name, topology)[1], NUM_BATCHES))
    return [len(batches), digest(batches)]


def saved_states(root: Path, name: str) -> list[Any]:
    """Return states of the only rank, and a hash of the batches after each."""
    saved = []
    for steps in SAVED_AT:
        loaders, batches = global_batches(root, name, (8, 1))
        if len(list(islice(batches, steps))) < steps:
            break  # the run has ended
        state = json.loads(json.dumps(loaders[0].state_dict()).replace(str(root), "ROOT"))
        saved.append([steps, state, digest(list(islice(batches, NUM_AFTER)))])
    return saved


def _hashes(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.blake2b(path.read_bytes(), digest_size=9).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
        # Left out: the layout of SQLite, the time of a shard just written, and addresses.
        and path.suffix not in (".sqlite", ".uuid")
        and not path.match("packed/*/*.parts")
        and path.name != "pack.json"
    }


def written_files(root: Path) -> dict[str, str]:
    """Return hashes of the files that prepare, pack and index write."""
    samples = [(f"s{n:03}", {"jpg": jpeg(n), "txt": b"x" * n}) for n in range(40)]
    for shard in range(4):
        write_shard(root / f"tars/{shard}.tar", samples[shard::4])
        os.utime(root / f"tars/{shard}.tar", (1_700_000_000, 1_700_000_000))
    prepare_dataset(
        root / "tars", split_ratio={"train": 8, "val": 1, "test": 1}, sample_type="CrudeWebdataset"
    )
    for number in range(9):
        (root / f"media/{number % 3}").mkdir(parents=True, exist_ok=True)
        (root / f"media/{number % 3}/{number}.jpg").write_bytes(jpeg(number))
        (root / f"media/{number % 3}/{number}.txt").write_text(f"{number}")
    for arguments in (
        ["pack", root / "media", root / "packed", "--maxcount", "4"],
        ["tar", "create", root / "media", "-o", root / "media.tar"],
    ):
        done = run(*arguments)
        assert done.exit_code == 0, done.output
    (root / "lines.jsonl").write_text("".join(f'{{"text": "{n}"}}\n' for n in range(50)))
    prepare_jsonl(root / "lines.jsonl")
    return _hashes(root)


def recorded(write: Callable[[Path], Any]) -> Any:
    """Return the result of a function of an empty folder."""
    with TemporaryDirectory() as folder:
        return write(Path(folder))


def _all_orders(root: Path) -> dict[str, Any]:
    write_datasets(root)
    return {
        "orders": {
            name: {
                f"{lanes} lanes, {ranks} ranks": order(root, name, (lanes, ranks))
                for lanes, ranks in TOPOLOGIES
            }
            for name in CONFIGURATIONS
        },
        "states": {name: saved_states(root, name) for name in CONFIGURATIONS},
    }


if __name__ == "__main__":
    golden = {
        **recorded(_all_orders),
        "files": recorded(written_files),
        "commands": recorded(command_results),
    }
    RECORDED.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{RECORDED}: {RECORDED.stat().st_size} bytes\n")
