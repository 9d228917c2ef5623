from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon import batch_stack
from energon.samples import collate
from energon.samples.collate import large_array

BYTES = np.dtype(np.uint8)


@pytest.fixture(autouse=True)
def no_blocks():
    collate._free.clear()
    yield
    collate._free.clear()


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_when_an_array_is_gone():
    first = large_array((4, 100), BYTES)
    where = address(first)
    del first
    again = large_array((2, 50), np.dtype(np.float32))
    assert address(again) == where
    assert (again.shape, again.dtype) == ((2, 50), np.float32)


def test_memory_of_another_size_is_not_kept():
    for size in (100, 1000, 100):
        large_array((size,), BYTES)
    assert [block.nbytes for block in collate._free] == [100]


views = {
    "slice": lambda array: array[1:, ::2],
    "transposed": lambda array: array.T,
    "buffer": lambda array: memoryview(array),
    "tensor": torch.from_numpy,
    "part of a tensor": lambda array: torch.from_numpy(array)[3].view(torch.int16),
}


@pytest.mark.slow
@pytest.mark.parametrize("view", views.values(), ids=views)
def test_memory_is_not_used_again_while_there_is_a_view(view):
    array = large_array((4, 100), BYTES)
    where, kept = address(array), view(array)
    del array
    assert address(large_array((4, 100), BYTES)) != where
    del kept
    gc.collect()
    assert where in map(address, collate._free)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=30))
def test_arrays_in_use_keep_their_contents(steps):
    held = []
    for number, (drops, length) in enumerate(steps):
        array = large_array((length, 3), np.dtype(np.int64))
        array[:] = number
        held.append((number, array[length // 2 :]))
        if drops:
            del held[number % len(held)], array
        assert all((values == each).all() for each, values in held)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_large_batches_equal_small_ones(kind, monkeypatch):
    samples = [kind(np.random.default_rng(n).random((3, 70, 80))) for n in range(4)]
    small = batch_stack(samples)
    monkeypatch.setattr(collate, "LARGE_BATCH_BYTES", 1)
    for _ in range(3):
        large = batch_stack(samples)
        assert (type(large), large.dtype) == (type(small), small.dtype)
        assert (large == small).all()
    assert len(collate._free) == 1


def test_arrays_of_several_types_are_stacked_as_numpy_does(monkeypatch):
    monkeypatch.setattr(collate, "LARGE_BATCH_BYTES", 1)
    assert batch_stack([np.ones(3), np.ones(3, np.uint8)]).dtype == np.float64
    assert batch_stack([np.array([None]), np.array([1], object)]).tolist() == [[None], [1]]
