from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from energon.stages.hooks.random_state import seeded
from tests.commands import run_python

DRAWS = """
import random
import numpy as np
from energon.stages.hooks.random_state import own_process, seeded
own_process()
with seeded(7):
    inside = random.random(), np.random.rand()
with seeded(7):
    assert inside == (random.random(), np.random.rand())
"""


def draw():
    return random.random(), np.random.rand(), np.random.randn()


def test_threads_put_nothing_back_that_the_program_may_have_used_meanwhile():
    random.seed(1)
    before = random.random()
    random.seed(1)
    with ThreadPoolExecutor(1) as threads:
        inside = threads.submit(draw_seeded).result()
    assert inside == draw_seeded()
    assert random.random() != before


def draw_seeded():
    with seeded(5):
        return draw()


def test_blocks_are_seeded_in_a_process_of_its_own():
    run_python(DRAWS)
