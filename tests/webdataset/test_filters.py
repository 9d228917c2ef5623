from __future__ import annotations

import gc
import io
import json
import pickle
import threading
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import energon.webdataset as wds
from energon.errors import ConfigError, FieldAccessError, SampleError, SecurityError
from energon.webdataset.autodecode import decoders
from energon.webdataset.stages.mapping import Apply

SAMPLE = {"__key__": "a", "jpg": 1, "seg.png": 2, "cls": None}


def apply(stage, *items):
    return list(stage(iter(items)))


@given(st.lists(st.integers(), unique=True), st.integers(1, 20), st.integers(0, 30))
def test_shuffling_keeps_every_item(items, size, initial):
    shuffled = apply(wds.shuffle(size, initial=initial), *items)
    assert sorted(shuffled) == sorted(items)


def test_shuffling_mixes_as_well_as_a_buffer_of_that_size_can():
    found = Counter()
    for seed in range(300):
        order = apply(wds.shuffle(8, initial=8, seed=seed), *range(8))
        found[order[0]] += 1
    assert min(found.values()) > 15
    assert len(found) == 8


class Item:
    """Something that can be referred to weakly."""


@pytest.mark.parametrize(
    ("stage", "items"),
    [
        (wds.batched(4, collation_fn=None), 4),
        (wds.batched(4, collation_fn=list, partial=False), 4),
        (wds.map(lambda item: [item]), 1),
        (Apply(lambda item: [item]), 1),
    ],
)
def test_what_was_yielded_is_released_before_the_next_items_are_read(stage, items):
    """They reuse its memory."""
    alive, found = weakref.WeakSet(), []

    def source():
        for number in range(20):
            if number % items == 0:
                found.append(len(alive))
            item = Item()
            alive.add(item)
            yield item
            del item

    outputs = stage(source())
    for _ in range(5):
        next(outputs)
    assert found == [0] * 5


def test_shuffling_starts_after_some_items_and_fills_its_buffer_on_the_way():
    taken = []

    def source():
        for item in range(10_000):
            taken.append(item)
            yield item

    shuffled = wds.shuffle(1000, initial=100)(source())
    next(shuffled)
    assert len(taken) == 100
    for _ in range(500):
        next(shuffled)
    assert len(taken) == 1100


def test_choosing_fields():
    assert apply(wds.to_tuple("png;jpg __key__"), SAMPLE) == [(1, "a")]
    with pytest.raises(FieldAccessError, match="'a' has no x or y"):
        apply(wds.to_tuple("x;y"), SAMPLE)
    with pytest.raises(FieldAccessError, match="cls is None"):
        apply(wds.to_tuple("cls"), SAMPLE)
    assert apply(wds.to_tuple("cls", none_is_error=False), SAMPLE) == [(None,)]
    assert apply(wds.to_tuple("x", "jpg", missing_is_error=False), SAMPLE) == [(None, 1)]


def test_renaming_fields():
    renamed = apply(wds.rename(image="png;jpg"), SAMPLE)
    assert renamed == [{"__key__": "a", "seg.png": 2, "cls": None, "image": 1}]
    assert apply(wds.rename(image="jpg", keep=False), SAMPLE) == [{"image": 1}]
    assert apply(wds.rename_keys(("mask", "*.png"), image="jp*"), SAMPLE) == [
        {"image": 1, "mask": 2}
    ]
    kept = apply(wds.rename_keys(image="jpg", keep_unselected=True), SAMPLE)
    assert set(kept[0]) == {"__key__", "image", "seg.png", "cls"}
    with pytest.raises(FieldAccessError, match="no field matches the pattern"):
        apply(wds.rename_keys(image="gif"), SAMPLE)
    with pytest.raises(FieldAccessError, match="two of its fields"):
        apply(wds.rename_keys(image="*"), SAMPLE)


def test_of_fields_that_get_the_same_name_the_first_is_kept_if_that_is_no_error():
    assert apply(wds.rename_keys(image="*g", duplicate_is_error=False), SAMPLE) == [{"image": 1}]


def test_a_pattern_fits_although_another_rule_with_it_wins():
    assert apply(wds.rename_keys(("first", "jpg"), ("last", "jpg")), SAMPLE) == [{"last": 1}]


def test_extracting_fields_by_patterns():
    assert apply(wds.extract_keys("*.png", "*.gif;*.jpg"), SAMPLE) == [(2, 1)]
    with pytest.raises(FieldAccessError, match="matches jpg, seg.png"):
        apply(wds.extract_keys("*g"), SAMPLE)
    with pytest.raises(FieldAccessError, match="no field matches"):
        apply(wds.extract_keys("*.gif"), SAMPLE)
    assert apply(wds.extract_keys("*.gif", "*.jpg", ignore_missing=True), SAMPLE) == [(1,)]


def test_changing_fields():
    assert apply(wds.map_dict(jpg=str), SAMPLE)[0]["jpg"] == "1"
    assert SAMPLE["jpg"] == 1
    with pytest.raises(FieldAccessError, match="no gif"):
        apply(wds.map_dict(gif=str), SAMPLE)
    with pytest.raises(ConfigError, match="at least one field"):
        wds.map_dict()
    assert apply(wds.map_tuple(None, str), (1, 2, 3)) == [(1, "2", 3)]
    with pytest.raises(SampleError, match="put to_tuple before it"):
        apply(wds.map_tuple(str), SAMPLE)
    assert apply(wds.associate({}), SAMPLE) == [SAMPLE]
    assert wds.transform_with([1, 2, 3], [None, str]) == [1, "2", 3]
    assert wds.transform_with((1, 2), None) == [1, 2]


def test_slices_and_random_samples():
    for numbers in ((1, 2, 3, 4), (-3,)):
        with pytest.raises(ConfigError, match=r"slice\(.*\d\): expected a stop, or a start"):
            wds.slice(*numbers)
    kept = apply(wds.rsample(0.3), *range(2000))
    assert 500 < len(kept) < 700


def test_batches_of_tuples_and_dicts():
    batch = wds.default_collation_fn([{"a": torch.ones(2), "b": None}] * 2)
    assert batch["a"].shape == (2, 2)
    assert batch["b"] == [None, None]
    with pytest.raises(SampleError, match="different fields"):
        wds.default_collation_fn([{"a": 1}, {"b": 1}])
    with pytest.raises(SampleError, match="different lengths"):
        wds.default_collation_fn([(1,), (1, 2)])


def test_batching_and_taking_apart():
    assert apply(wds.listed(3, partial=False), *range(7)) == [[0, 1, 2], [3, 4, 5]]
    nested = {"a": [1, 2], "b": {"c": np.array([3, 4])}}
    assert apply(wds.unbatched(), nested) == [{"a": 1, "b": {"c": 3}}, {"a": 2, "b": {"c": 4}}]
    with pytest.raises(SampleError, match="different lengths"):
        apply(wds.unbatched(), ([1], [1, 2]))
    with pytest.raises(SampleError, match="str as column 1"):
        apply(wds.unbatched(), ([1, 2], "ab"))
    with pytest.raises(ConfigError, match="batchsize"):
        wds.batched(0)


def test_looking_at_samples(tmp_path):
    shown = io.StringIO()
    assert apply(wds.info(n=1, stream=shown, name="x"), SAMPLE, SAMPLE) == [SAMPLE, SAMPLE]
    assert "x 0 jpg: 1" in shown.getvalue()
    assert "x 1" not in shown.getvalue()
    apply(wds.log_keys(tmp_path / "log"), SAMPLE, SAMPLE)
    assert (tmp_path / "log").read_text() == "0\t0\t0\ta\n1\t0\t0\ta\n"


def test_decoding_by_patterns():
    sample = {"__key__": "a", "x.txt": b"t", "bin": b"b", "foo": b"3"}
    decode = wds.xdecode(("*.foo", lambda stream: int(stream.read())))
    assert apply(decode, sample) == [{"__key__": "a", "x.txt": "t", "bin": b"b", "foo": 3}]
    with pytest.raises(FieldAccessError, match="nothing decodes 'foo'"):
        apply(wds.xdecode(), sample)
    assert apply(wds.xdecode(must_decode=False), sample)[0]["foo"] == b"3"
    assert apply(wds.xdecode(foo=False), sample)[0]["foo"] == b"3"


def test_items_are_kept_in_memory_or_in_a_file(tmp_path):
    read = []

    def source():
        for item in range(3):
            read.append(item)
            yield item

    for stage in (wds.Cached(), wds.LMDBCached(tmp_path / "cache")):
        read.clear()
        dataset = wds.DataPipeline(source, stage)
        next(iter(dataset))
        assert list(dataset) == list(dataset) == [0, 1, 2]
        assert len(read) <= 5


def test_a_file_of_items_holds_plain_data_unless_objects_are_allowed(tmp_path):
    plain = [{"__key__": "a", "jpg": b"x", "pair": (1, 2.5, None, True), "set": {1}}]
    objects = [{"array": np.arange(3)}]
    for name, items in (("plain", plain), ("objects", objects)):
        list(wds.LMDBCached(tmp_path / name, allow=("pickle",))(items))
    assert list(wds.LMDBCached(tmp_path / "plain")([])) == plain
    # Neither read nor written, whatever calls the file contains.
    for path in ("objects", "new"):
        with pytest.raises(SecurityError, match="which hold a .*ENERGON_ALLOW=pickle"):
            list(wds.LMDBCached(tmp_path / path)(objects))
    (read,) = wds.LMDBCached(tmp_path / "objects", allow=("pickle",))([])
    assert read["array"].tolist() == [0, 1, 2]


def test_a_file_that_is_not_complete_may_be_given_up_in_another_thread(tmp_path):
    kept = wds.LMDBCached(tmp_path / "cache")
    begun = [wds.DataPipeline([1, 2, 3], kept)]
    next(iter(begun[0]))
    thread = threading.Thread(target=lambda: (begun.clear(), gc.collect()))
    thread.start()
    thread.join()
    assert not list(tmp_path.iterdir())


def test_pipelines_need_stages():
    with pytest.raises(ConfigError, match="without stages"):
        list(wds.DataPipeline())


@pytest.mark.parametrize(
    "stage",
    [
        wds.shuffle(3),
        wds.decode("rgb"),
        wds.to_tuple("a"),
        wds.batched(3),
        wds.rename(a="b"),
        wds.SimpleShardList("x.tar"),
        wds.tarfile_to_samples(),
        wds.slice(3),
    ],
)
def test_stages_can_be_pickled_and_describe_themselves(stage):
    copied = pickle.loads(pickle.dumps(stage))
    assert copied.describe() == stage.describe()
    assert stage.describe()["stage"] == type(stage).__name__


def test_shuffle_takes_numbers_of_items_or_false_for_no_buffer():
    assert list(wds.shuffle(False)(range(5))) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="numbers of items"):
        wds.shuffle(True)
    with pytest.raises(ConfigError, match="numbers of items"):
        wds.shuffle(10, initial=-1)


GOOD = {"__key__": "a", "__url__": "x.tar", "json": b'{"a": [1]}', "txt": b"\xc3\xa9", "cls": b"7"}


def test_no_more_samples_are_taken_than_a_batch_needs():
    source = iter([GOOD] * 10)
    batches = wds.batched(3)(wds.to_tuple("txt")(wds.decode()(source)))
    next(batches)
    assert len(list(source)) == 7


def test_functions_that_the_program_registers_are_called_once_for_each_sample():
    calls = []

    def decode(data):
        calls.append(data)
        return len(calls)

    before = decoders["cls"]
    decoders["cls"] = decode
    try:
        batches = wds.batched(4)(wds.to_tuple("cls")(wds.decode()([GOOD] * 4)))
        assert [batch[0].tolist() for batch in batches] == [[1, 2, 3, 4]]
    finally:
        decoders["cls"] = before
    assert len(calls) == 4


def test_the_sample_that_fails_is_named_and_those_before_it_are_not_lost():
    items = [GOOD, GOOD, GOOD, {**GOOD, "__key__": "bad", "json": b"{"}, GOOD]
    batches = wds.batched(2)(wds.decode()(items))
    assert len(next(batches)["txt"]) == 2
    with pytest.raises(wds.DecodingError, match="field 'json' of sample 'bad' of x.tar"):
        next(batches)
    with pytest.raises(FieldAccessError, match="has no png"):
        next(wds.batched(2)(wds.to_tuple("png")(wds.decode()([GOOD]))))


def test_batches_resume_at_any_position_though_samples_fail(tmp_path):
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
