from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from energon.samples.crude import CrudeSample, basic_sample_keys
from energon.samples.display import short_text
from energon.samples.provenance import SourceInfo, add_source_info, get_source_info, sources_of
from energon.samples.sample import Batch, Sample, edataclass
from energon.samples.sample_types import CaptioningSample, TextSample

SOURCE = SourceInfo(dataset_path="/data", index=3, shard_name="a.tar", file_names=("k.txt",))
META = {
    "__key__": "k",
    "__restore_key__": (0, 1, 2),
    "__subflavors__": {"a": 1},
    "__sources__": (SOURCE,),
}


def meta(value):
    return {name: getattr(value, name) for name in META}


@edataclass
class Pair(Batch):
    image: torch.Tensor
    caption: list[str]


@edataclass
class Anything(Sample):
    value: object


@dataclass
class OldStyle(Sample):
    number: int = 0


def captioning(number, height=4):
    return CaptioningSample(
        **{**META, "__key__": str(number)},
        image=torch.full((3, height, 5), float(number)),
        caption=f"c{number}",
    )


def test_samples_keep_what_they_are_derived_from():
    text = TextSample(**META, text="x")
    derived = CaptioningSample.derive_from(text, image=torch.zeros(1), caption="c")
    assert meta(derived) == META
    assert TextSample.extend(text, text="z").text == "z"
    assert TextSample.extend(text).text == "x"


@pytest.mark.parametrize("kind", [CrudeSample, dict])
def test_samples_are_derived_from_dicts(kind):
    crude = kind({**META, "__shard__": "a.tar", "text": "x"})
    for derived in (
        TextSample.derive_from(crude, text="x"),
        TextSample.extend(crude),
        TextSample.from_joined(crude),
    ):
        assert derived == TextSample(**META, text="x")
    few = kind(__key__="k")
    assert TextSample.derive_from(few, text="x") == TextSample(__key__="k", text="x")


def test_joined_samples_take_later_fields_and_the_first_name():
    first, second = TextSample(**META, text="x"), captioning(5)

    @edataclass
    class Joined(TextSample):
        image: torch.Tensor
        caption: str

    joined = Joined.from_joined(first, None, second, caption="mine")
    assert (joined.__key__, joined.text, joined.caption) == ("k", "x", "mine")
    assert joined.image is second.image
    assert joined.__sources__ == (SOURCE, SOURCE)


def test_a_batch_stacks_and_pads_tensors_and_lists_the_rest():
    batch = Pair.from_samples([captioning(0), captioning(1, height=6)])
    assert batch.image.shape == (2, 3, 6, 5)
    assert batch.image[0, :, 4:].sum() == 0
    assert batch.caption == ["c0", "c1"]
    assert batch.__key__ == ["0", "1"]
    assert batch.__subflavors__ == [{"a": 1}, {"a": 1}]
    assert batch.__restore_key__ == ((0, 1, 2), (0, 1, 2))
    assert batch.__restore_key__ in {batch.__restore_key__: "seen"}


def test_falsy_metadata_stays_aligned():
    samples = [TextSample(__key__="a", text="x"), TextSample(**META, text="y")]
    batch = Batch.from_samples(samples)
    assert batch.__subflavors__ == [None, {"a": 1}]


def test_hooks_may_leave_attributes_on_samples_and_batches():
    sample, batch = captioning(0), Pair.from_samples([captioning(0)])
    for made in (sample, batch):
        made.tokens = torch.ones(2)
        assert made.to_device("meta").tokens.device.type == "meta"
        assert pickle.loads(pickle.dumps(made)).tokens.tolist() == [1, 1]
    assert not hasattr(captioning(0), "tokens")


def test_batches_move_with_their_structure():
    batch = Pair.from_samples([captioning(0)]).to_device("cpu")
    assert type(batch) is Pair
    nested = Pair.extend(batch, caption=[{"t": torch.ones(2)}, (torch.ones(1), "x")])
    moved = nested.to_device("meta")
    assert moved.image.device.type == "meta"
    assert moved.caption[0]["t"].device.type == "meta"
    assert moved.caption[1][1] == "x"


def test_samples_and_batches_move_by_the_method_that_trainers_look_for():
    sample = captioning(0)
    for moved in (sample.to("meta"), Pair.from_samples([sample]).to("meta", non_blocking=True)):
        assert moved.image.device.type == "meta"
        assert moved.__sources__ == (SOURCE,)


def test_samples_are_small_and_can_be_pickled():
    sample = captioning(1)
    assert not vars(sample)
    again = pickle.loads(pickle.dumps(sample))
    assert meta(again) == meta(sample)
    assert OldStyle(__key__="a", number=5).number == 5


def test_cooked_samples_take_over_what_names_them():
    crude = CrudeSample({**META, "txt": b"x"})
    other = SourceInfo("/aux", "f", None, ("f",))
    assert basic_sample_keys(crude) == META
    assert basic_sample_keys(crude, [other])["__sources__"] == (SOURCE, other)
    assert basic_sample_keys({"__key__": "a"})["__restore_key__"] == ()


def test_a_crude_sample_says_how_its_parts_are_taken():
    crude = CrudeSample({**META, "jpg": b"x", "txt": b"y"})
    with pytest.raises(
        AttributeError, match=r"no attribute 'image'; its parts are jpg, txt.*\[part"
    ):
        _ = crude.image
    assert not hasattr(crude, "pin_memory")
    assert pickle.loads(pickle.dumps(crude)) == crude


def test_sources_are_noted_on_dicts_and_objects():
    for sample in (CrudeSample({"__key__": "a"}), TextSample(__key__="a", text="")):
        assert not get_source_info(sample)
        add_source_info(sample, SOURCE)
        add_source_info(sample, SOURCE)
        assert get_source_info(sample) == (SOURCE, SOURCE)


def test_the_source_of_a_sample_is_like_any_other():
    raw = {
        "__key__": "a/7",
        "__shard__": "0.tar",
        "__restore_key__": (1, 2, 3),
        "jpg": b"",
        "Txt": b"",
    }
    (source,) = sources_of("ds", raw)
    plain = SourceInfo("ds", 3, "0.tar", ("a/7.jpg", "a/7.Txt"))
    raw.clear()
    assert source == plain
    assert plain == source
    assert hash(source) == hash(plain)
    assert repr(source) == repr(plain)
    assert isinstance(source, SourceInfo)
    assert pickle.loads(pickle.dumps(source)) == plain
    assert copy.deepcopy(source) == plain
    assert dataclasses.replace(source, index=4) == dataclasses.replace(plain, index=4)
    assert dataclasses.asdict(source) == dataclasses.asdict(plain)
    assert source != dataclasses.replace(plain, shard_name="1.tar")


def test_prints_one_short_line():
    images = np.zeros((64, 3, 200, 300), np.float32)
    keys = [f"{number:06d}" for number in range(64)]
    sample = CaptioningSample(
        __key__=keys,
        __sources__=(SourceInfo("ds", 0, "a.tar", ("x",)),) * 64,
        image=images,
        caption=["long " * 1000] * 64,
    )
    text = str(sample)
    assert text.startswith("CaptioningSample(__key__=['000000', '000001',")
    assert "image=ndarray (64, 3, 200, 300) float32" in text
    assert "\n" not in text
    assert len(text) < 2000
    assert repr(TextSample(__key__="a", text="b")) == "TextSample(__key__='a', text='b')"


def test_prints_parts_in_lists_and_bytes_by_their_size():
    sample = Anything(__key__="a", value=[np.zeros((2, 3)), b"x" * 1000])
    assert str(sample) == (
        "Anything(__key__='a', value=[ndarray (2, 3) float64, "
        "1000 bytes that begin with b'xxxxxxxxxxxxxxxx'])"
    )


def test_classes_with_their_own_text_keep_it():
    @edataclass
    class Own(Anything):
        def __repr__(self):
            return "own"

    @edataclass
    class Derived(Own):
        other: int = 0

    assert repr(Own(__key__="a", value=1)) == repr(Derived(__key__="a", value=1)) == "own"


def test_the_text_of_a_plain_batch_is_short_and_names_all_fields():
    fields = {f"part{n}": [bytes(1_000_000)] * 64 for n in range(9)}
    batch = {
        **META,
        "image": torch.zeros(64, 3, 200, 200),
        "caption": ["long " * 99] * 64,
        **fields,
    }
    text = short_text(batch)
    assert len(text) < 4_000
    assert "\n" not in text
    assert "'image': Tensor (64, 3, 200, 200) torch.float32" in text
    assert all(name in text for name in fields)
    assert "__restore_key__" not in text
