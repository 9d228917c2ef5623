from __future__ import annotations

import logging
import math
import os
import socket

import pytest

from energon import SampleError, WorkerConfig, get_savable_loader, get_train_dataset
from energon.loader.transport.events import is_readable
from energon.loader.transport.reports import LogReceiver, LogSender, explicit_levels
from energon.task_encoder.encoder import DefaultTaskEncoder
from tests.datasets import make_crude
from tests.effort import some
from tests.loader.fake_pipeline import fake

METHODS = ["forkserver", "spawn", "fork"]


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    with here, there:
        yield LogReceiver(here), LogSender(there, process_name="worker 3")


def record(text, *arguments, **extra):
    return logging.makeLogRecord(
        {"name": "hooks", "levelno": logging.INFO, "levelname": "INFO", "msg": text}
        | {"args": arguments, **extra}
    )


@pytest.fixture
def hooks(caplog):
    caplog.set_level(logging.INFO, "hooks")
    return caplog


def test_a_record_arrives_as_it_was_logged(pair, hooks):
    receiver, sender = pair
    sender.handle(record("%s of\n%d", "one", 7, step=12, thing=object()))
    receiver.drain()
    [arrived] = hooks.records
    assert arrived.getMessage() == "one of\n7"
    assert (arrived.processName, arrived.step) == ("worker 3", 12)
    assert not hasattr(arrived, "thing")


def test_exceptions_arrive_as_text(pair, hooks):
    receiver, sender = pair
    try:
        raise SampleError("bad")
    except SampleError as error:
        sender.handle(record("failed", exc_info=(type(error), error, error.__traceback__)))
    receiver.drain()
    assert "SampleError: bad" in hooks.text


def test_levels_of_this_process_decide(pair, hooks):
    receiver, sender = pair
    hooks.set_level(logging.WARNING, "hooks")
    sender.handle(record("quiet"))
    receiver.drain()
    assert not hooks.records
    assert explicit_levels()["hooks"] == logging.WARNING


def test_a_record_that_is_written_in_pieces_is_read_once_it_is_whole(hooks):
    here, there = socket.socketpair()
    with here, there:
        receiver, lines = LogReceiver(here), socket.socketpair()
        with lines[0], lines[1]:
            LogSender(lines[0], process_name="x").handle(record("in pieces"))
            line = lines[1].recv(1 << 16)
        there.sendall(line[:20])
        receiver.drain()
        assert not hooks.records
        there.sendall(line[20:])
        receiver.drain()
    assert [each.getMessage() for each in hooks.records] == ["in pieces"]


def test_records_go_to_stderr_where_nobody_takes_them(pair, capsys):
    receiver, sender = pair
    receiver._channel.close()
    sender.handle(record("still there", levelno=logging.WARNING))
    assert "still there" in capsys.readouterr().err


class Talks(DefaultTaskEncoder):
    decoder = None

    def encode_sample(self, sample):
        logging.getLogger("hooks").info("encoding %s in %d", sample["__key__"], os.getpid())
        logging.getLogger("hooks").debug("never seen")
        return sample

    def batch(self, samples):
        return [sample["__key__"] for sample in samples]


@pytest.mark.slow
@pytest.mark.parametrize("method", some(METHODS))
def test_what_hooks_log_in_workers_appears_as_the_program_has_configured(tmp_path, hooks, method):
    config = WorkerConfig(rank=0, world_size=1, num_workers=1, lanes=4)
    dataset = get_train_dataset(
        make_crude(tmp_path / "ds", [8]),
        worker_config=config,
        batch_size=2,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Talks(),
    )
    loader = get_savable_loader(dataset, start_method=method)
    keys = {key for batch, _ in zip(loader, range(4), strict=False) for key in batch}
    loader.close()
    texts = [each.getMessage() for each in hooks.records if each.name == "hooks"]
    assert keys <= {text.split()[1] for text in texts}
    assert str(os.getpid()) not in {text.split()[-1] for text in texts}
    assert all(each.processName != "MainProcess" for each in hooks.records if each.name == "hooks")


def say_hello_in_lane_1(lane, row):
    if lane == 1:
        logging.getLogger("hooks").info("hello")
    return lane, row


@pytest.mark.slow
def test_records_arrive_while_batches_come_from_other_workers(hooks, monkeypatch):
    due_at = "energon.loader.processes.link._read_logs_at"
    monkeypatch.setattr(due_at, math.inf)
    loader = get_savable_loader(fake(say_hello_in_lane_1, workers=2, lanes=2))
    other = get_savable_loader(fake(workers=1, lanes=1))
    try:
        next(iter(loader))
        batches = iter(other)
        next(batches)
        [channel] = [worker._link._lifeline for worker in loader._workers[1:]]
        assert is_readable(channel, 60)
        assert not hooks.records
        monkeypatch.setattr(due_at, 0.0)
        next(batches)
        assert "hello" in hooks.text
    finally:
        loader.close()
        other.close()
