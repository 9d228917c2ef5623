from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from energon.prepare.dataset import prepare_dataset
from energon.prepare.jsonl import prepare_jsonl
from energon.sources import tree
from energon.sources.webdataset import WebdatasetSource
from energon.viewer.shown import Shown
from tests.commands import run_python
from tests.datasets import make_captions, make_crude, write_shard
from tests.media_files import media_files
from tests.viewer.pages import browse

ROOT = Path(__file__).parents[2]
FIRST = "/s/0/0/0"
ALL = {"split_parts": ["train:.*"], "sample_type": "CrudeWebdataset"}


def page(client, path, status=200):
    found = client.get(path)
    assert found.status_code == status, found.text
    return found.text


def test_the_way_from_a_dataset_to_the_bytes_of_a_part(tmp_path):
    root = make_captions(tmp_path / "ds", [3, 2])
    client = browse(root)
    first = page(client, "/")
    assert "train" in first
    assert "val" in first
    assert 'href="/s/0/0"' in first
    gallery = page(client, "/s/0/0")
    assert "caption 4" in gallery
    assert 'href="/s/0/0/4"' in gallery
    sample = page(client, "/s/0/0/4")
    assert "shards/001.tar" in sample
    where = re.search(
        r"(\d+) B at byte ([\d,]+)</span>\s*<a class=\"button\" href=\"(/s/0/0/4/raw/1)\?save",
        sample,
    )
    content = client.get(where[3]).content
    assert content == b"caption 4"
    offset = int(where[2].replace(",", ""))
    shard = (root / "shards/001.tar").read_bytes()
    assert shard[offset : offset + int(where[1])] == content


def test_a_gallery_shows_small_images_that_are_made_once(tmp_path):
    data = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (600, 900, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(data, "JPEG")
    write_shard(tmp_path / "ds/0.tar", [("a", {"jpg": data.getvalue()})])
    prepare_dataset(tmp_path / "ds", **ALL)
    client = browse(tmp_path / "ds")
    (place,) = re.findall(r'src="(/s/0/0/0/thumb/0)"', page(client, "/s/0/0"))
    answer = client.get(place)
    assert answer.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(answer.content)).size == (256, 171)
    tag = answer.headers["etag"]
    assert client.get(place, headers={"If-None-Match": tag}).status_code == 304
    # Made once: it is there when the shard has lost its content.
    shard, before = tmp_path / "ds/0.tar", (tmp_path / "ds/0.tar").stat()
    shard.write_bytes(bytes(before.st_size))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert client.get(place).content == answer.content


def test_goes_to_a_number_and_finds_the_beginning_of_a_key(tmp_path):
    client = browse(make_crude(tmp_path / "ds", [70, 60]))
    assert "Samples 100 to 129 of 130" in page(client, "/s/0/0?from=100")
    assert "Samples 0 to 59 of 130" in page(client, "/s/0/0")
    # Behind the end is the last sample.
    assert "Samples 129 to 129 of 130" in page(client, "/s/0/0?from=9999999")
    found = page(client, "/s/0/0?key=s12")
    assert re.findall(r'href="/s/0/0/(\d+)"', found) == [str(n) for n in (12, *range(120, 130))]
    assert "0 samples whose key begins" in page(client, "/s/0/0?key=nothing")
    page(client, "/s/0/0?from=-1", 400)
    page(client, "/s/0/0?from=x", 400)


def test_search_counts_without_those_that_are_left_out_and_outside_of_the_split(tmp_path):
    root = make_crude(tmp_path / "ds", [5, 5])
    (tmp_path / "bad.txt").write_text("000.tar/s1\n001.tar/s6\n")
    prepare_dataset(root, **ALL, exclude_from=[tmp_path / "bad.txt"])
    leaf = Shown(root).leaf(0, 0)
    assert [leaf.sample(n).where.key for n in leaf.search("s", 100)] == [
        *("s0", "s2", "s3", "s4", "s5", "s7", "s8", "s9"),
    ]
    assert [tuple(shard) for shard in leaf.shards] == [("000.tar", 0, 4), ("001.tar", 4, 8)]


def test_search_asks_the_index_where_shards_have_no_part_tables(tmp_path, monkeypatch):
    root = make_crude(tmp_path / "ds", [5, 5])
    (tmp_path / "bad.txt").write_text("000.tar/s1\n001.tar/s6\n")
    prepare_dataset(root, **ALL, exclude_from=[tmp_path / "bad.txt"])
    assert (root / ".nv-meta/index.sqlite").is_file()
    for table in root.glob("*.parts"):
        table.unlink()
    leaf = Shown(root).leaf(0, 0)
    assert len(leaf) == 8
    with monkeypatch.context() as patch:
        patch.setattr(WebdatasetSource, "open_shard", lambda *_: pytest.fail("a shard was opened"))
        found = leaf.search("s", 100)
        assert found == [*range(8)]
        assert leaf.search("s7", 3) == [5]
        assert leaf.search("\udcff", 3) == []
    assert [leaf.sample(n).where.key for n in found] == [
        *("s0", "s2", "s3", "s4", "s5", "s7", "s8", "s9"),
    ]


def test_nothing_is_opened_that_a_page_does_not_show(tmp_path, monkeypatch):
    opened = []
    root = make_crude(tmp_path / "ds", [70] * 5)
    client = browse(root)
    import energon.sources.shards as shards

    original = shards._open_local
    monkeypatch.setattr(
        shards, "_open_local", lambda path, *a, **k: opened.append(path) or original(path, *a, **k)
    )
    page(client, "/")
    assert opened == []
    page(client, "/s/0/0?from=150")
    assert [path[-7:] for path in opened] == ["002.tar"] or [p[-7:] for p in opened] == [
        *("002.tar", "003.tar")
    ]


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """A dataset with a sample for every kind of part, and the number of each."""
    root = tmp_path_factory.mktemp("media") / "ds"
    files = media_files()
    samples = [(f"k{n}", {name: data}) for n, (name, data) in enumerate(files.items())]
    write_shard(root / "0.tar", samples)
    prepare_dataset(root, **ALL)
    return browse(root), {name: n for n, name in enumerate(files)}


@pytest.mark.parametrize("name", media_files())
def test_every_kind_of_part_has_a_page(media, name):
    client, numbers = media
    shown = page(client, f"/s/0/0/{numbers[name]}")
    assert 'class="problem"' not in shown, shown
    raw = client.get(f"/s/0/0/{numbers[name]}/raw/0")
    assert raw.content == media_files()[name]


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("jpg", "32 x 24 pixels"),
        ("tiff", 'src="/s/0/0/{}/image/0"'),
        ("wav", "<audio controls"),
        ("0.mp4", "<video controls"),
        ("npy", "<b>3 x 4</b> float32; min 0, max 11, mean 5.5"),
        ("npz", "arr_1 <b>2 x 0 x 3</b> int64"),
        ("ten", "data:image/png;base64,"),
        ("json.gz", '<span class="string">text</span>'),
        ("msg", '<span class="number">2.5</span>'),
        ("cbor", "<summary>2 keys</summary>"),
        ("zst", "000000  28 b5 2f fd"),
        ("cls", '<pre class="text" tabindex="0">12</pre>'),
    ],
)
def test_parts_are_shown_as_what_they_are(media, name, seen):
    client, numbers = media
    assert seen.format(numbers[name]) in page(client, f"/s/0/0/{numbers[name]}")


def test_images_are_made_of_what_browsers_do_not_show(media):
    client, numbers = media
    tiff = client.get(f"/s/0/0/{numbers['tiff']}/image/0")
    assert Image.open(io.BytesIO(tiff.content)).format == "PNG"
    wave = client.get(f"/s/0/0/{numbers['wav']}/wave/0")
    assert wave.headers["content-type"] == "image/svg+xml"
    assert wave.text.count("M") == 600
    poster = client.get(f"/s/0/0/{numbers['0.mp4']}/thumb/0")
    assert Image.open(io.BytesIO(poster.content)).format == "JPEG"
    assert client.get(f"/s/0/0/{numbers['txt']}/thumb/0").status_code == 404


def test_a_conversation_is_shown_in_its_order(tmp_path):
    talk = {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "A <b>cat</b>"},
        ]
    }
    write_shard(tmp_path / "ds/0.tar", [("a", {"json": json.dumps(talk).encode()})])
    prepare_dataset(tmp_path / "ds", **ALL)
    shown = page(browse(tmp_path / "ds"), "/s/0/0/0")
    turns = re.findall(r"<b>(\w+)</b>\s*<p>(.*?)</p>", shown, re.DOTALL)
    assert turns == [
        ("user", "[image]"),
        ("assistant", "A &lt;b&gt;cat&lt;/b&gt;"),
    ]


def test_a_metadataset_shows_the_datasets_of_each_split(tmp_path):
    make_crude(tmp_path / "one", [3])
    make_crude(tmp_path / "two", [4], prefix="t")
    document = tmp_path / "blend.yaml"
    document.write_text(
        "splits:\n  train:\n    blend:\n      - {path: one, weight: 3}\n"
        "      - {path: two, weight: 1}\n  val: {path: two}\n"
    )
    client = browse(document)
    first = page(client, "/")
    assert re.findall(r'<a href="(/s/\d/\d)">(\w+)</a>', first) == [
        ("/s/0/0", "one"),
        ("/s/0/1", "two"),
        ("/s/1/0", "two"),
    ]
    assert "text 2" in page(client, "/s/0/1")


def test_the_first_page_sums_up_what_is_blended(tmp_path):
    make_captions(tmp_path / "photos", [3])
    make_crude(tmp_path / "texts", [4])
    document = tmp_path / "blend.yaml"
    document.write_text(
        "splits:\n  train:\n    blend:\n      - {path: photos, weight: 1, aux: {media: texts}}\n"
        "      - weight: 3\n        blend:\n"
        "          - {path: texts, weight: 1}\n          - {path: photos, weight: 2}\n"
    )
    client = browse(document)
    first = page(client, "/")
    assert re.findall(r'<td class="right">([\d.]+) %</td>', first) == [
        "25",
        "75",
        "25",
        "50",
        "100",
    ]
    assert re.search(r'<tfoot>.*<td class="right">10</td>', first)
    assert "aux: media" in first
    assert first.count("<td>webdataset</td>") == 3
    assert client.get("/s/0/0/cover").headers["content-type"] == "image/jpeg"
    assert client.get("/s/0/1/cover").headers["content-type"] == "image/svg+xml"


def test_a_join_shows_the_parts_of_all_its_datasets(tmp_path):
    make_crude(tmp_path / "one", [3, 2])
    make_captions(tmp_path / "two", [5])
    document = tmp_path / "join.yaml"
    document.write_text(
        "splits:\n  train:\n    join:\n      left: {path: one}\n      right: {path: two}\n"
        "    joiner: {__module__: energon, __class__: Sample}\n"
    )
    client = browse(document)
    sample = page(client, "/s/0/0/4")
    assert "one: txt" in sample
    assert "two: jpg" in sample
    assert client.get("/s/0/0/4/raw/0").content == b"text 4"
    assert client.get("/s/0/0/4/raw/2").content == b"caption 4"
    assert 'href="/s/0/0/4"' in page(client, "/s/0/0?key=s4")


def test_the_lines_of_a_jsonl_file_are_samples(tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(20)))
    prepare_jsonl(file)
    client = browse(file)
    assert "line 19" in page(client, "/s/0/0/19")
    assert client.get("/s/0/0/19/raw/0").content.strip() == b'{"text": "line 19"}'
    assert re.findall(r'href="/s/0/0/(\d+)"', page(client, "/s/0/0?key=1")) == ["1"]


def test_rows_and_documents_are_samples(tmp_path):
    import pyarrow
    import pyarrow.parquet

    from energon.formats.tokens import token_index_bytes

    rows = {"text": [f"row {n}" for n in range(70)], "n": list(range(70))}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows.parquet")
    client = browse(tmp_path / "rows.parquet")
    assert "row 69" in page(client, "/s/0/0?from=60")
    assert "row 42" in page(client, "/s/0/0/42")
    assert "Samples 60 to 69 of 70" in page(client, "/s/0/0?from=60")
    tokens = np.arange(60, dtype=np.uint16)
    tokens.tofile(tmp_path / "corpus.bin")
    with (tmp_path / "corpus.idx").open("wb") as file:
        file.writelines(token_index_bytes(tokens.dtype, [20] * 3))
    shown = page(browse(tmp_path / "corpus.idx"), "/s/0/0/1")
    assert "20, 21, 22" in shown
    # Pixels without a file of their own are an image as well.
    assert 'alt="pixels.ppm of ' in page(
        browse(ROOT / "plugins/energon-mds/tests/data/mds"), "/s/0/0/1"
    )


def test_images_in_columns_are_those_of_their_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    # Images of one size in bytes: nothing but their content tells them apart.
    colors = [(250, 0, 0), (0, 0, 250)]
    images = []
    for color in colors:
        buffer = io.BytesIO()
        Image.new("RGB", (20, 10), color).save(buffer, "BMP")
        images.append(buffer.getvalue())
    rows = {"image": images, "score": [0.25, 0.75], "caption": ["", ""]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows.parquet")
    client = browse(tmp_path / "rows.parquet")
    thumbnails = re.findall(r'<img src="(.*?)"', page(client, "/s/0/0"))
    assert len(thumbnails) == 2
    for address, color in zip(thumbnails, colors, strict=True):
        seen = Image.open(io.BytesIO(client.get(address).content)).getpixel((5, 5))
        assert np.abs(np.subtract(seen, color)).max() < 30
    assert "at byte" not in page(client, FIRST)
    matching = page(client, "/s/0/0?where=image.width>=20 score.json.value>0.5")
    assert re.findall(r'<a href="/s/0/0/(\d+)">', matching) == ["1"]
    plots = page(client, "/s/0/0/statistics")
    assert "image: width" in plots
    assert "<figcaption>score<span" in plots


def test_rows_of_a_page_are_read_together_and_once(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    rows = {"text": [f"row {n}" for n in range(90)]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows.parquet")
    leaf = Shown(tmp_path / "rows.parquet").leaf(0, 0)
    read, asked = type(leaf.source).read, []

    def note(source, ordinals, **more):
        asked.append(len(ordinals))
        return read(source, ordinals, **more)

    monkeypatch.setattr(type(leaf.source), "read", note)
    for _ in range(2):
        seen = leaf.page(10, 60)
        assert [s.parts[0].file.read().decode() for s in seen] == rows["text"][10:70]
    assert asked == [60]
    assert len(leaf.page(60, 60)) == 30
    assert asked == [60, 20]
    # They do not stay when others come.
    monkeypatch.setattr(tree, "KEPT_BYTES", 20)
    leaf.page(0, 60)
    leaf.sample(0)
    assert asked[2:] == [10, *[1] * (len(asked) - 3)]
    assert len(asked) > 3


def test_a_card_says_what_samples_without_text_hold(tmp_path):
    def npy(array):
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()

    system = {"role": "system", "content": "Be helpful."}
    talk = {"messages": [system, {"role": "user", "content": "<image>\nHow many?"}]}
    samples = [
        ("a", {"tokens.npy": npy(np.arange(5)), "label.json": b"3", "none.json": b"null"}),
        ("b", {"json": json.dumps(talk).encode()}),
        ("c", {"msg": b"\x81\xa4name\xa4tree"}),
        ("d", {"json": b"{", "npy": b"x"}),
    ]
    write_shard(tmp_path / "ds/0.tar", samples)
    prepare_dataset(tmp_path / "ds", **ALL)
    words = re.findall(
        r'<span class="words">(.*?)</span>', page(browse(tmp_path / "ds"), "/s/0/0"), re.S
    )
    assert words == [
        "tokens: ndarray (5,) int64 [0, 1, 2, 3, 4]\nlabel: 3",
        "How many?",
        "name: tree",
        "json, npy",
    ]


def test_several_datasets_are_shown_beside_each_other(tmp_path):
    one = make_crude(tmp_path / "one/ds", [2, 2], prefix="a")
    other = make_crude(tmp_path / "other/ds", [3], prefix="b")
    client = browse(one, other)
    first = page(client, "/")
    assert "<title>2 datasets</title>" in first
    assert re.findall("<h1>(.*?)</h1>", first) == ["one/ds", "other/ds"]
    number = re.search(r'href="(/s/\d+/0)">ds</a></td>\s*<td class="right">3', first)[1]
    assert "other/ds: " in page(client, number)
    splits = re.findall(r"<option.*?>(.*?)</option>", page(client, "/run"))
    assert splits[0] == "one/ds: train"
    steps = page(client, "/run", 200)
    assert 'class="key">a' in steps
    steps = client.get("/run", params={"split": "other/ds: train"}).text
    assert 'class="key">b' in steps
    assert f'href="{number.rpartition("/")[0]}/0/' in steps


def test_shards_are_found_by_name(tmp_path):
    root = make_crude(tmp_path / "ds", [1] * 12)
    client = browse(root)
    found = page(client, "/s/0/0/shards?name=01")
    assert "3 of 12 shards" in found
    assert re.findall(r"<a href=\"/s/0/0\?from=(\d+)\">(.*?)</a>", found) == [
        ("1", "001.tar"),
        ("10", "010.tar"),
        ("11", "011.tar"),
    ]
    assert "No shard name contains" in page(client, "/s/0/0/shards?name=x")


def test_what_cannot_be_read_is_said_on_the_page(tmp_path):
    root = make_crude(tmp_path / "ds", [3, 3])
    (root / "001.tar").unlink()
    client = browse(root)
    assert "001.tar" in page(client, "/s/0/0/4", 404)
    page(client, "/s/0/0/2")
    page(client, "/s/0/0/6", 404)
    page(client, "/s/0/1", 404)
    page(client, "/s/7/0", 404)
    page(client, "/nothing", 404)


def test_tokens_are_shown_as_the_text_of_a_tokenizer(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.array([72, 101, 60, 98, 62], np.int32))
    write_shard(tmp_path / "ds/shards/0.tar", [("a", {"npy": buffer.getvalue()})])
    prepare_dataset(tmp_path / "ds", **ALL)
    shown = page(browse(tmp_path / "ds", tokenizer=lambda numbers: bytes(numbers).decode()), FIRST)
    tokens = re.findall(r'<span title="(\d+)">(.*?)</span>', shown)
    assert tokens == [("72", "H"), ("101", "e"), ("60", "&lt;"), ("98", "b"), ("62", "&gt;")]
    listed = page(
        browse(tmp_path / "ds", tokenizer=lambda numbers: [chr(n) for n in numbers]), FIRST
    )
    assert listed == shown
    broken = page(browse(tmp_path / "ds", tokenizer=lambda numbers: 1 // 0), FIRST)
    assert "the tokenizer raised ZeroDivisionError" in broken
    assert "He" not in page(browse(tmp_path / "ds"), FIRST)


def test_lists_in_values_are_tokens_if_their_names_say_so(tmp_path):
    about = {"input_ids": [72, 101, 60], "bbox": [72, 101], "nested": {"tokens": [105, 33]}}
    write_shard(tmp_path / "ds/0.tar", [("a", {"json": json.dumps(about).encode()})])
    prepare_dataset(tmp_path / "ds", **ALL)
    client = browse(tmp_path / "ds", tokenizer=lambda numbers: bytes(numbers).decode())
    tokens = re.findall(r'<span title="(\d+)">(.*?)</span>', page(client, FIRST))
    assert tokens == [("72", "H"), ("101", "e"), ("60", "&lt;"), ("105", "i"), ("33", "!")]
    assert "input_ids: He&lt;" in page(client, "/s/0/0")


WITHOUT_TORCH = """
import sys
from tests.viewer.pages import browse
client = browse(sys.argv[1])
page = client.get("/s/0/0/0").text
for kind in ("wave", "thumb"):
    assert any(client.get(f"/s/0/0/0/{kind}/{n}").status_code == 200 for n in (0, 1)), kind
assert "torch" not in sys.modules, "a sound or a video imports torch"
"""


@pytest.mark.slow
def test_sounds_and_videos_are_drawn_without_torch(tmp_path):
    files = media_files()
    parts = {name: files[name] for name in ("wav", "0.mp4")}
    write_shard(tmp_path / "ds/shards/0.tar", [("a", parts)])
    prepare_dataset(tmp_path / "ds", **ALL)
    run_python(WITHOUT_TORCH, tmp_path / "ds")
