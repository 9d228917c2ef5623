from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from energon.cache.contents import decode, encode
from energon.errors import FormatError
from tests.effort import mixed

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])) | st.integers(), inner)
    ),
)


@given(VALUES)
def test_values_come_back_as_they_were(value):
    found = decode(encode(value))
    assert found == value
    assert repr(found) == repr(value)


@given(
    hnp.arrays(
        hnp.integer_dtypes()
        | hnp.floating_dtypes()
        | hnp.boolean_dtypes()
        | hnp.complex_number_dtypes(),
        hnp.array_shapes(min_dims=0, min_side=0),
    )
)
def test_arrays_come_back_as_they_were(array):
    for view in (array, array.T):
        found = decode(encode([view]))[0]
        assert found.dtype == view.dtype
        assert np.array_equal(found, view, equal_nan=array.dtype.kind in "fc")
        assert found.flags.writeable


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back_as_they_were(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    for view in (tensor, tensor.T, tensor[:, 1:2], tensor[:0], tensor[1, 1]):
        found = decode(encode({"x": view}))["x"]
        assert found.dtype == dtype
        assert torch.equal(found, view)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, np.array([object()]), [np.zeros(2, "i4,f4")], torch.eye(2).to_sparse(), 1j],
)
def test_what_is_no_plain_data_is_refused(value):
    with pytest.raises(TypeError, match="cannot be cached"):
        encode(value)


def test_no_code_is_in_what_is_kept():
    data = encode({"a": np.arange(3)})
    length = int.from_bytes(data[:4], "little")
    assert json.loads(data[4 : 4 + length])["sizes"] == [24]


@pytest.mark.parametrize(
    ("shape", "name"), mixed([[2], [0]], ["load", "hub", "int64.fget", "no_such", "Tensor"])
)
def test_a_name_that_is_no_dtype_is_refused(name, shape):
    data = encode(torch.zeros(shape, dtype=torch.int16))
    text = json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])
    text["value"][1][0] = name
    header = json.dumps(text).encode()
    rest = data[-64:] if shape == [2] else b""
    damaged = len(header).to_bytes(4, "little") + header
    damaged += bytes(-len(damaged) % 64) + rest
    with pytest.raises(FormatError, match="not a dtype of torch"):
        decode(damaged)
