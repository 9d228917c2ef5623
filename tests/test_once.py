from __future__ import annotations

import logging

import pytest

from energon import WorkerConfig, get_savable_loader, get_train_dataset
from energon.messages import is_repeated, warn_once
from energon.task_encoder.encoder import DefaultTaskEncoder
from tests.datasets import make_crude

LOGGER = logging.getLogger("energon")


def test_a_warning_is_given_once_for_each_cause(caplog, tmp_path):
    for cause in ("first", "second", "first"):
        warn_once(LOGGER, f"{tmp_path} {cause}", "%s cause", cause)
    assert [each.getMessage() for each in caplog.records] == ["first cause", "second cause"]


def test_a_warning_of_a_worker_that_arrives_late_is_not_given_again(tmp_path):
    about = {"energon_once": f"{tmp_path} late", "energon_every": 10.0}
    first, late, soon, then = (logging.makeLogRecord(about) for _ in range(4))
    first.created -= 60  # all of them have waited for the trainer
    assert not is_repeated(first)
    for record, seconds in ((late, -1), (soon, 1), (then, 11)):
        record.created = first.created + seconds
        assert is_repeated(record) is (record is not then)


class Warns(DefaultTaskEncoder):
    decoder = None

    def __init__(self, what):
        super().__init__()
        self.what = what

    def encode_sample(self, sample):
        warn_once(LOGGER, self.what, "once")
        return sample["__key__"]


@pytest.mark.slow
def test_all_workers_of_a_program_together_give_a_warning_once(caplog, tmp_path):
    config = WorkerConfig(rank=0, world_size=1, num_workers=3)
    dataset = get_train_dataset(
        make_crude(tmp_path / "ds", [30]),
        worker_config=config,
        batch_size=1,
        repeat=False,
        task_encoder=Warns(str(tmp_path)),
    )
    with get_savable_loader(dataset) as loader:
        assert len(list(loader)) == 30
    assert [each.getMessage() for each in caplog.records].count("once") == 1
