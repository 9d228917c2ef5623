"""Processes that run functions of this package, whatever program has asked for them.

They do not import the main program. It would run all of it once more in a program without
`if __name__ == "__main__":`, and they need nothing of it: see `portable`.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from multiprocessing import forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.context import ForkServerContext, ForkServerProcess, set_spawning_popen
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

_MAIN = ("__main__", "__mp_main__")
_ABOUT_MAIN = ("init_main_from_name", "init_main_from_path")
"""What tells a process where the main program is."""


def process_context(preload: str) -> ForkServerContext:
    """Return how to start processes, which import the module `preload` once for all."""
    context = _Context()
    context.set_forkserver_preload([preload])
    return context


class _Popen(popen_forkserver.Popen):
    """Starts a process as its base does, without telling it where the main program is.

    Hiding the program from multiprocessing for that long would hide it from other threads, too,
    whose processes need it.
    """

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        content = self._message(process_obj)
        self.sentinel, pipe = forkserver.connect_to_new_process(self._fds)
        # The process takes its parent for alive as long as this copy is open.
        copy = os.dup(pipe)
        self.finalizer = util.Finalize(self, _close, (copy, self.sentinel))
        with open(pipe, "wb") as file:
            file.write(content)
        self.pid = forkserver.read_signed(self.sentinel)

    def _message(self, process_obj: Any) -> bytes:
        """Return what the new process reads: how to prepare itself, and what to run."""
        about = spawn.get_preparation_data(process_obj._name)
        preparation = {name: about[name] for name in about if name not in _ABOUT_MAIN}
        file = io.BytesIO()
        set_spawning_popen(self)  # of this thread: descriptors are passed through it
        try:
            for each in (preparation, process_obj):
                reduction.dump(each, file)
        finally:
            set_spawning_popen(None)
        return file.getvalue()


def _close(*descriptors: int) -> None:
    for each in descriptors:
        os.close(each)


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)


class _Context(ForkServerContext):
    Process = _Process


def shut_down(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool, at once if one of them has died."""
    if pool._broken:
        # A process that was started while the pool broke came too late to be terminated with the
        # others, and the pool would wait for it forever.
        kill_processes(pool)
    pool.shutdown(cancel_futures=True)


def kill_processes(pool: ProcessPoolExecutor) -> None:
    """Kill the processes of a pool."""
    for process in list((pool._processes or {}).values()):
        process.kill()


def portable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` in a form that reaches processes without importing the main program."""
    if getattr(function, "__module__", None) not in _MAIN:
        return function
    import cloudpickle

    return _Packed(cloudpickle.dumps(function))


class _Packed:
    """A function of the main program, by value."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def __call__(self, *arguments: Any) -> Any:
        return pickle.loads(self.packed)(*arguments)
