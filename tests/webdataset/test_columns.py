"""Batches made by columns are those that the stages make of samples one by one."""

from __future__ import annotations

import json
import pickle
import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import energon.webdataset as wds
from energon.errors import FieldAccessError
from energon.webdataset.autodecode import Decoder, decoders
from energon.webdataset.running.place import Place
from energon.webdataset.stages import columns
from energon.webdataset.stages.base import Context
from energon.webdataset.stages.columns import JsonColumn
from energon.webdataset.stages.fields import ToTuple
from tests.webdataset.shards import tar_bytes

GOOD = {"__key__": "a", "__url__": "x.tar", "json": b'{"a": [1]}', "txt": b"\xc3\xa9", "cls": b"7"}
ODD = [
    {"json": b"{"},
    {"json": b"null"},
    {"json": b"[NaN, 1e400]"},
    {"json": b'"\\ud800"'},
    {"json": "[1]".encode("utf-16")},
    {"txt": b"\xff"},
    {"cls": b"x"},
    {"cls": b" 12 "},
    {"json": 5},
    {"__key__": b"b"},
    {"extra": b"\0"},
    {"json": b"[" * 500 + b"]" * 500},
]
HANDLERS = [wds.reraise_exception, wds.ignore_and_continue, wds.ignore_and_stop]


def samples(*odd):
    return [{**GOOD, **ODD[each]} if each < len(ODD) else {**GOOD} for each in odd]


def results(stages, items, *, separately):
    """Return what the stages make of items, and the error that ends them."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if separately:
            patch.delattr(Decoder, "on_columns")
            patch.delattr(ToTuple, "on_columns")
        error = None
        try:
            stream = iter(items)
            for stage in stages:
                stream = stage(stream)
            found.extend(stream)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught} {getattr(caught, '__notes__', '')}"
    return repr(found), error


@given(
    st.lists(st.integers(0, 40), max_size=20),
    st.sampled_from(HANDLERS),
    st.sampled_from([["txt", "json"], ["cls;json"], ["extra", "txt"], []]),
    st.sampled_from([None, list, wds.default_collation_fn]),
    st.integers(1, 6),
    st.booleans(),
)
def test_batches_are_those_of_stages_one_by_one(odd, handler, fields, collate, size, partial):
    stages = [wds.decode(handler=handler)]
    if fields:
        stages.append(wds.to_tuple(*fields, handler=handler))
    stages.append(wds.batched(size, collation_fn=collate, partial=partial))
    found = [results(stages, samples(*odd), separately=each) for each in (False, True)]
    assert found[0] == found[1]


def test_samples_are_not_decoded_one_by_one(monkeypatch):
    calls = []
    monkeypatch.setattr(Decoder, "decode", lambda *_: calls.append("decode"))
    monkeypatch.setattr(ToTuple, "__call__", lambda *_: calls.append("to_tuple"))
    stages = [wds.decode(), wds.to_tuple("txt", "json;jpg", "cls"), wds.batched(4)]
    text, error = results(stages, samples(*[99] * 10), separately=False)
    assert error is None
    assert text == repr(
        [(["é"] * count, [{"a": [1]}] * count, np.array([7] * count)) for count in (4, 4, 2)]
    )
    assert calls == []


def test_no_more_samples_are_taken_than_a_batch_needs():
    source = iter(samples(*[99] * 10))
    batches = wds.batched(3)(wds.to_tuple("txt")(wds.decode()(source)))
    next(batches)
    assert len(list(source)) == 7


def test_functions_that_the_program_registers_are_called_once_for_each_sample():
    calls = []

    def decode(data):
        calls.append(data)
        return len(calls)

    decoders["cls"] = decode
    try:
        batches = wds.batched(4)(wds.to_tuple("cls")(wds.decode()(samples(*[99] * 4))))
        assert [batch[0].tolist() for batch in batches] == [[1, 2, 3, 4]]
    finally:
        decoders["cls"] = int
    assert len(calls) == 4


def test_samples_without_fields_and_what_is_no_sample_are_left_to_the_stages():
    assert list(wds.batched(2)(wds.decode()([{}, {}, {}]))) == [{}, {}]
    with pytest.raises(AttributeError):
        list(wds.batched(2)(wds.decode()([GOOD, 5])))


def test_the_sample_that_fails_is_named_and_those_before_it_are_not_lost():
    items = samples(99, 99, 99, 0, 99)
    items[3]["__key__"] = "bad"
    batches = wds.batched(2)(wds.decode()(items))
    assert len(next(batches)["txt"]) == 2
    with pytest.raises(wds.DecodingError, match="field 'json' of sample 'bad' of x.tar"):
        next(batches)
    with pytest.raises(FieldAccessError, match="has no png"):
        next(wds.batched(2)(wds.to_tuple("png")(wds.decode()(samples(99)))))


@given(st.integers(0, 60), st.integers(1, 12), st.integers(0, 14), st.integers(1, 9))
def test_a_buffer_gives_the_same_order_in_lists_as_one_by_one(count, size, initial, batch):
    singles = list(wds.shuffle(size, initial=initial)(range(count)))
    batches = list(
        wds.batched(batch, collation_fn=None)(wds.shuffle(size, initial=initial)(range(count)))
    )
    assert [item for each in batches for item in each] == singles
    mixed, items = [], wds.shuffle(size, initial=initial)(range(count))
    for number in range(count):
        if number % 3:
            items.take(mixed, number % 5)
        else:
            with suppress(StopIteration):
                mixed.append(next(items))
    assert mixed == singles[: len(mixed)]


@pytest.mark.parametrize("length", [9000, 30])
def test_a_buffer_takes_lists_across_its_blocks_of_random_numbers(length):
    rng = random.Random(3)
    for options in ({}, {"rng": rng}):
        rng.seed(3)
        singles = list(wds.shuffle(20, **options)(range(length)))
        rng.seed(3)
        batches = wds.batched(32, collation_fn=None)(wds.shuffle(20, **options)(range(length)))
        assert [item for each in batches for item in each] == singles


@given(
    st.lists(st.sampled_from([*samples(99, 9, 10), {}, 5, ("a", 1), [2.5, 3]])), st.integers(1, 4)
)
def test_batches_without_stages_before_them_are_those_of_the_collation(items, size):
    def outcome(make):
        try:
            return repr(list(make()))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    starts = range(0, len(items), size)
    wanted = outcome(
        lambda: [wds.default_collation_fn(items[start : start + size]) for start in starts]
    )
    assert outcome(lambda: wds.batched(size)(items)) == wanted
    assert outcome(lambda: wds.batched(size)(iter(items))) == wanted


def test_samples_become_no_dicts_on_the_way_to_their_columns(tmp_path, monkeypatch):
    members = [(f"{number:04}.{part}", b"7") for number in range(2000) for part in ("txt", "cls")]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    pipeline = wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).shuffle(50)
    made, as_sample = [], columns._as_sample
    monkeypatch.setattr(columns, "_as_sample", lambda each: made.append(each) or as_sample(each))
    raw = list(pipeline.batched(50))
    assert sorted(key for batch in raw for key in batch["__key__"]) == [
        f"{number:04}" for number in range(2000)
    ]
    assert set(map(tuple, raw)) == {("__key__", "__url__", "__local_path__", "txt", "cls")}
    assert len(made) <= 4 * 50
    batches = list(pipeline.decode().to_tuple("__key__", "cls", "txt").batched(50))
    assert sorted(key for batch in batches for key in batch[0]) == [
        f"{number:04}" for number in range(2000)
    ]
    assert all(batch[1].tolist() == [7] * 50 and batch[2] == ["7"] * 50 for batch in batches)
    # The first and the last sample of a window may go on in another one.
    assert len(made) <= 8 * 50


def test_rows_with_different_fields_become_samples_once(tmp_path, monkeypatch):
    for part in ("txt", "cls"):
        members = [(f"{number:04}.{part}", b"7") for number in range(1000)]
        (tmp_path / f"{part}.tar").write_bytes(tar_bytes(members))
    made, as_sample = [], columns._as_sample
    monkeypatch.setattr(columns, "_as_sample", lambda each: made.append(each) or as_sample(each))
    shards = str(tmp_path / "{txt,cls}.tar")
    pipeline = wds.WebDataset(shards, shardshuffle=False).shuffle(1000)
    batches = list(pipeline.decode().batched(50, collation_fn=list))
    assert sum(map(len, batches)) == 2000
    rows = [each for each in made if isinstance(each, tuple)]
    assert 0 < len(rows) == len(set(map(id, rows)))


@pytest.mark.parametrize("stages", [[], [wds.shuffle(20)]])
def test_samples_that_a_batch_leaves_to_the_program_are_dicts(tmp_path, stages):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes((f"{number:03}.txt", b"a") for number in range(300)))
    source = wds.tarfile_to_samples()([{"url": str(path)}])
    for stage in stages:
        source = stage(source)
    batch = next(wds.batched(3)(wds.decode()(source)))
    left = list(source)
    assert set(map(type, left)) == {dict}
    assert sorted([*batch["__key__"], *(sample["__key__"] for sample in left)]) == [
        f"{number:03}" for number in range(300)
    ]


def test_tuples_of_the_program_are_no_samples():
    items = [(("txt",), b"a"), (("txt",), b"b")]
    pipeline = wds.DataPipeline(items, wds.shuffle(3), wds.decode(), wds.batched(2))
    with pytest.raises(AttributeError):
        list(pipeline)


def test_positions_are_those_of_stages_one_by_one(tmp_path):
    with wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(300):
            content = b"[1]" if number % 50 else b"damaged"
            writer.write({"__key__": f"{number:03}", "json": content, "txt": "x"})

    def stream():
        pipeline = wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).shuffle(40)
        return (
            pipeline.decode(handler=wds.ignore_and_continue)
            .to_tuple("__key__", "json")
            .batched(8, collation_fn=None)
        )

    whole = list(stream())
    assert sum(map(len, whole)) == 294
    for number in range(0, len(whole), 5):
        pipeline = stream()
        batches = iter(pipeline)
        for _ in range(number):
            next(batches)
        state = json.loads(json.dumps(pipeline.state_dict()))
        resumed = stream()
        resumed.load_state_dict(state)
        assert list(resumed) == whole[number:]


def test_a_sent_column_of_documents_is_a_plain_list_of_the_same_values():
    values = [{"a": [1, None, 2.5, True, "\ud800é", 2**70]}, {}, [], -0.0]
    received = pickle.loads(pickle.dumps(JsonColumn(values)))
    assert type(received) is list
    assert repr(received) == repr(values)
    assert received[0]["a"] is not values[0]["a"]


def test_columns_with_the_same_values_still_have_the_same_after_sending():
    sending = replace(Context(Place()), sends=True)
    items = wds.to_tuple("json", "json", "txt")(wds.decode()(iter(samples(99, 99))))
    batch = next(wds.batched(2).open(items, sending))
    one, other, texts = pickle.loads(pickle.dumps(batch))
    assert one == other == [{"a": [1]}] * 2
    assert one[0] is other[0]
    assert texts == ["é"] * 2


def test_only_the_last_stage_of_what_is_sent_yields_columns_to_be_pickled_as_a_whole():
    loop = wds.DataPipeline(samples(99, 99), wds.decode(), wds.batched(2)).snapshot()
    mapped = wds.DataPipeline(samples(99, 99), wds.decode(), wds.batched(2), wds.map(dict))
    for snapshot, kind in [(loop, JsonColumn), (mapped.snapshot(), list)]:
        for sends in (False, True):
            (batch,) = replace(snapshot, sends=sends).passes(Place(), first=0, count=1)
            assert type(batch["json"]) is (kind if sends else list)
            assert type(batch["txt"]) is list


class FailsOnce:
    """Numbers of which one can only be read at the second attempt, as from an unreliable store."""

    def __init__(self, count, at):
        self.numbers, self.at = iter(range(count)), at
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.at:
            self.at = -1
            raise OSError("not now")
        self.next += 1
        return next(self.numbers)


@pytest.mark.parametrize("count", [7, 600])
def test_a_shuffle_loses_nothing_when_its_source_fails_in_mid_batch(count):
    def batches(source):
        shuffled = wds.shuffle(10, initial=10)(source)
        taken = [next(shuffled)]
        before = 0
        while before < len(taken):
            before = len(taken)
            with suppress(OSError):
                shuffled.take(taken, count)
        return taken

    found = batches(FailsOnce(1000, at=640))
    assert found == batches(iter(range(1000)))
    assert sorted(found) == list(range(1000))


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("odd", [[99, 0, 99, 99], [99, 99], [99, 0, 9]])
@pytest.mark.parametrize("before", [[], [wds.shuffle(2, initial=2)]])
def test_what_fails_first_is_raised_also_if_the_source_fails_in_the_same_batch(
    odd, handler, before
):
    def source():
        yield from samples(*odd)
        raise wds.DecodingError("the source")

    stages = [*before, wds.decode(handler=handler), wds.to_tuple("json"), wds.batched(8)]
    found = [results(stages, source(), separately=each) for each in (False, True)]
    assert found[0] == found[1]
