from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, DecodeError, FieldAccessError
from energon.samples.crude import CrudeSample
from energon.samples.field_map import FieldMap
from energon.samples.sample_types import CaptioningSample, VQASample
from tests.datasets import jpeg


def test_values_are_found_in_parts_and_below_them():
    field_map = FieldMap.parse({"a": "txt", "b": "json[boxes][0]", "c": "left.json[x][-1][y]"})
    parts = {
        "txt": "text",
        "json": {"boxes": [1, 2]},
        "left.json": {"x": [{}, {"y": 5}]},
    }
    assert field_map.apply(parts) == {"a": "text", "b": 1, "c": 5}
    assert field_map.parts == {"txt", "json", "left.json"}


def test_the_first_alternative_that_is_there_counts():
    field_map = FieldMap.parse({"image": "jpg, png,webp"})
    assert field_map.apply({"png": 1, "webp": 2}) == {"image": 1}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({}, "no part 'json' for the field 'x': of the mapped parts the sample has none"),
        ({"txt": ""}, "of the mapped parts the sample has only txt"),
        ({"json": {}}, "field 'x' is mapped to json[a][0][b], but json has no keys, no [a]"),
        ({"json": {"c": 1, "d": 2}}, "json has only the keys c, d, no [a]"),
        ({"json": {"a": []}}, "json[a] is a list of 0, no [0]"),
        ({"json": {"a": {"0": 1}}}, "json[a][0] is of type int, no [b]"),
        ({"json": "text"}, "json is of type str, no [a]"),
    ],
)
def test_what_is_not_there_is_an_error_that_says_where_the_way_ends(parts, reason):
    field_map = FieldMap.parse({"x": "json[a][0][b]"})
    with pytest.raises(FieldAccessError) as caught:
        field_map.apply({"__key__": "k", **parts})
    assert str(caught.value).startswith("sample 'k': ")
    assert reason in str(caught.value)


def test_fields_must_be_those_of_the_sample_type():
    FieldMap.parse({"image": "jpg", "caption": "txt"}).check(CaptioningSample)
    FieldMap.parse({"image": "jpg", "context": "txt"}).check(VQASample)
    with pytest.raises(ConfigError, match="did you mean 'caption'"):
        FieldMap.parse({"image": "jpg", "captions": "txt"}).check(CaptioningSample)
    with pytest.raises(ConfigError, match="needs the field 'caption'"):
        FieldMap.parse({"image": "jpg"}).check(CaptioningSample)


@pytest.mark.parametrize("text", ["", "json[", "json[]", "a,,b", "[a]", "json[a]b", 5])
def test_malformed_maps_are_refused(text):
    with pytest.raises(ConfigError, match="field_map: 'x'"):
        FieldMap.parse({"x": text})


ENTRIES = {
    "__key__": "a",
    "__shard__": "0.tar",
    "__restore_key__": (0, 0, 1),
    "__subflavors__": None,
    "__sources__": (),
}
PARTS = {
    "txt": st.sampled_from([b"text", b"\xff", "decoded"]),
    "TXT": st.just(b"capitals"),
    "count": st.sampled_from([b"1", b"one", 1]),
    "json": st.sampled_from([b'{"a": 1}', b"{"]),
}


@given(
    parts=st.fixed_dictionaries({}, optional=PARTS),
    mapped=st.sampled_from(
        [{"a": "txt", "b": "count"}, {"a": "txt", "b": "txt"}, {"a": "txt", "b": "json,count"}]
    ),
)
@settings(max_examples=200, deadline=None)
def test_decoding_part_by_part_makes_what_decoding_everything_first_makes(parts, mapped):
    decoder, field_map = SampleDecoder(), FieldMap.parse(mapped)
    make = field_map.maker(dict, decoder)
    quick = field_map.decoding_maker(dict, decoder.of_part, entries=len(ENTRIES), make=make)
    assert quick is not make
    sample = CrudeSample({**ENTRIES, **parts})

    def outcome(make):
        try:
            return make(sample)
        except (DecodeError, FieldAccessError) as error:
            return type(error), str(error)

    assert outcome(quick) == outcome(make)
    assert sample == {**ENTRIES, **parts}


@pytest.mark.parametrize("settings", [{}, {"image_size": 5}], ids=["whole", "resized"])
def test_images_are_decoded_part_by_part_too(settings):
    decoder, field_map = SampleDecoder("rgb8", **settings), FieldMap.parse({"a": "jpg"})
    make = field_map.maker(dict, decoder)
    quick = field_map.decoding_maker(dict, decoder.of_part, entries=len(ENTRIES), make=make)
    assert quick is not make
    whole, broken = (CrudeSample({**ENTRIES, "jpg": data}) for data in (jpeg(0), jpeg(0)[:99]))
    made = [each(whole)["a"] for each in (quick, make)]
    assert np.array_equal(*made)
    for each in (quick, make):
        with pytest.raises(DecodeError, match="a.jpg: "):
            each(broken)


@pytest.mark.parametrize(
    ("decoder", "mapped"),
    [
        (SampleDecoder(), {"a": "mp4"}),
        (SampleDecoder(), {"a": "unknown"}),
        (SampleDecoder(image_size=8, random_resized_crop=True), {"a": "jpg"}),
        (SampleDecoder(), {"a": "json[x]"}),
        (SampleDecoder(decoders={"txt": bytes.upper}), {"a": "txt"}),
        (SampleDecoder(guess_content=True), {"a": "txt"}),
        (type("Own", (SampleDecoder,), {})(), {"a": "txt"}),
    ],
)
def test_parts_whose_names_do_not_say_how_they_are_decoded_are_decoded_by_the_decoder(
    decoder, mapped
):
    field_map = FieldMap.parse(mapped)
    make = field_map.maker(dict, decoder)
    assert field_map.decoding_maker(dict, decoder.of_part, entries=4, make=make) is make
