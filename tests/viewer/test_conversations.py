"""Conversations are shown as chats, wherever their images, sounds and videos are."""

from __future__ import annotations

import base64
import copy
import html
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon.prepare.dataset import prepare_dataset
from energon.prepare.jsonl import prepare_jsonl
from tests.datasets import jpeg, write_shard
from tests.viewer.pages import browse
from tests.viewer.showcase import tone

NAME = "photos/17.jpg"
ASKED, SAID = "What is in the picture?", "A grey square, as far as I can tell."


def talk(question, answer=SAID, role="role", content="content", who=("user", "assistant")):
    return [{role: who[0], content: question}, {role: who[1], content: answer}]


def typed(**medium):
    return {"messages": talk([medium, {"type": "text", "text": ASKED}])}


MARKED = f"<image>\n{ASKED}"
FORMS = {
    "marked": {"messages": talk(MARKED), "images": [NAME]},
    "image_url": typed(type="image_url", image_url={"url": NAME}),
    "by type": {**typed(type="image"), "images": [NAME]},
    "qwen": typed(type="image", image=NAME),
    "llava": {
        "image": NAME,
        "conversations": talk(MARKED, SAID, "from", "value", ("human", "gpt")),
    },
    "sides": {"images": [NAME], "texts": [{"user": MARKED, "assistant": SAID, "source": "x"}]},
}


def chat(page):
    """Return who said what: texts, and the addresses of media."""
    (turns,) = re.findall(r'<ol class="turns">(.*?)</ol>', page, re.DOTALL)
    return [
        (
            re.search(r"<b>(.*?)</b>", turn)[1],
            [
                html.unescape(text) or address
                for text, address in re.findall(
                    r'<p>(.*?)</p>|<(?:img|audio|video)[^>]*? src="(.*?)"', turn
                )
            ],
        )
        for turn in re.findall(r"<li.*?</li>", turns, re.DOTALL)
    ]


def jsonl(path, *samples):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    prepare_jsonl(path)
    return path


def photo(folder):
    (folder / "photos").mkdir(parents=True)
    (folder / NAME).write_bytes(jpeg(0))


def beside(folder, sample):
    photo(folder)
    return jsonl(folder / "talks.jsonl", sample)


def in_a_store(folder, sample):
    """A blend names the folder of the images."""
    photo(folder / "elsewhere")
    jsonl(folder / "talks/a.jsonl", sample)
    blend = folder / "blend.yaml"
    blend.write_text(
        "splits:\n  train: {path: talks/a.jsonl, aux: {images: filesystem://elsewhere}}\n"
    )
    return blend


def in_shards(folder, sample):
    write_shard(folder / "0.tar", [("a", {"jpg": jpeg(0), "json": json.dumps(sample).encode()})])
    prepare_dataset(folder, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    return folder


def in_a_table(folder, sample):
    """Images as Hugging Face `datasets` writes them."""
    sample = copy.deepcopy(sample)
    columns = {name: [value] for name, value in sample.items() if name[:5] != "image"}
    asked, said = sample.get("messages", ({}, {}))
    if isinstance(asked.get("content"), list):  # the values of a column have one type
        said["content"] = [{"type": "text", "text": said["content"]}]
    columns["images"] = [[{"bytes": jpeg(0), "path": NAME}]]
    pq.write_table(pa.table(columns), folder / "talks.parquet")
    return folder / "talks.parquet"


# A column of messages and one of images belong together by their order, not by names.
NAMING = ("image_url", "qwen")
CASES = [
    (form, place)
    for place in (beside, in_a_store, in_shards, in_a_table)
    for form in FORMS
    if place is not in_a_table or form not in NAMING
]


@pytest.mark.parametrize(("form", "place"), CASES)
def test_messages_of_any_form_are_a_chat_with_its_image(tmp_path, form, place):
    client = browse(place(tmp_path, FORMS[form]))
    (first, asked), (second, said) = chat(client.get("/s/0/0/0").text)
    assert (first, second) in [("user", "assistant"), ("human", "gpt")]
    assert (asked[1], said) == (ASKED, [SAID])
    assert client.get(asked[0]).content == jpeg(0)
    gallery = client.get("/s/0/0").text
    assert html.escape(SAID) in gallery
    assert ASKED not in gallery
    (thumbnail,) = re.findall(r'src="(.*?/thumb/\d+)"', gallery)
    assert client.get(thumbnail).headers["content-type"] == "image/jpeg"


def test_images_in_an_address_and_sounds_are_part_of_a_chat(tmp_path):
    (tmp_path / "a.wav").write_bytes(tone())
    address = f"data:image/jpeg;base64,{base64.b64encode(jpeg(3)).decode()}"
    sound = {"data": base64.b64encode(tone()).decode(), "format": "wav"}
    parts = [
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "input_audio", "input_audio": sound},
        {"type": "text", "text": "<audio> or <video>?"},
    ]
    sample = {"messages": talk(parts), "audios": ["a.wav"]}
    client = browse(jsonl(tmp_path / "x.jsonl", sample))
    (_, asked), _ = chat(client.get("/s/0/0/0").text)
    # A sound is its waveform and its player, and a placeholder without a medium stays.
    assert [each.split("/")[-2] if "/" in each else each for each in asked] == [
        *("raw", "wave", "raw", "wave", "raw", "or", "<video>", "?"),
    ]
    assert client.get(asked[0]).content == jpeg(3)
    assert client.get(asked[2], headers={"Range": "bytes=0-3"}).content == b"RIFF"
    assert client.get(asked[4]).content == tone()


def test_only_media_below_the_folder_are_shown(tmp_path):
    names = ["../out.jpg", str(tmp_path / "out.jpg"), "http://localhost/out.jpg", "notes.txt"]
    (tmp_path / "out.jpg").write_bytes(jpeg(0))
    samples = [typed(type="image_url", image_url={"url": name}) for name in names]
    file = jsonl(tmp_path / "in/x.jsonl", *samples)
    (file.parent / "notes.txt").write_text("secret")
    client = browse(file)
    for number, name in enumerate(names):
        (_, asked), _ = chat(client.get(f"/s/0/0/{number}").text)
        assert asked == [f"[{name}: not found]", ASKED]
        assert client.get(f"/s/0/0/{number}/raw/1").status_code == 404


def test_an_image_that_is_named_without_a_conversation_is_shown_as_well(tmp_path):
    photo(tmp_path)
    client = browse(jsonl(tmp_path / "x.jsonl", {"image": NAME, "caption": "a square"}))
    assert '<img src="/s/0/0/0/raw/1"' in client.get("/s/0/0/0").text
    assert 'src="/s/0/0/0/thumb/1"' in client.get("/s/0/0").text
