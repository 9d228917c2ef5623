from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.loader.transport.columns import OUT_OF_BAND_BYTES, Columns, by_column
from energon.samples.crude import CrudeSample

values = st.one_of(
    st.binary(max_size=20),
    st.text(max_size=5),
    st.none(),
    st.tuples(st.integers(), st.integers()),
    st.just(b"large" * OUT_OF_BAND_BYTES),
)
names = st.lists(st.text(max_size=6), min_size=1, max_size=5, unique=True)


def send(batch):
    buffers = []
    data = pickle.dumps(by_column(batch), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[memoryview(bytes(buffer)) for buffer in buffers])


@given(st.data(), names, st.integers(1, 6))
def test_samples_arrive_as_they_were(data, names, count):
    batch = [CrudeSample({name: data.draw(values) for name in names}) for _ in range(count)]
    found = send(batch)
    assert found == batch
    assert {type(sample) for sample in found} == {CrudeSample}
    assert [list(sample) for sample in found] == [list(sample) for sample in batch]
    assert isinstance(by_column(batch), Columns)


def test_large_parts_are_not_in_the_pickle():
    batch = [CrudeSample({"__key__": str(n), "jpg": bytes(100_000)}) for n in range(8)]
    assert len(pickle.dumps(by_column(batch), protocol=5, buffer_callback=lambda _: False)) < 2000
    assert all(type(sample["jpg"]) is bytes for sample in send(batch))


@pytest.mark.parametrize(
    "batch",
    [
        [],
        [{"a": 1}],
        [CrudeSample()],
        [CrudeSample(a=1), CrudeSample(b=1)],
        [CrudeSample(a=1, b=2), CrudeSample(b=2, a=1)],
        [CrudeSample({1: "a"})],
        [CrudeSample(a=1), 5],
        ["text"],
        {"a": [1]},
        ({"a": 1},),
        None,
    ],
)
def test_anything_else_is_left_alone(batch):
    assert by_column(batch) is batch
    assert send(batch) == batch
