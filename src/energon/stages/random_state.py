"""Run user code with the global random generators seeded, and leave no trace.

User hooks draw from `random`, `numpy.random` and torch's default generator. Seeding them from
an address makes augmentations a function of the sample instead of who loads it. The state of
the surrounding program is put back afterwards. torch is only touched where it is loaded.

To seed takes 6 µs, to keep the state of the surrounding program and put it back ten times as
long, so only the outermost block of a thread does that: a batch, not each of its samples. A
worker process has no surrounding program. Nor do other threads than the main one put anything
back: meanwhile the program has drawn, and would draw the same numbers again.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import numpy as np

_thread = threading.local()
_is_worker_process = False


def own_process() -> None:
    """Say that nothing but the pipeline draws random numbers in this process."""
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
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    own = _is_worker_process or threading.current_thread() is not threading.main_thread()
    if own or getattr(_thread, "inside", False):
        _seed(seed, generator)
        yield
        return
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = generator.get_state() if generator is not None else None
    _seed(seed, generator)
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = False
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if generator is not None:
            generator.set_state(torch_state)


def may_draw(function: Callable[..., Any]) -> bool:
    """Return whether a function can draw random numbers: not if its code names nothing."""
    code = getattr(function, "__code__", None)
    return code is None or _names_something(code)


def _names_something(code: CodeType) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return bool(code.co_names or code.co_freevars) or any(map(_names_something, inner))


def _seed(seed: int, generator: Any) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if generator is not None:
        # Not torch.manual_seed: before CUDA is there, that keeps a record of every call.
        generator.manual_seed(seed)
