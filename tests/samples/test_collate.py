from __future__ import annotations

from dataclasses import dataclass
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
    concat_pad,
    generic_batch,
    generic_concat,
    homogeneous_concat_mix,
)

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
