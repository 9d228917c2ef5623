"""Run user code with the global random generators seeded, and leave no trace.

User hooks draw from `random`, `numpy.random` and torch's default generator. Seeding them from
an address makes augmentations a function of the sample instead of who loads it. The state of
the surrounding program is put back afterwards. torch is only touched where it is loaded.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed `random`, numpy and torch inside the block, from 64 bits."""
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = generator.get_state() if generator is not None else None
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if generator is not None:
        # Not torch.manual_seed: before CUDA is there, that keeps a record of every call.
        generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if generator is not None:
            generator.set_state(torch_state)
