"""Processes that run functions of this package, whatever program has asked for them."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

_MAIN = ("__main__", "__mp_main__")


class _ProcessWithoutMain(ForkServerProcess):
    """Does not import the main program.

    It would run all of it once more in a program without `if __name__ == "__main__":`, and needs
    nothing of it: see `portable`.
    """

    def start(self) -> None:
        with _main_hidden():
            super().start()


class _Context(ForkServerContext):
    Process = _ProcessWithoutMain


def process_context(preload: str) -> ForkServerContext:
    """Return how to start processes, which import the module `preload` once for all."""
    context = _Context()
    context.set_forkserver_preload([preload])
    return context


def portable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, in a form in which it reaches processes without the main program."""
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


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Leave multiprocessing without a way to find the main program again.

    It goes by these two attributes, and takes a program without them for an interactive one.
    """
    main = sys.modules["__main__"]
    names = vars(main)
    kept: dict[str, Any] = {name: names[name] for name in ("__spec__", "__file__") if name in names}
    for name in kept:
        del names[name]
    main.__spec__ = None
    try:
        yield
    finally:
        names.update(kept)
