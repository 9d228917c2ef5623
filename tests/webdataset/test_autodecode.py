from __future__ import annotations

import gzip
import io
import json
import pickle
import sys
import wave
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.utils.data

import energon.webdataset as wds
from energon.errors import ConfigError, SecurityError
from energon.webdataset.autodecode import Decoder


def decode(fields, *args, **options):
    return Decoder(*args, **options)({"__key__": "a", "__url__": "u.tar", **fields})


def test_fields_are_decoded_by_extension_and_others_stay_bytes():
    found = decode({"txt": b"t", "x.cls": b" 7\n", "json": b"null", "foo": b"x", "__x__": b"m"})
    assert found == {
        "__key__": "a",
        "__url__": "u.tar",
        "txt": "t",
        "x.cls": 7,
        "json": None,
        "foo": b"x",
        "__x__": "m",
    }


def test_metadata_that_is_no_text_stays_as_it_is():
    assert decode({"__raw__": b"\xff\x00"})["__raw__"] == b"\xff\x00"


def test_packed_fields_are_unpacked_first_and_keep_their_names():
    packed = gzip.compress(json.dumps([1]).encode())
    assert decode({"json.gz": packed})["json.gz"] == [1]
    assert decode({"gz": gzip.compress(b"x")})["gz"] == b"x"
    assert decode({"json.gz": packed}, pre=[])["json.gz"] == packed


@pytest.mark.parametrize(
    ("spec", "fitting"),
    [
        ("png", {"png", "seg.png"}),
        ("seg.png", {"seg.png"}),
        (".png", {"png"}),
        ("PNG txt", {"png", "seg.png", "txt"}),
    ],
)
def test_extensions_of_handlers(spec, fitting):
    handler = wds.handle_extension(spec, lambda data: "handled")
    found = decode(dict.fromkeys(("png", "seg.png", "txt"), b"x"), handler, post=[])
    assert {name for name, value in found.items() if value == "handled"} == fitting


def test_fields_that_are_decoded_already():
    with pytest.raises(wds.DecodingError, match="decoded twice"):
        decode({"cls": 1})
    assert decode({"cls": 1}, partial=True)["cls"] == 1


def test_unknown_specifications_are_errors():
    with pytest.raises(ConfigError, match="torchrgb"):
        Decoder("RGB")
    with pytest.raises(ConfigError, match="names of what images"):
        Decoder(5)


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of the data was run')",)


@pytest.mark.parametrize("field", ["pyd", "pkl", "x.pickle", "pth"])
def test_no_code_of_the_data_is_run(field):
    with pytest.raises(SecurityError, match="ENERGON_ALLOW=pickle"):
        decode({field: pickle.dumps(Evil()) if field != "pth" else _saved(Evil())})


def test_tensors_of_objects_are_decoded_where_pickles_are_allowed(monkeypatch):
    monkeypatch.setenv("ENERGON_ALLOW", "pickle")
    assert wds.autodecode.torch_loads(_saved({1, 2})) == {1, 2}


def test_permission_travels_with_the_pipeline(monkeypatch):
    monkeypatch.setenv("ENERGON_ALLOW", "pickle")
    decoder = Decoder()
    monkeypatch.delenv("ENERGON_ALLOW")
    copied = pickle.loads(pickle.dumps(decoder))
    assert copied({"__key__": "a", "pyd": pickle.dumps(3)})["pyd"] == 3


def test_unknown_permissions_are_errors():
    with pytest.raises(ConfigError, match="is not one of"):
        Decoder(allow=("everything",))


def test_audio():
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(8000)
        out.writeframes(np.arange(0, 16000, 2, dtype=np.int16).tobytes())
    samples, rate = decode({"wav": file.getvalue()}, wds.torch_audio)["wav"]
    assert rate == 8000
    assert samples.shape == (1, 8000)
    assert torch.allclose(samples[0, 1], torch.tensor(2 / 32768))


def test_audio_is_decoded_with_torchaudio_where_it_is_installed(monkeypatch):
    torchaudio = ModuleType("torchaudio")
    torchaudio.load = lambda file: (file.read(), 16000)
    monkeypatch.setitem(sys.modules, "torchaudio", torchaudio)
    assert decode({"wav": b"audio"}, wds.torch_audio)["wav"] == (b"audio", 16000)


def test_an_error_of_a_loaders_worker_is_raised_again_with_its_message(tmp_path):
    with wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "a", "png": b"damaged"})
    dataset = wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode("rgb")
    with pytest.raises(wds.DecodingError) as caught:
        [*torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1)]
    assert str(caught.value).startswith("Caught DecodingError in DataLoader worker process 0")
    assert "field 'png' of sample 'a'" in str(caught.value)


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2.5, null, true]}',
        ' {"a": 1}\n\n',
        "[1]\r\n",
        '"\u00e4\u20ac"',
        "-1.5e3",
        "NaN",
        "false",
        "[1] x",
        "nulls",
        "",
        "{",
        "[1]\u00a0",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
def test_json_is_what_json_says_in_every_encoding(text, encoding):
    data = text.encode(encoding)
    try:
        expected = repr(json.loads(data))
    except ValueError:
        expected = None
    if expected is None:
        with pytest.raises(wds.DecodingError, match="field 'json' of sample 'a'"):
            decode({"json": data})
    else:
        assert repr(decode({"json": data})["json"]) == expected


def test_handlers_of_a_program_decide_for_themselves():
    class Lenient(wds.ImageHandler):
        def __call__(self, key, data):
            return "image" if key == ".png" else None

    unwrap = wds.handle_extension("wrap", lambda data: wds.Continue(".cls", data[1:]))
    decoded = wds.Decoder([Lenient("rgb"), unwrap])(
        {"png": b"none", "wrap": b"x7", "json": b"null"}
    )
    assert decoded == {"png": "image", "wrap": 7, "json": None}


def test_all_names_of_filters_are_imported_with_a_star():
    names = {}
    exec("from energon.webdataset.filters import *", names)
    assert {"Cached", "LMDBCached", "getfirst", "detshuffle", "pipelinefilter", "map"} <= set(names)
