"""The examples of model parallelism continue on other meshes with the same batches."""

import shutil
from itertools import chain, islice
from pathlib import Path

import pytest

from energon import WorkerConfig, get_savable_loader, get_train_dataset
from tests.datasets import make_captions
from tests.ranks import finished, started, train


@pytest.mark.slow  # six processes that import DTensor
def test_a_run_continues_on_another_mesh_with_the_same_loss(tmp_path):
    data, first = make_captions(tmp_path / "captions", [40]), tmp_path / "first.pt"

    def loss(ranks, tp):
        checkpoint = tmp_path / f"{ranks}-{tp}.pt"
        shutil.copy(first, checkpoint)
        return train(data, checkpoint, "--tp", tp, ranks=ranks, program="train_parallel.py")

    train(data, first, "--tp", 2, ranks=4, program="train_parallel.py")
    assert loss(2, 2) == pytest.approx(loss(2, 1), abs=1e-5)


@pytest.mark.slow  # seven processes that import torch.distributed
@pytest.mark.parametrize(
    ("program", "option"), [("train_pipeline.py", "--pp"), ("train_context.py", "--cp")]
)
def test_stages_and_parts_of_sequences_continue_in_other_numbers(tmp_path, program, option):
    data, first = make_captions(tmp_path / "captions", [40]), tmp_path / "first"

    def loss(ranks, size, checkpoint=None):
        if checkpoint is None:
            checkpoint = tmp_path / f"{ranks}-{size}"
            shutil.copytree(first, checkpoint)
        outputs = finished(started(data, checkpoint, option, size, ranks=ranks, program=program))
        (line,) = filter(None, outputs)
        return float(line.split()[-1])

    begun = loss(4, 2, first)
    continued = loss(2, 2)
    assert continued < begun
    assert continued == pytest.approx(loss(1, 1), abs=1e-5)


@pytest.mark.slow  # six processes that import Lightning
def test_lightning_gives_the_replicas_of_its_mesh_the_batches_of_one_order(tmp_path):
    data, checkpoint = make_captions(tmp_path / "captions", [40]), tmp_path / "first.ckpt"

    def keys(ranks, tensor):
        program = Path(__file__).with_name("lightning_mesh.py")
        outputs = finished(started(data, checkpoint, tensor, ranks=ranks, program=program))
        lines = [line.split() for out in outputs for line in out.splitlines()]
        return {int(words[1]): words[2:] for words in lines if words[:1] == ["keys"]}

    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=4)
    plain = get_train_dataset(data, worker_config=config, batch_size=2)
    batches = [batch.__key__ for batch in islice(get_savable_loader(plain), 9)]
    first = keys(4, 2)
    assert first[0] == first[1] == [*chain(*batches[0:6:2])]
    assert first[2] == first[3] == [*chain(*batches[1:6:2])]
    second = keys(2, 2)
    assert second[0] == second[1] == [*chain(*batches[6:9])]
