"""Run user code with seeded global random generators, and restore them afterwards.

User hooks draw from `random`, `numpy.random` and torch's default generator. Seeding them from
an address makes augmentations a function of the sample instead of who loads it. The state of
the surrounding program is put back afterwards. torch is only touched where it is loaded.

Only the outermost block of a thread keeps the state of the surrounding program and puts it back:
a batch, not each of its samples. A worker process has no surrounding program. Nor do other
threads than the main one put anything back: meanwhile the program has drawn, and would draw the
same numbers again.

To ask the generators for their states, and to set them, takes 120 µs. States are copied from
where they are in memory instead, in 1 µs, if that is found and trials confirm it.

Most hooks draw nothing, which a `DrawWatch` detects by comparing states. What draws nothing is
the same with any seed, so it needs none. A hook that puts the state of torch back, as `fork_rng`
does, counts as one that draws: bytes between the fields of the state, which mean nothing, show
that it was set. A hook that draws from `random` or `numpy.random` and puts their states back counts
as one that draws nothing.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

_is_worker_process = False


class _Thread(threading.local):
    inside = False
    """Whether the thread is in a seeded block."""
    mark: _Mark | None = None
    """The last one that it has made."""


_thread = _Thread()


def own_process() -> None:
    """Declare that only the pipeline draws random numbers in this process."""
    global _is_worker_process
    _is_worker_process = True


def is_worker_process() -> bool:
    """Return whether `own_process` was called."""
    return _is_worker_process


@contextmanager
def seeded(seed: int, watch: DrawWatch | None = None) -> Iterator[None]:
    """Seed `random`, numpy and torch inside the block, from 64 bits.

    A block in another one leaves the generators as they are at its end.

    Args:
        seed: The 64 bits.
        watch: What has to know that to seed is not to draw.
    """
    if _thread.inside or _has_no_program():
        if watch is not None:
            watch.check()
        _seed(seed)
        if watch is not None:
            watch.expect_present()
        yield
        return
    states = current_states()
    _seed(seed)
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = False
        put_back(states)


class Drawn(Exception):
    """Code that was assumed not to draw random numbers has drawn some."""


class DrawWatch:
    """Detects draws of random numbers by comparing the states of the generators.

    Args:
        seed: Returns, for the address of an item, what the generators are seeded with when that
            becomes necessary; None if they are seeded already.
    """

    def __init__(self, seed: Callable[[Any], int] | None = None) -> None:
        self._seed = seed
        self._address: Any = None
        self.seeds = seed is None
        self._has_begun = self._drawn = self._was_inside = False
        self.expect_present()

    def begin(self, address: Any) -> bool:
        """Watch the item with this address from now on; return whether every draw is visible."""
        self._address = address
        if not self._mark.is_current():
            self.expect_present()
        return self._mark.shows_draws

    def expect_present(self) -> None:
        """Take the current states as those in which nothing was drawn, unless it seeds already."""
        if self._has_begun:
            return  # those from before are for the surrounding program
        mark = _thread.mark
        if mark is None or not mark.is_current():
            mark = _thread.mark = _Mark()
        self._mark, self._expected = mark, mark.states

    def check(self) -> bool:
        """Return whether anything has drawn from generators that were not seeded for it."""
        if not (self._drawn or self._has_begun or self._mark.is_current()):
            current = current_states()
            is_new = self._expected.torch is None and current.torch is not None
            if is_new and _torch_is_fresh():
                # A hook has imported torch, and drawn nothing from it.
                self._expected = self._expected._replace(torch=current.torch)
            self._drawn = current != self._expected
        return self._drawn

    def begin_seeding(self) -> None:
        """Seed from now on. Calls before that drew nothing are equal to seeded ones.

        Raises:
            Drawn: If something has drawn before.
        """
        if self.seeds or self._seed is None:
            return
        if self.check():
            raise Drawn
        self._was_inside = _thread.inside
        self.seeds = self._has_begun = _thread.inside = True
        _seed(self._seed(self._address))

    def end(self) -> None:
        """Restore the generators for the surrounding program, if they were drawn from or seeded."""
        if self._has_begun:
            _thread.inside = self._was_inside
        if (self._drawn or self._has_begun) and not _has_no_program():
            put_back(self._expected)
        self.seeds = self._seed is None
        self._has_begun = self._drawn = False


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch = _find_generators().torch
    if torch is not None:
        # Not torch.manual_seed: before CUDA is there, that keeps a record of every call.
        torch.manual_seed(seed)


def _has_no_program() -> bool:
    return _is_worker_process or threading.current_thread() is not threading.main_thread()


class States(NamedTuple):
    """The states of `random`, numpy and torch.

    Of numpy two: its words, and the normal number that it keeps, to be given without drawing.
    """

    python: Any
    gauss: float | None
    numpy: bytes
    numpy_kept: bytes
    torch: bytes | None


class _Mark:
    """The present states of the generators, and something of them that every draw changes.

    Of a Mersenne Twister, this is the index and a few words next to it. A draw moves the index,
    except if it takes a multiple of 624 words, and then it has replaced all words.

    Attributes:
        states: The states.
        shows_draws: Whether every draw is visible. numpy may keep a number where it is not seen,
            and torch's state be put back after a draw.
    """

    def __init__(self) -> None:
        self._found = generators = _find_generators()
        if generators.torch_memory is not None:
            _mark_gap(generators.torch_memory)
        self._words = tuple(memoryview(view.tobytes()).cast("Q") for view in generators.views)
        self._asked = generators.ask()
        self.states: States = current_states()
        is_hidden = generators.numpy_kept is None and _KEPT.unpack(self.states.numpy_kept)[0]
        is_hidden = is_hidden or (generators.torch is not None and generators.torch_memory is None)
        self.shows_draws = bool(self.states.numpy and not is_hidden)

    def is_current(self) -> bool:
        """Return whether nothing was drawn since, in 0.1 µs."""
        generators = self._found
        return (
            generators.views == self._words
            and _python.gauss_next is self.states.gauss
            and np.random.get_bit_generator() is generators.numpy  # type: ignore[attr-defined]
            and sys.modules.get("torch") is generators.torch_module
            and (generators.has_all or generators.ask() == self._asked)
        )


def current_states() -> States:
    """Return the present states, as opaque values that can be compared."""
    generators = _find_generators()
    if generators.numpy_kept is None:
        numpy = np.random.get_state(legacy=False)
        kept = _KEPT.pack(numpy.get("has_gauss", 0), numpy.get("gauss", 0.0))
    else:
        kept = generators.numpy_kept.raw
    return States(
        random.getstate()[1] if _python_memory is None else _python_memory.raw,
        _python.gauss_next,
        b"" if generators.numpy_words is None else generators.numpy_words.raw,
        kept,
        None if generators.torch is None else generators.torch_state(),
    )


def _torch_is_fresh() -> bool:
    """Return whether torch's generator is in the state right after its last seed."""
    torch = sys.modules["torch"]
    generator = torch.default_generator
    fresh = torch.Generator().manual_seed(generator.initial_seed())
    return bool(torch.equal(generator.get_state(), fresh.get_state()))


def put_back(states: States) -> None:
    """Set the generators to `states`."""
    generators = _find_generators()
    if _python_memory is None:
        random.setstate((3, states.python, states.gauss))
    else:
        _python_memory.raw, _python.gauss_next = states.python, states.gauss
    if generators.numpy_kept is None:
        numbers = np.frombuffer(states.numpy, np.uint32)
        kept = _KEPT.unpack(states.numpy_kept)
        np.random.set_state(("MT19937", numbers[:-1], int(numbers[-1]), *kept))
    else:
        generators.numpy_words.raw, generators.numpy_kept.raw = states.numpy, states.numpy_kept
    if generators.torch_memory is not None and states.torch is not None:
        generators.torch_memory.raw = states.torch
    elif generators.torch is not None and states.torch is not None:
        torch = generators.torch_module
        generators.torch.set_state(torch.frombuffer(bytearray(states.torch), dtype=torch.uint8))


class _Generators:
    """The global generators, and where their states are in memory, as far as that was found.

    Args:
        numpy: The bit generator of `numpy.random`.
        torch_module: torch, if it is imported; until it has a generator, it counts as not.

    Attributes:
        numpy_words: 624 words and an index; None for one that is not a Mersenne Twister.
        numpy_kept: The normal number that numpy keeps, and whether it does.
        views: The part of the memory that a `_Mark` copies.
        has_all: Whether the states of all generators were found.
    """

    def __init__(self, numpy: Any, torch_module: Any) -> None:
        self.numpy = numpy
        self.torch: Any = getattr(torch_module, "default_generator", None)
        self.torch_module: Any = None if self.torch is None else torch_module
        self.numpy_words: Any = None
        self.numpy_kept: Any = None
        self.torch_memory: Any = None
        if isinstance(numpy, np.random.MT19937):
            self.numpy_words = _WORDS.from_address(numpy.ctypes.state_address)
            self.numpy_kept = _find_numpy_kept()
        if self.torch is not None:
            self.torch_memory = _find_torch_memory(self.torch)
        parts = (
            (_python_memory, slice(0, 16)),
            (self.numpy_words, slice(-16, None)),
            (self.numpy_kept, slice(None)),
            *((self.torch_memory, part) for part in _TORCH_MARKS),
        )
        self.views = tuple(
            memoryview(memory).cast("B")[part].cast("Q")
            for memory, part in parts
            if memory is not None
        )
        self.has_all = _python_memory is not None and (
            self.torch is None or self.torch_memory is not None
        )

    def ask(self) -> tuple[Any, ...]:
        """Return the states that were not found."""
        python = random.getstate() if _python_memory is None else None
        is_hidden = self.torch is not None and self.torch_memory is None
        return python, self.torch_state() if is_hidden else None

    def torch_state(self) -> Any:
        """Return the state of torch's generator."""
        if self.torch_memory is None:
            return self.torch.get_state().numpy().tobytes()
        return self.torch_memory.raw


def _find_generators() -> _Generators:
    """Return the present generators: a program may replace that of numpy, or import torch."""
    global _generators
    generators = _generators
    numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
    torch = sys.modules.get("torch")
    if generators is None or generators.numpy is not numpy or generators.torch_module is not torch:
        generators = _generators = _Generators(numpy, torch)
    return generators


_generators: _Generators | None = None
_KEPT = struct.Struct("@id")
_WORDS = ctypes.c_char * (4 * 625)


def _find_python_memory() -> Any:
    """Return the address of the state of `random`: an index and 624 words; None if not found."""
    start, size = object.__basicsize__, type(_python).__basicsize__
    if sys.implementation.name != "cpython" or size < start + ctypes.sizeof(_WORDS):
        return None
    memory = _WORDS.from_address(id(_python) + start)
    index, *words = np.frombuffer(memory.raw, np.uint32).tolist()
    return memory if (*words, index) == random.getstate()[1] else None


def _find_numpy_kept() -> Any:
    """Return the addresses of numpy's cached normal number and its flag; None if not found.

    To ask for it takes 30 µs. Where it is, a generator of our own tells, which is made to keep
    a number and to give it.
    """
    trial = np.random.RandomState(1)
    used = getattr(np.random.mtrand, "_rand", None)
    if sys.implementation.name != "cpython" or type(used) is not type(trial):
        return None
    trial.standard_normal()
    memory = (ctypes.c_char * type(trial).__basicsize__).from_address(id(trial))
    number = trial.get_state(legacy=False)["gauss"]
    start = memory.raw.find(struct.pack("@d", number)) - _KEPT.size // 2
    is_kept = start >= 0 and _KEPT.unpack_from(memory.raw, start) == (1, number)
    if not is_kept or trial.standard_normal() != number or _KEPT.unpack_from(memory.raw, start)[0]:
        return None
    return (ctypes.c_char * _KEPT.size).from_address(id(used) + start)


def _find_torch_memory(default: Any) -> Any:
    """Return the memory with the state of torch's default generator; None if it was not found.

    Asking for the state takes 2 µs, copying it 0.1 µs. A trial generator shows where the memory
    is, that every kind of draw changes it, that to set the state changes the gap in it, and that
    writing it back repeats the draws.
    """
    torch = sys.modules["torch"]
    trial = torch.Generator().manual_seed(1)
    address = getattr(trial, "_cdata", None)
    if sys.implementation.name != "cpython" or not isinstance(address, int):
        return None
    words = trial.get_state().numpy()[24 : 24 + 8 * _TORCH_WORDS].view(np.uint64)
    searched = (ctypes.c_char * (_MAX_TORCH_OFFSET + 4 * _TORCH_WORDS)).from_address(address)
    start = searched.raw.find(words.astype(np.uint32).tobytes()) - _BEFORE_TORCH_WORDS
    if start < 0:
        return None
    kind = ctypes.c_char * (_BEFORE_TORCH_WORDS + 4 * _TORCH_WORDS + _BEHIND_TORCH_WORDS)
    memory = kind.from_address(address + start)

    def draw() -> list[tuple[float, bool]]:
        """Return some numbers, and for each whether drawing it is seen."""
        drawn = []
        # Of two normal numbers that are drawn together, the second is kept for the next draw.
        for function, dtype in ((torch.rand, torch.float32), *[(torch.randn, torch.float64)] * 2):
            before = [memory[part] for part in _TORCH_MARKS]
            number = float(function(1, generator=trial, dtype=dtype))
            drawn.append((number, [memory[part] for part in _TORCH_MARKS] != before))
        return drawn

    _mark_gap(memory)
    before, drawn = memory.raw, draw()
    trial.set_state(trial.get_state())
    is_set_seen = memory.raw[_TORCH_GAP] != _GAP_MARK
    memory.raw = before
    is_found = is_set_seen and all(is_seen for _, is_seen in drawn) and draw() == drawn
    return kind.from_address(default._cdata + start) if is_found else None


def _mark_gap(memory: Any) -> None:
    """Mark the bytes between the fields of torch's state: setting it removes the mark."""
    memory[_TORCH_GAP] = _GAP_MARK


_TORCH_WORDS = 624
_MAX_TORCH_OFFSET = 128
_BEFORE_TORCH_WORDS = 20
"""Seed, words left, whether it is seeded, a gap of three bytes, and the next word."""
_TORCH_GAP = slice(13, 16)
_GAP_MARK = b"gap"
_BEHIND_TORCH_WORDS = 32
"""The normal numbers that are kept, a float and a double."""
_TORCH_MARKS = slice(0, _BEFORE_TORCH_WORDS + 20), slice(-_BEHIND_TORCH_WORDS, None)
_python: Any = random.random.__self__  # type: ignore[attr-defined]
_python_memory = _find_python_memory()
