from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
import threading

from energon.loader.monitoring.profiler import thread_frames


class Waiting:
    def __init__(self):
        self.itself = self

    def __del__(self):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


gc.collect()
gc.set_threshold(1)
for _ in range(300):
    Waiting()
    assert threading.get_ident() in thread_frames()
assert gc.isenabled()
gc.disable()
thread_frames()
assert not gc.isenabled()
"""


def test_finalizers_that_wait_for_threads_do_not_stop_a_look():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
