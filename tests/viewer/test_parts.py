"""What pages make of parts that are out of the ordinary."""

from __future__ import annotations

import gzip
import io
import json
import re

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from energon.prepare.dataset import prepare_dataset
from energon.viewer.app import make_app
from energon.viewer.shown import Shown
from tests.datasets import jpeg, write_shard
from tests.viewer.pages import browse


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.fixture
def show(tmp_path):
    """Returns a client that shows one sample with these parts, and the text of its page."""

    def make(**settings):
        parts = settings.pop("parts")
        write_shard(tmp_path / "ds/0.tar", [("a", parts)])
        prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
        client = browse(tmp_path / "ds", **settings)
        return client, client.get("/s/0/0/0").text

    return make


def pixels(client, address):
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    return np.asarray(Image.open(io.BytesIO(answer.content)).convert("L")).astype(int)


@pytest.mark.parametrize(("extension", "kind"), [("png", "PNG"), ("tiff", "TIFF")])
def test_images_of_16_bits_are_shown_from_their_darkest_to_their_brightest_pixel(
    show, extension, kind
):
    depth = np.repeat(np.linspace(1000, 3000, 90), 60).reshape(90, 60).astype(np.uint16)
    client, text = show(parts={extension: encoded(Image.fromarray(depth), kind)})
    (address,) = re.findall(r'<img src="(.*?)"', text)
    for image in (pixels(client, address), pixels(client, "/s/0/0/0/thumb/0")):
        assert image.shape == (90, 60)
        assert image[0].max() < 8
        assert image[-1].min() > 247
        assert abs(image[45].mean() - 128) < 8


def test_what_exif_says_of_orientation_is_named_and_not_done(show):
    """Loaders do not turn images: what they get is what is to be seen."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(np.zeros((30, 60, 3), np.uint8))
    client, text = show(parts={"jpg": encoded(image, "JPEG", exif=exif.tobytes())})
    assert "60 x 30 pixels" in text
    assert "shown as stored, which is how loaders decode it" in text
    assert pixels(client, "/s/0/0/0/thumb/0").shape == (30, 60)
    assert "image-orientation: none" in client.get("/static/view.css").text


def test_an_image_that_is_cut_off_says_so_beside_what_browsers_draw_of_it(show):
    _, text = show(parts={"jpg": jpeg(0, size=(200, 200))[:1500]})
    assert "not a complete image" in text
    assert '<img src="/s/0/0/0/raw/0"' in text


def test_parts_without_content_are_called_empty(show):
    names = ("txt", "json", "npy", "png", "wav", "mp4", "msg", "bin", "cls")
    _, text = show(parts=dict.fromkeys(names, b""))
    assert text.count("empty: 0 bytes") == len(names)


def test_an_image_like_a_line_is_shown_in_full_size(show):
    wide = Image.new("RGB", (4000, 3))
    _, text = show(
        parts={"png": encoded(wide, "PNG"), "b.png": encoded(wide.resize((9, 9)), "PNG")}
    )
    assert re.findall(r'class="zoom (\w*)"', text) == ["full", ""]


def test_only_what_moves_has_frames(show):
    frames = [Image.new("L", (8, 8), n) for n in (0, 99)]
    moving = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    _, text = show(parts={"gif": moving, "b.gif": encoded(frames[0], "GIF")})
    assert text.count("several; loaders decode the first") == 1


def test_values_stand_beside_their_names(show):
    _, text = show(parts={"json": json.dumps({"a": {"b": 1}, "c": [1, 2], "<d>": 3}).encode()})
    tree = re.sub(r"</?(?:ul|li|details[^>]*|b|span[^>]*)>", "", text)
    for line in ("3 keys", "a: 1 key", "b: 1", "c: 2 values", "&lt;d&gt;: 3"):
        assert line in tree


def test_tokens_are_text_and_what_lies_beside_them_is_numbers(show):
    tokens = np.frombuffer(b"some text", np.uint8).astype(np.int32)
    parts = {"tokens.npy": npy(tokens), "cu_seqlens.npy": npy(np.array([0, 9], np.int32))}
    client, text = show(parts=parts, tokenizer=lambda ids: "".join(map(chr, ids)))
    assert "".join(re.findall(r'<span title="\d+">(.)</span>', text)) == "some text"
    assert "tokens: some text" in client.get("/s/0/0").text


def test_a_gallery_knows_the_shape_of_arrays_that_are_too_large_to_be_read_for_it(show):
    client, _ = show(parts={"npy": npy(np.zeros((90, 300), np.float32))})
    assert "90 x 300 float32" in client.get("/s/0/0").text


def test_data_that_cannot_be_read_are_a_page_and_no_traceback(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text("{}\n")
    # Raises whatever a server would log as a fault of its own.
    client = TestClient(make_app(Shown(file)), base_url="http://localhost")
    answer = client.get("/s/0/0")
    assert answer.status_code == 404
    assert "The dataset cannot be opened" in answer.text
    assert "energon prepare" in answer.text
    assert "energon prepare" in client.get("/").text


def test_what_no_page_has_is_named(tmp_path, show):
    client, _ = show(parts={"txt": b"x"})
    assert "There is no page at /nothing" in client.get("/nothing").text
    assert 'href="/s/0/0" rel="up"' in client.get("/s/0/0?from=x").text


def test_a_filter_by_a_part_that_there_is_not_names_those_that_there_are(show):
    client, _ = show(parts={"txt": b"x", "json": b"{}"})
    text = client.get("/s/0/0?where=has:jgp").text
    named = re.search("Conditions on these data can use (.*?)</p>", text)
    assert sorted(named[1].split(", ")) == ["json.size", "txt.length", "txt.size"]


def test_media_that_are_gzipped_have_no_thumbnails(show):
    image = encoded(Image.new("RGB", (9, 9)), "PNG")
    client, text = show(parts={"png.gz": gzip.compress(image), "txt": b"a square"})
    assert "<img" not in text
    gallery = client.get("/s/0/0").text
    assert "a square" in gallery
    assert "thumb" not in gallery
