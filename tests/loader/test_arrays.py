"""Arrays and tensors of batches cross to the training process as they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from tests.loader.test_pickling import crossed, dumped


@dataclass
class Tokens:
    tokens: Any


numbers = st.one_of(
    arrays_of.integer_dtypes(endianness="?"),
    arrays_of.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    arrays_of.boolean_dtypes(),
    arrays_of.complex_number_dtypes(sizes=(64,)),
    st.just(np.dtype("datetime64[s]")),
    st.just(np.dtype([("a", "i4"), ("b", "f8")])),
)
shapes = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
layouts = st.sampled_from([lambda a: a, np.asfortranarray, lambda a: a[::2], lambda a: a.T])


@given(st.data(), st.lists(shapes, min_size=1, max_size=5), st.booleans(), layouts)
def test_arrays_arrive_as_they_were(data, shapes, is_one_type, layout):
    dtypes = numbers if not is_one_type else st.just(data.draw(numbers))
    made = [np.zeros(shape, data.draw(dtypes)) for shape in shapes]
    for number, array in enumerate(made):
        if array.dtype.kind in "biufc":
            array[...] = number
    made = [layout(array) if array.ndim else array for array in made]
    for batch in ([Tokens(each) for each in made], [{"tokens": each} for each in made]):
        found = crossed(batch)
        assert [type(each) for each in found] == [type(each) for each in batch]
        for each, array in zip(found, made, strict=True):
            again = each.tokens if isinstance(each, Tokens) else each["tokens"]
            assert type(again) is type(array)
            assert (again.dtype, again.shape) == (array.dtype, array.shape)
            assert again.tolist() == array.tolist()


def test_each_array_has_memory_of_its_own():
    first, second, *_ = crossed([np.arange(64) + number for number in range(8)])
    first[:] = 0
    assert second.tolist() == list(range(1, 65))


DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.uint8, torch.bool,
]  # fmt: skip


def same(first, second):
    assert first.dtype == second.dtype
    assert first.shape == second.shape
    assert first.requires_grad == second.requires_grad
    return torch.equal(
        first.detach().contiguous().view(-1).view(torch.uint8),
        second.detach().contiguous().view(-1).view(torch.uint8),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (50, 60)])
def test_every_type_and_shape_crosses(dtype, shape):
    tensor = (torch.rand(shape) * 9).to(dtype)
    assert same(crossed(tensor), tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[::2],
        lambda t: t[3:5, 2:],
        lambda t: t[0, :1].expand(100),
        lambda t: t[0, :1].clone()[::2],
        lambda t: t.reshape(5, 4, 1, 5).contiguous(memory_format=torch.channels_last),
    ],
)
def test_views_keep_their_elements(view):
    tensor = view(torch.arange(100.0).reshape(20, 5))
    again = crossed(tensor)
    assert torch.equal(again, tensor)


def test_views_of_one_storage_still_share_it():
    whole = torch.zeros(10_000)
    inputs, targets, again = whole[:-1], whole[1:], whole
    batch = [inputs, targets, again]
    assert len(dumped(batch)[1]) == 1
    inputs, targets, again = crossed(batch)
    again += 1
    assert inputs.sum() == 9_999
    assert targets.sum() == 9_999


def test_a_small_view_does_not_take_its_storage_along():
    view = torch.zeros(1_000_000)[10:20]
    assert crossed(view).untyped_storage().nbytes() == 40
    assert dumped(view)[1] == []


def test_the_same_tensor_twice_is_one_tensor():
    tensor = torch.zeros(5)
    first, second = crossed([tensor, tensor])
    assert first is second


def test_gradients_parameters_and_graphs():
    leaf = torch.ones(3, requires_grad=True)
    assert crossed(leaf).requires_grad
    assert crossed(leaf * 2).is_leaf
    parameter = crossed(torch.nn.Parameter(torch.ones(3), requires_grad=False))
    assert type(parameter) is torch.nn.Parameter
    assert not parameter.requires_grad


def test_lazy_conjugates_are_resolved():
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert torch.equal(crossed(tensor), tensor.resolve_conj())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_torch_alone_knows_is_left_to_torch():
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(crossed(sparse).to_dense(), torch.eye(3))
    assert crossed(torch.empty(3, device="meta")).device.type == "meta"
    with_attribute = torch.ones(3)
    with_attribute.note = "x"
    assert crossed(with_attribute).note == "x"


def test_a_received_tensor_can_be_written():
    tensor = crossed(torch.from_numpy(np.arange(5000)))
    tensor += 1
    assert tensor[-1] == 5000
