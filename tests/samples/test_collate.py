from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.samples.collate import (
    batch_list,
    batch_pad_stack,
    batch_stack,
    collate_samples,
    concat_pad,
    generic_batch,
    generic_concat,
    homogeneous_concat_mix,
)
from energon.samples.crude import CrudeSample
from tests.commands import run_python
from tests.effort import mixed

shapes = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5)


class Named(NamedTuple):
    a: object
    b: object


@dataclass
class Data:
    a: object
    b: object


@given(shapes, st.sampled_from([np.ones, torch.ones]))
def test_padding_adds_zeros_at_the_ends_and_nothing_else(shapes, ones):
    batch = batch_pad_stack([ones(shape) for shape in shapes])
    assert tuple(batch.shape) == (len(shapes), *np.max(shapes, axis=0))
    for row, (height, width) in zip(batch, shapes, strict=True):
        assert row[:height, :width].sum() == height * width == row.sum()


@given(shapes, st.sampled_from([np.ones, torch.ones]))
def test_joining_pads_all_dimensions_but_the_first(shapes, ones):
    joined = concat_pad([ones(shape) for shape in shapes])
    assert tuple(joined.shape) == (sum(h for h, _ in shapes), max(w for _, w in shapes))
    assert joined.sum() == sum(h * w for h, w in shapes)


def test_arrays_stay_what_they_are():
    assert isinstance(generic_batch([np.ones(2, np.uint8)] * 2), np.ndarray)
    assert generic_batch([np.ones(2, np.uint8)] * 2).dtype == np.uint8
    assert generic_batch([torch.ones(2, dtype=torch.bfloat16)] * 2).dtype == torch.bfloat16


@pytest.mark.parametrize("make", [lambda **v: v, Data, Named])
def test_structures_are_batched_by_field(make):
    batch = generic_batch([make(a=torch.ones(2), b="x"), make(a=torch.ones(3), b="y")])
    a, b = (batch["a"], batch["b"]) if isinstance(batch, dict) else (batch.a, batch.b)
    assert a.shape == (2, 3)
    assert b == ["x", "y"]


class Narrow(NamedTuple):
    a: int


class AlsoNarrow(NamedTuple):
    a: int


class Wide(NamedTuple):
    a: int
    b: int


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9).map(np.array), max_size=4),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([dict, CrudeSample]),
)
def test_a_batch_of_dicts_has_the_names_of_all_and_none_for_what_is_missing(samples, kind):
    batch = collate_samples([kind(each, __key__=str(i)) for i, each in enumerate(samples)])
    assert batch.pop("__key__") == [str(i) for i in range(len(samples))]
    assert set(batch) == set().union(*samples)
    for name, values in batch.items():
        expected = [each.get(name) for each in samples]
        assert list(values) == expected
        assert isinstance(values, list) == (None in expected)


def test_samples_of_types_with_different_fields_stay_a_list():
    for samples in itertools.permutations([Narrow(1), Wide(1, 2), {"a": 1}], 2):
        assert collate_samples(samples) == list(samples)
    assert collate_samples([Narrow(1), AlsoNarrow(2)]) == Narrow([1, 2])


def test_other_values_become_lists():
    assert generic_batch([b"a", b"b"]) == [b"a", b"b"]
    assert generic_batch([torch.ones(1), None]) == [torch.ones(1), None]
    assert generic_batch([{"a": 1}, {"b": 2}]) == [{"a": 1}, {"b": 2}]
    assert generic_batch([{"__key__": {"x": 1}}] * 2) == {"__key__": [{"x": 1}] * 2}
    assert batch_list((1, 2)) == [1, 2]


def test_stacking_wants_equal_shapes():
    assert batch_stack([torch.ones(2)] * 3).shape == (3, 2)
    with pytest.raises(ConfigError, match="shapes"):
        batch_stack([torch.ones(2), torch.ones(3)])
    with pytest.raises(ConfigError, match="dimensions"):
        batch_pad_stack([torch.ones(2), torch.ones(3, 1)])


def test_batches_are_joined_by_field():
    batches = [{"a": torch.ones(2, 1), "b": ["x"]}, {"a": torch.ones(1, 3), "b": ["y", "z"]}]
    joined = generic_concat(batches)
    assert joined["a"].shape == (3, 3)
    assert joined["b"] == ["x", "y", "z"]
    assert homogeneous_concat_mix([Data(torch.ones(1), [1]), Data(torch.ones(1), [2])]).b == [1, 2]
    with pytest.raises(ConfigError, match="Data, dict"):
        homogeneous_concat_mix([Data(1, 2), {}])


class Named(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize(
    ("size", "change"),
    mixed(
        [10, 20_000],
        [
            *(torch.uint8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.complex64),
            lambda value: value.requires_grad_(),
            lambda value: torch.complex(value, value).conj().imag,
            lambda value: value.t(),
            lambda value: value.as_subclass(Named),
        ],
    ),
)
def test_tensors_are_stacked_as_torch_stacks_them(change, size):
    values = [torch.arange(2 * size, dtype=torch.float32).reshape(2, size) + n for n in range(3)]
    changed = [
        value.to(change) if isinstance(change, torch.dtype) else change(value) for value in values
    ]
    expected, found = torch.stack(changed), batch_stack(changed)
    assert type(found) is type(expected)
    assert found.dtype is expected.dtype
    assert found.stride() == expected.stride()
    assert found.requires_grad == expected.requires_grad
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_large_tensors_are_stacked_without_threads_that_spin():
    program = """
import os, torch
from energon.samples.collate import generic_batch
torch.set_num_threads(4)
torch.ones(3)
import numpy as np
images = [torch.from_numpy(np.full((3, 500, 375), n, np.float32)) for n in (0, 1)]
before = len(os.listdir("/proc/self/task"))
batch = generic_batch(images)
assert len(os.listdir("/proc/self/task")) == before
assert batch.shape == (2, 3, 500, 375) and torch.stack(images).equal(batch)
assert len(os.listdir("/proc/self/task")) > before  # so that this test can fail
"""
    if not Path("/proc/self/task").is_dir():
        pytest.skip("threads of a process are counted in /proc, which only Linux has")
    run_python(program)
