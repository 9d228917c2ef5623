"""Run user code with seeded global random generators, and restore them afterwards.

User hooks draw from `random`, `numpy.random` and torch's default generator. Seeding them from a key
makes augmentations a function of the batch, or of the sample, on any worker. The state of the
surrounding program is put back afterwards. torch is only touched where it is loaded.

Only the outermost block of a thread keeps the state of the surrounding program and puts it back,
for 0.1 ms: a batch, not each of its samples. A worker process has no surrounding program. Nor do
other threads than the main one put anything back: meanwhile the program has drawn, and would draw
the same numbers again.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_is_worker_process = False


class _Thread(threading.local):
    inside = False
    """Whether the thread is in a seeded block."""


_thread = _Thread()


def own_process() -> None:
    """Declare that only the pipeline draws random numbers in this process."""
    global _is_worker_process
    _is_worker_process = True


def is_worker_process() -> bool:
    """Return whether `own_process` was called."""
    return _is_worker_process


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed `random`, numpy and torch inside the block, from 64 bits.

    A block in another one leaves the generators as they are at its end.
    """
    is_in_program = threading.current_thread() is threading.main_thread()
    if _thread.inside or _is_worker_process or not is_in_program:
        _seed(seed)
        yield
        return
    python, numpy, torch = random.getstate(), np.random.get_state(legacy=False), _torch_generator()
    torch_state = None if torch is None else torch.get_state()
    _seed(seed)
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = False
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None:
            torch.set_state(torch_state)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch = _torch_generator()
    if torch is not None:
        # Not torch.manual_seed: before CUDA is there, that keeps a record of every call.
        torch.manual_seed(seed)


def _torch_generator() -> Any:
    """Return torch's default generator; None until torch is imported and has one."""
    return getattr(sys.modules.get("torch"), "default_generator", None)
