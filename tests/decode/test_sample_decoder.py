from __future__ import annotations

import ast
import gzip
import io
import json
import pickle

import cbor2
import msgpack
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from energon.decode.images import RandomResizedCrop
from energon.decode.sample_decoder import SampleDecoder
from energon.decode.values import decode_tenbin, encode_tenbin
from energon.errors import ConfigError, DecodeError, SecurityError, SkipSample
from energon.samples.crude import CrudeSample
from tests.commands import run_python
from tests.datasets import jpeg
from tests.media_files import saved

VALUE = {"a": [1, 2.5, "ü", None, True]}
ARRAY = np.arange(6, dtype=np.int16).reshape(2, 3)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("k.txt", "grüß".encode(), "grüß"),
        ("k.transcript", b"x", "x"),
        ("k.cls", b" 12\n", 12),
        ("k.index", b"7", 7),
        ("k.json", json.dumps(VALUE).encode(), VALUE),
        ("k.detail.JSON", b"[1]", [1]),
        ("k.mp", msgpack.packb(VALUE), VALUE),
        ("k.cbor", cbor2.dumps(VALUE), VALUE),
        ("k.txt.gz", gzip.compress(b"text", mtime=0), "text"),
        ("k.gz", gzip.compress(b"bytes", mtime=0), b"bytes"),
        ("k.unknown", b"raw", b"raw"),
    ],
)
def test_parts_are_decoded_by_extension(name, data, expected):
    assert SampleDecoder().decode(name, data) == expected


@pytest.mark.parametrize("array", [ARRAY, np.asfortranarray(ARRAY), np.float64(3), ARRAY[:0]])
def test_arrays_are_decoded(array):
    found = SampleDecoder().decode("k.npy", saved(np.save, array))
    assert found.dtype == np.asarray(array).dtype
    assert np.array_equal(found, array)
    packed = SampleDecoder().decode("k.npz", saved(np.savez, x=array))
    assert np.array_equal(packed["x"], array)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=4,
    )
)
def test_tenbin_reads_what_it_writes(about):
    arrays = [np.arange(np.prod(shape), dtype=code).reshape(shape) for code, shape in about]
    found = decode_tenbin(encode_tenbin(arrays))
    assert [(a.dtype, a.tolist()) for a in found] == [(a.dtype, a.tolist()) for a in arrays]


def test_a_tenbin_has_the_bytes_that_webdataset_writes():
    data = encode_tenbin([np.array([1, 2], np.uint8)])
    assert data == (
        b"~TenBin~\x20\0\0\0\0\0\0\0u1\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
        b"\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"
        + bytes(32)
        + b"~TenBin~\x02\0\0\0\0\0\0\0\x01\x02"
        + bytes(62)
    )


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("k.txt", b"\xff\xfe"),
        ("k.cls", b"cat"),
        ("k.json", b"{"),
        ("k.npy", b"no array"),
        ("k.npy", saved(np.save, ARRAY)[:-1]),
        ("k.npy", saved(np.save, np.array([{}]), allow_pickle=True)),
        ("k.npz", b"PK"),
        ("k.mp", b"\xc1"),
        ("k.cbor", b"\xff"),
        ("k.txt.gz", gzip.compress(b"text", mtime=0)[:-3]),
        ("k.ten", encode_tenbin([ARRAY])[:-64]),
        ("k.ten", b"~TenBin~" + b"\xff" * 8),
        ("k.jpg", jpeg(0)[:100]),
        ("k.png", b"no image"),
    ],
)
def test_damaged_parts_are_errors_that_name_them(name, data):
    with pytest.raises(DecodeError, match=name.removesuffix(".gz")):
        SampleDecoder().decode(name, data)


def test_pickled_parts_are_only_unpickled_where_that_is_allowed(monkeypatch):
    data = pickle.dumps(VALUE)
    for name in ("k.pkl", "k.pyd", "k.pickle", "k.pth"):
        with pytest.raises(SecurityError, match="ENERGON_ALLOW=pickle"):
            SampleDecoder().decode(name, data)
    assert SampleDecoder(allow=("pickle",)).decode("k.pkl", data) == VALUE
    monkeypatch.setenv("ENERGON_ALLOW", "pickle")
    tensor = saved(lambda file: torch.save(torch.ones(2), file))
    assert SampleDecoder().decode("k.pth", tensor).tolist() == [1, 1]


def test_samples_keep_their_type_and_what_is_about_them():
    sample = CrudeSample({"__key__": "a/b", "__restore_key__": (1,), "txt": b"x", "jpg": jpeg(0)})
    decoded = SampleDecoder()(sample)
    assert type(decoded) is CrudeSample
    assert decoded["__restore_key__"] == (1,)
    assert decoded["txt"] == "x"
    assert decoded["jpg"].shape == (3, 8, 12)
    assert decoded["jpg"].dtype == torch.float32
    assert sample["txt"] == b"x"
    with pytest.raises(DecodeError, match=r"a/b\.json"):
        SampleDecoder()({"__key__": "a/b", "json": b"{"})


def test_images_may_be_recognised_by_their_content():
    decoder = SampleDecoder(image_decode="rgb8", guess_content=True)
    assert decoder.decode("k.dat", jpeg(0)).shape == (8, 12, 3)
    assert decoder.decode("k.dat", b"RIFFxxxxCDXA") == b"RIFFxxxxCDXA"


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigError, match="image_decode='RGB'"):
        SampleDecoder(image_decode="RGB")
    with pytest.raises(ConfigError, match="'png': 3"):
        SampleDecoder(decoders={"png": 3})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k.csv", ["1", "2"]),
        ("a.b/k.CSV", ["1", "2"]),
        ("k.seg.csv", b"1,2"),
        ("k.left.seg.csv", b"1,2"),
        ("k.csv.gz", ["1", "2"]),
        ("k.txt", "1,2"),
        ("csv", b"1,2"),
    ],
)
def test_parts_are_decoded_by_functions_of_the_user(name, value):
    own = {".csv": lambda data: data.decode().split(","), "seg.csv": None}
    data = gzip.compress(b"1,2", mtime=0) if name.endswith("gz") else b"1,2"
    assert SampleDecoder(decoders=own).decode(name, data) == value


def test_functions_of_the_user_come_before_all_else():
    decoder = SampleDecoder(guess_content=True, decoders={"jpg": None, "txt": len})
    sample = {"jpg": jpeg(0), "txt": b"\xff\xff"}
    assert decoder(sample) == {"jpg": jpeg(0), "txt": 2}
    assert hash(decoder) == hash(pickle.loads(pickle.dumps(decoder)))


def test_failures_of_the_users_functions_are_told_apart_from_faults_of_the_program():
    def fail(data):
        return data[9]

    def misspell(data):
        return dta  # noqa: F821

    def skip(data):
        raise SkipSample

    with pytest.raises(DecodeError, match=r"k\.x: the decoder of \.x parts failed: IndexError"):
        SampleDecoder(decoders={"x": fail}).decode("k.x", b"")
    with pytest.raises(NameError, match="dta"):
        SampleDecoder(decoders={"x": misspell}).decode("k.x", b"")
    with pytest.raises(SkipSample):
        SampleDecoder(decoders={"x": skip}).decode("k.x", b"")


def test_a_missing_module_is_no_fault_of_the_data_but_missing_memory_is():
    def unpickled(error):
        return pickle.dumps(Raising(error))

    decoder = SampleDecoder(allow=("pickle",), decoders={"mine": pickle.loads})
    with pytest.raises(ModuleNotFoundError):
        decoder.decode("k.pkl", unpickled(ModuleNotFoundError("no such module")))
    for name in ("k.pkl", "k.mine"):
        for error in (MemoryError(), RecursionError()):
            with pytest.raises(DecodeError, match=type(error).__name__):
                decoder.decode(name, unpickled(error))


class Raising:
    """Raises an error where it is unpickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return raise_again, (self.error,)


def raise_again(error):
    raise error


WITHOUT_TORCH = """
import sys, zlib; sys.modules["torch"] = None
from importlib import util; find = util.find_spec
util.find_spec = lambda name, *a: None if name == "torch" else find(name, *a)
from energon.decode.sample_decoder import SampleDecoder
images = [SampleDecoder(spec, image_size=size).decode(name, data)
    for spec in SPECS for size in (None, 6) for name, data in FILES]
assert {type(image).__module__ for image in images} == {"numpy"}
print([(image.shape, str(image.dtype), float(image.mean())) for image in images])
"""


def test_the_layout_of_images_does_not_depend_on_whether_torch_is_installed():
    specs = ["torchrgb", "torchrgb8", "torchl8", "torchrgba", "torch", "rgb", "rgb8", "l"]
    png = io.BytesIO()
    Image.new("RGB", (7, 9), (3, 200, 90)).save(png, "PNG")
    files = [("k.jpg", jpeg(0)), ("k.png", png.getvalue())]
    program = f"SPECS, FILES = {specs!r}, {files!r}\n{WITHOUT_TORCH}"
    result = run_python(program)
    images = [
        np.asarray(SampleDecoder(spec, image_size=size).decode(name, data))
        for spec in specs
        for size in (None, 6)
        for name, data in files
    ]
    found = ast.literal_eval(result.stdout)
    assert [each[:2] for each in found] == [(image.shape, str(image.dtype)) for image in images]
    for (_, dtype, mean), image in zip(found, images, strict=True):
        # Pillow and torch round differently when they scale.
        assert abs(mean - image.mean()) <= (1 if dtype == "uint8" else 1 / 255)
    assert np.asarray(SampleDecoder().decode("k.jpg", jpeg(0))).shape == (3, 8, 12)


@pytest.mark.parametrize(
    "changed",
    [
        {"image_size": 16},
        {"min_size": 8},
        {"max_enlargement": 1.1},
        {"exact_resize": True},
        {"random_resized_crop": True},
        {"random_resized_crop": RandomResizedCrop(scale=(0.5, 1.0))},
        {"decoders": {"jpg": None}},
        {"decoders": {"csv": len}},
    ],
)
def test_the_description_shows_each_setting_that_changes_values(changed):
    basis = {} if "min_size" in changed else {"image_size": (24, 24)}
    before, after = (SampleDecoder(**each).config() for each in (basis, {**basis, **changed}))
    assert json.loads(json.dumps(before)) != json.loads(json.dumps(after))


def test_settings_that_mean_the_same_are_described_alike():
    one = SampleDecoder(image_size=24, random_resized_crop=True)
    other = SampleDecoder(image_size=(24, 24), random_resized_crop=RandomResizedCrop())
    assert one.config() == other.config()


@pytest.mark.parametrize("name", ["aif", "aiff", "AIFC"])
def test_aiff_is_audio(name):
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(800), 8000, format="AIFF", subtype="FLOAT")
    decoder = SampleDecoder()({name: buffer.getvalue()})[name]
    assert decoder.get_metadata().audio_duration == 0.1
