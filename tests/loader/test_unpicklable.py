from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

import pytest

from energon import ConfigError, DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from energon.loader.transport.pickling import dump_pipeline
from tests.datasets import make_crude


@dataclass(frozen=True)
class Stage:
    hooks: tuple


class Guarded:
    def __init__(self):
        self.number = 1
        self.lock = threading.Lock()

    def hook(self, sample):
        return sample


def closure():
    guard = threading.Lock()
    return lambda sample: (guard, sample)


def in_main_program():
    namespace = {"__name__": "__main__", "CONNECTION": threading.Lock()}
    exec("def hook(sample):\n    return CONNECTION, sample", namespace)
    return Stage((namespace["hook"],))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Guarded(), "Guarded.lock"),
        (Stage((len, Guarded().hook)), "Guarded.lock"),
        (Stage(({"a": [threading.Lock()]},)), r"Stage\.hooks\[0\]\['a'\]\[0\]"),
        (Stage((closure(),)), "guard, which closure"),
        (in_main_program(), "CONNECTION, which hook uses,"),
        (threading.Lock(), "lock"),
        (Stage((partial(len, threading.Lock()),)), r"Stage\.hooks\[0\]"),
    ],
)
def test_names_what_cannot_be_sent_to_workers(value, name):
    with pytest.raises(ConfigError, match=f"^{name}.* cannot be sent to worker processes"):
        dump_pipeline(value)


def test_a_task_encoder_with_a_lock_is_named_before_any_worker_starts(tmp_path):
    class Encoder(DefaultTaskEncoder):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

        def encode_sample(self, sample):
            return sample

    dataset = get_train_dataset(
        make_crude(tmp_path / "ds", [4]),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=1),
        batch_size=2,
        task_encoder=Encoder(),
    )
    with pytest.raises(ConfigError, match=r"Encoder\.lock .*start_method='fork'"):
        next(iter(get_loader(dataset, start_method="forkserver")))
    for options in ({"start_method": "fork"}, {"workers": "thread"}):
        with get_loader(dataset, **options) as loader:
            assert len(next(iter(loader))["txt"]) == 2
