from __future__ import annotations

import multiprocessing
import subprocess
import sys

from energon.once import is_first


def test_what_is_done_once_is_done_once_by_all_workers_of_a_program():
    context = multiprocessing.get_context("forkserver")
    with context.Pool(3) as pool:
        assert sorted(pool.map(is_first, ["by workers"] * 9)) == [False] * 8 + [True]
        assert not is_first("by workers")
        assert is_first("by the main process")
        assert pool.map(is_first, ["by the main process"] * 9) == [False] * 9


def test_other_programs_do_it_again():
    program = "from energon.once import is_first\nassert is_first('anywhere')\n"
    assert is_first("anywhere")
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], check=True, start_new_session=True)
