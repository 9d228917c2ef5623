"""What loaders write to the logs that `energon analyze-debug` reads."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from energon.compat.megatron.getters import get_train_dataset
from energon.compat.megatron.loaders import SavableDataLoader, get_loader, get_savable_loader
from energon.compat.megatron.worker import WorkerConfig
from tests.commands import run
from tests.datasets import make_crude


@pytest.fixture
def dataset(tmp_path):
    make_crude(tmp_path / "ds", [4, 4])
    config = WorkerConfig(
        rank=1,
        world_size=2,
        num_workers=0,
        lanes=2,
        worker_log_level=1,
        worker_debug_path=str(tmp_path / "logs" / "{worker_id}.jsonl"),
    )
    return get_train_dataset(tmp_path / "ds", worker_config=config, batch_size=2, repeat=False)


def lines(tmp_path):
    files = sorted((tmp_path / "logs").iterdir())
    assert [file.name for file in files] == ["1.jsonl"]
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in found if line["t"] != "yield_batch"]


def test_loaders_log_their_loops_and_the_keys_of_batches(dataset, tmp_path):
    loader = get_savable_loader(dataset)
    keys = [batch["__key__"] for _ in range(2) for batch in loader]
    found = lines(tmp_path)
    of_a_loop = ["iter", "yield", "yield", "StopIteration"]
    assert [line["t"].partition(".")[2] for line in found] == ["__init__", *2 * of_a_loop]
    assert {(line["r"], line["w"], line["id"]) for line in found} == {(1, None, loader.id)}
    assert found[0]["config"] == dataset.config()
    yielded = [line for line in found if line["t"] == "SavableDataLoader.yield"]
    assert [line["keys"] for line in yielded] == keys
    assert [line["iter_idx"] for line in yielded] == [0, 1, 0, 1]
    assert [line["global_idx"] for line in yielded] == [0, 1, 2, 3]
    assert len({line["iter_id"] for line in yielded}) == 2
    result = run("analyze-debug", tmp_path / "logs", "--include-modality", "train")
    assert "8 samples" in result.output


def test_loops_that_are_left_early_are_logged_to_their_end(dataset, tmp_path):
    batches = iter(get_loader(dataset))
    next(batches)
    batches.close()
    assert [line["t"] for line in lines(tmp_path)][-2:] == [
        "BasicDataLoader.yield",
        "BasicDataLoader.StopIteration",
    ]


def test_numbers_of_loaders_count_up(dataset):
    first, second = get_savable_loader(dataset), get_loader(dataset)
    start = first.id
    assert (second.id, first.id) == (start + 1, start)
    assert len(list(islice(second, 1))) == 1
    assert SavableDataLoader.next_id() == start + 3, "a loop has a number, too"
