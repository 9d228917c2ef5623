"""Run user code with seeded global random generators, and restore them afterwards.

User hooks draw from `random`, `numpy.random` and torch's default generator. Seeding them from
an address makes augmentations a function of the sample instead of who loads it. The state of
the surrounding program is put back afterwards. torch is only touched where it is loaded.

To seed takes 10 µs, to keep the state of the surrounding program and put it back ten times as
long, so only the outermost block of a thread does that: a batch, not each of its samples. A
worker process has no surrounding program. Nor do other threads than the main one put anything
back: meanwhile the program has drawn, and would draw the same numbers again.

Most hooks draw nothing, which a `DrawWatch` detects by comparing states. What draws nothing is
the same with any seed, so it needs none. A hook that draws and puts the state back as it was
counts as one that draws nothing.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

_is_worker_process = False


class _Thread(threading.local):
    inside = False
    """Whether the thread is in a seeded block."""
    marked: tuple[tuple[Any, ...], States] | None = None
    """The marks and states that it has copied last."""


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
    generator = _torch_generator()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = generator.get_state() if generator is not None else None
    _seed(seed)
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = False
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if generator is not None:
            generator.set_state(torch_state)


class Drawn(Exception):
    """Code that was assumed not to draw random numbers has drawn some."""


class DrawWatch:
    """Detects draws of random numbers by comparing the states of the generators.

    Args:
        seed: Returns what the generators are seeded with when that becomes necessary; None if
            they are seeded already.
    """

    def __init__(self, seed: Callable[[], int] | None = None) -> None:
        self.seeds = seed is None
        self._seed = seed
        self._has_begun = False
        self._was_inside = False
        self._drawn = False
        self._marks, self._expected = _marked_states()

    def check(self) -> bool:
        """Return whether anything has drawn from generators that were not seeded for it."""
        if not (self._drawn or self._has_begun or current_marks() == self._marks):
            current = current_states()
            is_new = self._expected.torch is None and current.torch is not None
            if is_new and _torch_is_fresh():
                # A hook has imported torch, and drawn nothing from it.
                self._expected = self._expected._replace(torch=current.torch)
            self._drawn = current != self._expected
        return self._drawn

    def expect_present(self) -> None:
        """Take the current states as those in which nothing was drawn."""
        self._marks, self._expected = _marked_states()

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
        _seed(self._seed())

    def put_back(self) -> None:
        """Restore the generators for the surrounding program, if they were drawn from or seeded."""
        if self._has_begun:
            _thread.inside = self._was_inside
        if (self._drawn or self._has_begun) and not _has_no_program():
            put_back(self._expected)


def may_draw(function: Callable[..., Any]) -> bool:
    """Return whether a function can draw random numbers: not if its code names nothing."""
    code = getattr(function, "__code__", None)
    return code is None or _names_something(code)


def _names_something(code: CodeType) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return bool(code.co_names or code.co_freevars) or any(map(_names_something, inner))


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    generator = _torch_generator()
    if generator is not None:
        # Not torch.manual_seed: before CUDA is there, that keeps a record of every call.
        generator.manual_seed(seed)


def _torch_generator() -> Any:
    return getattr(sys.modules.get("torch"), "default_generator", None)


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


def current_marks() -> tuple[Any, ...]:
    """Return something of the current states that every draw changes, in a third of the time.

    Of a Mersenne Twister, this is the index and a few words next to it. A draw moves the index,
    except if it takes a multiple of 624 words, and then it has replaced all words.
    """
    torch = _torch_generator()
    return (
        random.getstate() if _python_marks is None else _python_marks(),
        getattr(_python, "gauss_next", None),
        _numpy_marks(),
        b"" if _numpy_kept is None else _numpy_kept.raw,
        None if torch is None else _torch_state(torch),
    )


def _marked_states() -> tuple[tuple[Any, ...], States]:
    """Return the current marks and states; states are only copied after something has drawn."""
    marks, last = current_marks(), _thread.marked
    if last is None or last[0] != marks:
        last = _thread.marked = marks, current_states()
    return last


def current_states() -> States:
    """Return the current states, in 1 µs, as opaque bytes that can only be compared."""
    torch = _torch_generator()
    return States(
        random.getstate()[1] if _python_memory is None else _python_memory.raw,
        getattr(_python, "gauss_next", None),
        _numpy_words(),
        b"" if _numpy_kept is None else _numpy_kept.raw,
        None if torch is None else _torch_state(torch),
    )


def _torch_state(generator: Any) -> bytes:
    """Return the state of torch's generator, copied from its memory if that was found."""
    global _torch_memory
    if _torch_memory is _UNKNOWN:
        _torch_memory = _find_torch_memory(generator)
    state: bytes = (
        generator.get_state().numpy().tobytes() if _torch_memory is None else _torch_memory.raw
    )
    return state


def _torch_is_fresh() -> bool:
    """Return whether torch's generator is in the state right after its last seed."""
    torch = sys.modules["torch"]
    generator = torch.default_generator
    fresh = torch.Generator().manual_seed(generator.initial_seed())
    return bool(torch.equal(generator.get_state(), fresh.get_state()))


def put_back(states: States) -> None:
    """Set the generators to `states`."""
    words = states.python
    if isinstance(words, bytes):
        index, *rest = np.frombuffer(words, np.uint32).tolist()
        words = (*rest, index)
    random.setstate((3, words, states.gauss))
    numbers = np.frombuffer(states.numpy, np.uint32)
    kept = _KEPT.unpack(states.numpy_kept) if states.numpy_kept else (0, 0.0)
    np.random.set_state(("MT19937", numbers[:-1], int(numbers[-1]), *kept))
    generator = _torch_generator()
    if generator is None or states.torch is None:
        return
    if isinstance(_torch_memory, ctypes.Array):
        _torch_memory.raw = states.torch
    else:
        torch = sys.modules["torch"]
        generator.set_state(torch.frombuffer(bytearray(states.torch), dtype=torch.uint8))


def numpy_hides_a_number() -> bool:
    """Return whether numpy may return a normal number without a visible change of its state."""
    global _numpy_without
    marks = _numpy_marks()
    if not marks:
        return True
    if _numpy_kept is None and marks != _numpy_without:
        if np.random.get_state(legacy=False)["has_gauss"]:
            return True
        _numpy_without = marks
    return False


_numpy_without: bytes = b""
"""The marks of numpy with which it was last known to keep no number: drawing one changes them."""
_KEPT = struct.Struct("@id")
_WORDS = 625
_MARK_BYTES = 16


def _find_python_memory() -> Any:
    """Return the address of the state of `random`: an index and 624 words; None if not found.

    To ask for the state takes 17 µs, to copy it 0.2 µs.
    """
    kind = type(_python)
    start = object.__basicsize__
    if sys.implementation.name != "cpython" or kind.__basicsize__ < start + 4 * _WORDS:
        return None
    memory = (ctypes.c_char * (4 * _WORDS)).from_address(id(_python) + start)
    index, *words = np.frombuffer(memory.raw, np.uint32).tolist()
    return memory if (*words, index) == random.getstate()[1] else None


def _numpy_marks() -> bytes:
    """Return the last words and the index; b"" for a generator that is not a Mersenne Twister."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if generator is not _numpy_generator and not _numpy_words():
        return b""
    return _read_numpy_marks()


def _numpy_words() -> bytes:
    """Return 624 words and an index; b"" for a generator that is not a Mersenne Twister."""
    global _numpy_generator, _numpy_memory, _read_numpy_marks, _numpy_kept
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if generator is not _numpy_generator:
        if not isinstance(generator, np.random.MT19937):
            return b""
        address = generator.ctypes.state_address
        _numpy_memory = (ctypes.c_char * (4 * _WORDS)).from_address(address)
        _read_numpy_marks = memoryview(_numpy_memory).cast("B")[-_MARK_BYTES:].tobytes
        _numpy_kept = _find_numpy_kept()
        _numpy_generator = generator
    words: bytes = _numpy_memory.raw
    return words


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
    if start < 0 or _KEPT.unpack_from(memory.raw, start) != (1, number):
        return None
    if trial.standard_normal() != number or _KEPT.unpack_from(memory.raw, start)[0]:
        return None
    return (ctypes.c_char * _KEPT.size).from_address(id(used) + start)


def _find_torch_memory(default: Any) -> Any:
    """Return the memory with the state of torch's default generator; None if it was not found.

    Asking for the state takes 2 µs, copying it 0.1 µs. A trial generator shows where the memory
    is, that every kind of draw changes it, and that writing it back repeats the draws.
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

    def draw() -> list[float]:
        # Of two normal numbers that are drawn together, the second is kept for the next draw.
        kinds = (
            (torch.rand, torch.float32),
            (torch.randn, torch.float64),
            (torch.randn, torch.float64),
        )
        drawn = []
        for function, dtype in kinds:
            before = memory.raw
            drawn.append(float(function(1, generator=trial, dtype=dtype)))
            if memory.raw == before:
                raise ValueError("a draw cannot be seen")
        return drawn

    try:
        before, drawn = memory.raw, draw()
        memory.raw = before
        is_found = draw() == drawn
    except ValueError:
        is_found = False
    return kind.from_address(default._cdata + start) if is_found else None


_TORCH_WORDS = 624
_MAX_TORCH_OFFSET = 128
_BEFORE_TORCH_WORDS = 20
"""Seed, words left, whether it is seeded, and the next word."""
_BEHIND_TORCH_WORDS = 32
"""The normal numbers that are kept, a float and a double."""
_UNKNOWN = object()
_torch_memory: Any = _UNKNOWN
"""None if it was looked for in vain."""
_numpy_generator: Any = None
_numpy_memory: Any = None
_read_numpy_marks: Callable[[], bytes] = bytes
_numpy_kept: Any = None
_python: Any = random.random.__self__  # type: ignore[attr-defined]
_python_memory = _find_python_memory()
_python_marks: Any = _python_memory and memoryview(_python_memory).cast("B")[:_MARK_BYTES].tobytes
