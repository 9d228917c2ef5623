"""Commands on small datasets, whose `--json` is recorded."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon.prepare.dataset import prepare_dataset
from tests.commands import run
from tests.datasets import jpeg, make_captions, make_crude, write_shard

MEASURED = re.compile(r"second|digest|uuid|version|mtime")
"""Names of values that differ between runs or machines."""


class Plain(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Batches of samples that are not decoded."""

    decoder = None


def command_results(root: Path) -> list[Any]:
    """Return each command with its exit code and result."""
    root = root.resolve()
    _write_datasets(root)
    results: list[Any] = []
    for line in COMMANDS:
        done = run(*line.replace("ROOT", str(root)).split(" "), "--json")
        assert done.stdout, (line, done.output)
        text = done.stdout.replace(str(root), "ROOT").replace(f"{root.name}", "NAME")
        result = _plain(json.loads(text))
        if line.startswith("doctor"):  # everything is measured
            result = sorted(result)
        results.append([line, done.exit_code, result])
    return results


def _plain(value: Any, name: str = "") -> Any:
    """Return a result without numbers that differ between runs or machines."""
    if isinstance(value, dict):
        return {key: _plain(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, name) for each in value]
    if MEASURED.search(name) and not isinstance(value, bool):
        return type(value).__name__
    return value


def _write_datasets(root: Path) -> None:
    make_captions(root / "captions", [4, 3, 2])
    make_crude(root / "crude", [5])
    parts = {"json": b'{"a": [1, NaN, null], "b": "text"}', "bin": b"\0\1", "txt": b"\xff\xfe"}
    write_shard(root / "odd/0.tar", [("x", parts), ("y", {**parts, "jpg": b"no image"})])
    prepare_dataset(root / "odd", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    write_shard(root / "tars/0.tar", [(str(n), {"jpg": jpeg(n), "txt": b"t"}) for n in range(6)])
    write_shard(root / "tars/1.tar", [(f"b{n}", {"jpg": jpeg(n)}) for n in range(3)])
    (root / "lines.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    for number in range(3):
        (root / "media/a").mkdir(parents=True, exist_ok=True)
        (root / f"media/a/{number}.jpg").write_bytes(jpeg(number))
    (root / "media/a/bad.jpg").write_bytes(b"no image")
    (root / "mix.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        "      - {path: captions, weight: 3, subflavors: {a: 1}}\n"
        "      - {path: crude, weight: {0: 1, 100: 5}}\n"
        "  val: {path: missing}\n"
    )
    _write_states(root)
    for rank, keys in enumerate([["a", "b"], ["a", "c"], ["a", "b"]]):
        with (root / f"log{rank % 2}.jsonl").open("a") as log:
            line = {"t": "yield_batch", "m": "train", "r": rank % 2, "keys": keys}
            log.write(json.dumps(line) + "\n")


def _write_states(root: Path) -> None:
    for steps in (2, 5):
        for rank in range(2):
            config = WorkerConfig(rank=rank, world_size=2, num_workers=0, lanes=4)
            loader = get_savable_loader(
                get_train_dataset(
                    root / "captions", worker_config=config, batch_size=2, task_encoder=Plain()
                )
            )
            for _ in islice(loader, steps):
                pass
            state = loader.state_dict()
            (root / f"states{steps}").mkdir(exist_ok=True)
            torch.save(state, root / f"states{steps}/rank{rank}.pt")


COMMANDS = (
    "analyze-debug ROOT/log0.jsonl ROOT/log1.jsonl",
    "info ROOT/captions",
    "info ROOT/captions --no-parts",
    "info ROOT/crude",
    "info ROOT/odd",
    "info ROOT/mix.yaml",
    "info ROOT/media",
    "lint ROOT/captions",
    "lint ROOT/odd",
    "lint ROOT/mix.yaml",
    "lint ROOT/media",
    "preview ROOT/captions --count 2",
    "preview ROOT/crude --count 2",
    "preview ROOT/captions --where has:jpg --start 3 --count 1",
    "plan ROOT/captions",
    "plan ROOT/mix.yaml --world-size 4",
    "verify ROOT/captions",
    "verify ROOT/captions --checksum",
    "repair ROOT/captions",
    "prepare ROOT/tars --split-ratio 8,1,1 --non-interactive",
    "info ROOT/tars",
    "index ROOT/tars",
    "index ROOT/lines.jsonl",
    "info ROOT/lines.jsonl",
    "prepare-media ROOT/media --media-metadata-by-extension",
    "prepare-media ROOT/tars --media-metadata-by-header",
    "prepare-media ROOT/tars --media-metadata-by-glob *.jpg",
    "pack ROOT/media ROOT/packed --maxcount 2",
    "info ROOT/packed",
    "checkpoint info ROOT/states2/rank0.pt",
    "checkpoint info ROOT/states5/rank1.pt",
    "checkpoint diff ROOT/states2/rank0.pt ROOT/states5/rank0.pt",
    "checkpoint redist ROOT/states2 ROOT/redist --new-world-size 4",
    "checkpoint edit ROOT/states2 ROOT/edited --world-size 2 --skip-steps 1",
    "doctor ROOT/captions --seconds 0.05 --try-workers 0",
)
