"""Process many numbers in processes that may die, and determine which number kills them.

Decoders are written in C, and the data may be anything: a process that dies is a finding like any
other. Batches at which a process died are run again one by one, in halves, until a single number is
left.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawValue
from typing import Any, TypeVar

from energon.errors import WorkerError
from energon.prepare.engines import ProcessPool

T = TypeVar("T")
AHEAD = 2
"""Batches per process that are handed over before they are needed."""
MAX_DEATHS = 1000
NO_ITEM = -1


@dataclass(frozen=True)
class IsolatedCall:
    """A call.

    Args:
        number: Identifies the call for the caller.
        arguments: All arguments except the last.
        ordinals: The last argument, which may be divided.
    """

    number: int
    arguments: tuple[Any, ...]
    ordinals: Sequence[int]

    def cut(self, start: int, stop: int) -> list[IsolatedCall]:
        """Return the calls for the ordinals before one place, and from another one on."""
        cuts = (self.ordinals[:start], self.ordinals[stop:])
        return [IsolatedCall(self.number, self.arguments, some) for some in cuts if len(some)]


@dataclass(frozen=True)
class Death:
    """The result if the process died."""

    ordinal: int


def run_isolated(
    function: Callable[..., T], jobs: Sequence[IsolatedCall], num_processes: int
) -> Iterator[tuple[int, T | Death]]:
    """Call a function for each job in processes, and yield the results as they become ready.

    Args:
        function: Takes the arguments and the ordinals of a job.
        jobs: The calls.
        num_processes: How many processes run at the same time.

    Yields:
        Number of the job, and the result for all or some of its ordinals, which are complete in the
        end; or, for one of them, that the process died.

    Raises:
        WorkerError: If processes keep dying.
    """
    noted = RawValue("q")
    todo = list(jobs)[::-1]
    suspects: list[IsolatedCall] = []
    deaths = 0
    while todo or suspects:
        alone = bool(suspects)
        queue = suspects if alone else todo
        noted.value = NO_ITEM
        with _pool(1 if alone else num_processes, noted) as pool:
            lost = yield from _run(pool, function, queue, 1 if alone else AHEAD * num_processes)
        if lost is None:
            continue
        deaths += 1
        if deaths > MAX_DEATHS:
            raise WorkerError(
                f"processes that decode samples died {deaths} times, perhaps out of "
                "memory; run it again with a smaller --num-workers"
            )
        for job in lost:
            if not alone:
                suspects.append(job)
                continue
            place = _place(job, noted.value)
            if place is None:
                middle = len(job.ordinals) // 2
                suspects += job.cut(middle, middle)[::-1]
            else:
                yield job.number, Death(job.ordinals[place])
                suspects += job.cut(place, place + 1)[::-1]


def note(ordinal: int | None) -> None:
    """Record what this process is about to do, so that it is known if it dies.

    Args:
        ordinal: The current one; None if there are several, as when they are read together.
    """
    if _noted is not None:
        _noted.value = NO_ITEM if ordinal is None else ordinal


_noted: Any = None
"""Shared with the process that started this one; None if there is none."""


def _share(noted: Any) -> None:
    global _noted
    _noted = noted


def _call(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    # What another call has recorded says nothing about this one.
    note(None)
    return function(*arguments)


def _place(job: IsolatedCall, ordinal: int) -> int | None:
    """Return the ordinal of a job at which the process died, if it is known."""
    if len(job.ordinals) == 1:
        return 0
    return job.ordinals.index(ordinal) if ordinal in job.ordinals else None


def _run(
    pool: ProcessPool, function: Callable[..., T], queue: list[IsolatedCall], ahead: int
) -> Generator[tuple[int, T], None, list[IsolatedCall] | None]:
    """Process a queue from its end; return what was running if a process died, else None."""
    running: dict[Future[T], IsolatedCall] = {}
    while queue or running:
        broken = False
        try:
            while queue and len(running) < ahead:
                job = queue[-1]
                running[pool.submit(_call, function, (*job.arguments, job.ordinals))] = job
                queue.pop()
        except BrokenExecutor:
            broken = True
        for future in wait(running, return_when=ALL_COMPLETED if broken else FIRST_COMPLETED).done:
            if isinstance(future.exception(), BrokenExecutor):
                broken = True
            else:
                yield running.pop(future).number, future.result()
        if broken:
            return list(running.values())
    return None


@contextmanager
def _pool(num_processes: int, noted: Any) -> Iterator[ProcessPool]:
    with ProcessPool(num_processes, _share, noted) as pool:
        try:
            yield pool
        except BaseException:
            # They only read, and Ctrl-C does not reach one that waits for a store or a decoder.
            pool.kill()
            raise
