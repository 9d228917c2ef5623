from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from energon.loader.transport.pickling import OUT_OF_BAND_BYTES, BatchPickler

COUNT = 8


@dataclass
class Tokens:
    tokens: Any
    labels: Any = None


def pickled(batch):
    """Return a pickle of a batch, and the buffers beside it."""
    file = io.BytesIO()
    pickler = BatchPickler(file)
    pickler.dump(batch)
    return file.getvalue(), [bytearray(buffer.raw()) for buffer in pickler.buffers]


def send(batch):
    data, buffers = pickled(batch)
    return pickle.loads(data, buffers=buffers)


def same(found, sent):
    assert type(found) is type(sent)
    assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
    assert found.tolist() == sent.tolist()


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
        found = send(batch)
        assert [type(each) for each in found] == [type(each) for each in batch]
        for each, array in zip(found, made, strict=True):
            same(each.tokens if isinstance(each, Tokens) else each["tokens"], array)


def arrays(size=64):
    return [np.arange(size) + number for number in range(COUNT)]


def test_each_array_has_memory_of_its_own():
    first, second, *_ = (each["tokens"] for each in send([{"tokens": a} for a in arrays()]))
    first[:] = 0
    assert second.tolist() == arrays()[1].tolist()


def test_large_arrays_go_straight_into_shared_memory():
    batch = [Tokens(each) for each in arrays(OUT_OF_BAND_BYTES)]
    data, buffers = pickled(batch)
    assert len(buffers) == COUNT
    assert len(data) < 4000
    for found, sent in zip(send(batch), batch, strict=True):
        same(found.tokens, sent.tokens)


def test_an_array_in_two_places_is_one_array_afterwards():
    one, *others = arrays()
    first, second, *_ = send([Tokens(one), Tokens(one), *map(Tokens, others)])
    assert first.tokens is second.tokens
    found, *_ = send([Tokens(each, each) for each in arrays()])
    assert found.tokens is found.labels


class TestTensors:
    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("name", ["bool", "uint8", "int64", "bfloat16", "float64", "complex64"])
    @pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (4, 5)])
    def test_every_type_and_shape_arrives(self, torch, name, shape):
        made = [(torch.rand(shape) * 9).to(getattr(torch, name)) for _ in range(COUNT)]
        for found, sent in zip(send([Tokens(each) for each in made]), made, strict=True):
            same(found.tokens, sent)

    def test_each_has_a_storage_of_its_own(self, torch):
        first, *_ = send([Tokens(torch.arange(64) + number) for number in range(COUNT)])
        assert first.tokens.untyped_storage().nbytes() == 64 * 8

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: t.requires_grad_(),
            lambda t: t.to_sparse(),
            lambda t: t.half(),
            lambda t: t.reshape(8, 8).T,
            lambda t: t[::2],
            lambda t: t.expand(3, 64),
            lambda t: None,
            lambda t: t.numpy(),
        ],
    )
    def test_unusual_ones_arrive_as_they_were(self, torch, change):
        made = [(torch.arange(65.0) + number)[:64] for number in range(COUNT)]
        made[-1] = change(made[-1])
        for found, sent in zip(send([Tokens(each) for each in made]), made, strict=True):
            assert type(found.tokens) is type(sent)
            if type(sent) is torch.Tensor:
                assert found.tokens.requires_grad == sent.requires_grad
                same(found.tokens.detach().to_dense(), sent.detach().to_dense())

    def test_attributes_set_by_a_program_arrive(self, torch):
        made = [torch.arange(8) for _ in range(COUNT)]
        made[0].note = "note"
        found, *_ = send([Tokens(each) for each in made])
        assert found.tokens.note == "note"

    def test_views_of_one_storage_still_share_it(self, torch):
        whole = [torch.zeros(64) for _ in range(COUNT)]
        found, *_ = send([Tokens(each, each[1:]) for each in whole])
        found.tokens.fill_(1)
        assert found.labels.tolist() == [1] * 63
