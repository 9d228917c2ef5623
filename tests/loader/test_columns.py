from __future__ import annotations

import pickle
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.loader.transport.columns import SHARED_COLUMN_BYTES, by_column, rebuild
from energon.samples.crude import CrudeSample, basic_sample_keys
from energon.samples.provenance import SourceInfo, sources_of
from energon.samples.sample_types import TextSample

values = st.one_of(
    st.binary(max_size=20),
    st.text(max_size=5),
    st.none(),
    st.tuples(st.integers(), st.integers()),
    st.just(b"large" * SHARED_COLUMN_BYTES),
)
names = st.lists(st.text(max_size=6), min_size=1, max_size=5, unique=True)


def send(batch):
    data, buffers = pickled(batch)
    return rebuild(*pickle.loads(data, buffers=[memoryview(bytes(each)) for each in buffers]))


def pickled(batch):
    """Return a pickle of a batch by column, and the buffers beside it."""
    buffers = []
    columns = by_column(batch).to_send()
    return pickle.dumps(columns, protocol=5, buffer_callback=buffers.append), buffers


@given(st.data(), names, st.integers(1, 6))
def test_samples_arrive_as_they_were(data, names, count):
    batch = [CrudeSample({name: data.draw(values) for name in names}) for _ in range(count)]
    found = send(batch)
    assert found == batch
    assert {type(sample) for sample in found} == {CrudeSample}
    assert [list(sample) for sample in found] == [list(sample) for sample in batch]


@given(st.lists(st.lists(st.sampled_from("abc"), unique=True), min_size=1, max_size=6))
def test_only_samples_with_the_same_names_in_the_same_order_travel_by_column(rows):
    batch = [CrudeSample(dict.fromkeys(names)) for names in rows]
    assert (by_column(batch) is not None) == (rows.count(rows[0]) == len(rows) and bool(rows[0]))


def cooked(count, *, path="ds", shard="0.tar", own_key=None):
    batch = []
    for n in range(count):
        raw = CrudeSample(
            {
                "__key__": f"s{n}",
                "__shard__": shard,
                "__restore_key__": (0, 3, n),
                "__subflavors__": {},
                "txt": b"text",
            }
        )
        raw["__sources__"] = sources_of(path, raw)
        if own_key is not None:
            raw["__restore_key__"] = (*raw["__restore_key__"], own_key)
        batch.append(raw)
    return batch


@pytest.mark.parametrize(
    "batch",
    [
        cooked(3),
        cooked(3, own_key=1),
        cooked(3, shard=None),
        [*cooked(2), *cooked(2, path="other")],
    ],
)
def test_sources_arrive_as_they_were(batch):
    found = send(batch)
    assert found == batch
    (source,) = found[-1]["__sources__"]
    assert source.file_names == (f"{found[-1]['__key__']}.txt",)
    assert source.index == found[-1]["__restore_key__"][2]


(KNOWN,) = cooked(1)[0]["__sources__"]


@pytest.mark.parametrize(
    "sources",
    [None, (), (KNOWN, KNOWN), [KNOWN], (SourceInfo("ds", 0, None, ("a.txt",)),), ("text",), "t"],
)
@pytest.mark.parametrize("count", [1, 3])
def test_sources_of_another_form_arrive_as_they_were(sources, count):
    batch = cooked(count)
    batch[-1]["__sources__"] = sources
    found = send(batch)
    assert found == batch
    assert type(found[-1]["__sources__"]) is type(sources)


def test_several_sources_of_a_sample_are_sent_without_a_call_for_each():
    batch = cooked(5)
    for number, sample in enumerate(batch):
        sample["__sources__"] = sample["__sources__"] * number
    assert b"known_source" not in pickled(batch)[0]
    assert send(batch) == batch


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("note", [np.arange(3), np.zeros(3, [("a", "i8")])])
def test_sources_arrive_beside_notes_that_cannot_be_compared(count, note):
    batch = cooked(count)
    batch[-1]["__restore_key__"] = note
    found = send(batch)
    assert [sample["__sources__"] for sample in found] == [s["__sources__"] for s in batch]
    assert found[-1]["__restore_key__"].tolist() == note.tolist()


def test_sources_that_follow_from_the_sample_take_no_room():
    batch = cooked(100)
    with_sources = len(pickled(batch)[0])
    for sample in batch:
        sample["__sources__"] = None
    assert with_sources < len(pickled(batch)[0]) + 300


def test_large_parts_are_not_in_the_pickle():
    batch = [CrudeSample({"__key__": str(n), "jpg": bytes(100_000)}) for n in range(8)]
    assert len(pickled(batch)[0]) < 2000
    assert all(type(sample["jpg"]) is bytes for sample in send(batch))


@pytest.mark.parametrize("place", range(7))
def test_a_large_part_among_small_ones_arrives(place):
    batch = [CrudeSample({"jpg": b"small"}) for _ in range(7)]
    batch[place]["jpg"] = bytes(100_000)
    assert send(batch) == batch


class Note:
    pass


@dataclass
class Plain:
    text: Any
    extra: int = 0


@dataclass(frozen=True)
class Fixed:
    text: Any


@dataclass(slots=True)
class Slotted:
    text: Any


class Doubling:
    """Sets twice what it is given, and is 0 on the class."""

    def __get__(self, owner, kind=None):
        return 0 if owner is None else vars(owner)["number"]

    def __set__(self, owner, value):
        vars(owner)["number"] = 2 * value


class Doubled:
    number = Doubling()

    def __init__(self):
        self.number = 1


def typed(count):
    return [TextSample(**basic_sample_keys(raw), text=raw["txt"].decode()) for raw in cooked(count)]


@pytest.mark.parametrize(
    "batch",
    [
        typed(3),
        typed(1),
        [Plain(1), Plain(2, 3)],
        [Fixed("a"), Fixed("b")],
        [Slotted("a"), Slotted(1)],
        [Plain(b"large" * SHARED_COLUMN_BYTES)] * 2,
        [Plain([1, {"a": None}]), Plain(Fixed("b"))],
    ],
)
def test_objects_arrive_as_they_were(batch):
    found = send(batch)
    assert found == batch
    assert {type(sample) for sample in found} == {type(batch[0])}
    assert [vars(sample) for sample in found if hasattr(sample, "__dict__")] == [
        vars(sample) for sample in batch if hasattr(sample, "__dict__")
    ]


def test_attributes_beside_the_fields_arrive():
    batch = typed(2)
    for number, sample in enumerate(batch):
        sample.number = number
    assert [sample.number for sample in send(batch)] == [0, 1]


def test_values_that_samples_share_stay_shared():
    shared = [1]
    first, second = send([Plain(shared), Plain(shared, shared)])
    assert first.text is second.text is second.extra


def unfilled():
    sample = object.__new__(Slotted)
    return [sample, sample]


@pytest.mark.parametrize(
    "batch",
    [
        [Note()],
        [Doubled()],
        unfilled(),
        [SimpleNamespace(a=1)],
        [Fraction(1, 2)],
        [{1}],
        [len],
        [Plain],
    ],
)
def test_objects_that_may_hold_others_are_left_alone(batch):
    assert by_column(batch) is None


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
    assert by_column(batch) is None
