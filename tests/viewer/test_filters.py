from __future__ import annotations

import json
import re
import threading
import urllib.request

import pytest

from energon.inspect.where import Where
from energon.prepare.dataset import prepare_dataset
from energon.viewer import shown, statistics
from energon.viewer.app import make_app
from energon.viewer.shown import Shown
from tests.datasets import jpeg, make_crude, write_shard
from tests.servers.chromium import served
from tests.viewer.pages import browse


@pytest.fixture
def client(tmp_path):
    samples = []
    for n in range(40):
        parts = {
            "json": json.dumps(
                {"n": n, "label": "even" if n % 2 == 0 else "<odd>", "said": f"{n} " + "x" * n}
            ).encode()
        }
        if n % 4 == 0:
            parts["jpg"] = jpeg(n, size=(30 + n, 20))
        samples.append((f"s{n}", parts))
    write_shard(tmp_path / "ds/0.tar", [*samples, ("broken", {"jpg": b"x", "json": b"{"})])
    prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    return browse(tmp_path / "ds")


def ordinals(text):
    return [int(number) for number in re.findall(r'<a href="/s/0/0/(\d+)">', text)]


def test_a_gallery_shows_what_matches(client):
    text = client.get("/s/0/0?where=json.n>=10 json.label=even lacks:jpg").text
    assert ordinals(text) == [n for n in range(10, 40) if n % 4 == 2]
    assert "8 matches among samples 0 to 40 of 41" in text
    text = client.get("/s/0/0?where=has:jpg&from=30").text
    assert ordinals(text) == [32, 36, 40]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), [("SEARCH_BYTES", 300), ("SEARCH_SECONDS", 0.0)])
def test_a_search_ends_after_some_time_or_bytes_and_goes_on_from_there(
    client, monkeypatch, name, limit
):
    monkeypatch.setattr(shown, name, limit)
    place, found, pages = "/s/0/0?where=json.label=even&text=X", [], 0
    while place is not None:
        text = client.get(place).text
        found += ordinals(text)
        pages += 1
        place = re.search(r'rel="next" href="(.*?)"|$', text)[1]
        place = place and place.replace("&amp;", "&")
    assert found == [*range(2, 40, 2)]
    assert 4 < pages <= 41


def test_texts_are_found_in_keys_parts_and_json_as_far_as_they_can_be_read(client):
    assert ordinals(client.get("/s/0/0?text=BROKEN").text) == [40]
    assert ordinals(client.get("/s/0/0?text=%3Codd%3E&where=json.n<6").text) == [1, 3, 5]
    assert ordinals(client.get("/s/0/0?text=17 xxx").text) == [17]
    text = client.get("/s/0/0?text='quoted").text
    assert "0 matches among samples 0 to 40 of 41" in text
    assert "No sample matches." in text


@pytest.mark.slow
def test_a_search_is_sent_while_it_goes_on_and_ends_when_nobody_listens(tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "PROGRESS_SECONDS", 0.0)
    checked, original = [], Where.__call__
    at_first = threading.Event()

    def check(where, files, key):
        checked.append(key)
        if len(checked) == 5:
            assert at_first.wait(60)
        return original(where, files, key)

    monkeypatch.setattr(Where, "__call__", check)
    root = make_crude(tmp_path / "ds", [5000])
    with served(make_app(Shown(root))) as address:
        with urllib.request.urlopen(f"{address}/s/0/0?text=text+1", timeout=60) as page:
            text = ""
            while 'href="/s/0/0/1"' not in text:  # which has been found when no other is checked
                text += page.readline().decode()
            assert "samples searched" in text
        at_first.set()
    assert len(checked) < 5000


def test_a_filter_that_makes_no_sense_is_said(client):
    answer = client.get("/s/0/0?where=jpg")
    assert answer.status_code == 422
    assert "has:PART" in answer.text
    assert 'name="where" value="jpg"' in answer.text  # to be corrected


def test_statistics_open_few_shards_of_many(tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "SEEN_SAMPLES", 20)
    monkeypatch.setattr(statistics, "SEEN_SHARDS", 4)
    client = browse(make_crude(tmp_path / "ds", [9] * 12))
    text = client.get("/s/0/0/statistics").text
    assert "20 of 108 samples, evenly spread" in text
    sizes = re.findall(r"<title>txt: (\d+)</title>", text)
    assert sizes == ["20"]
    assert sum(map(int, re.findall(r"<title>1,024: (\d+)</title>", text))) == 108


def test_what_most_samples_have_is_plotted_however_many_others_come_first(tmp_path):
    few = [(f"a{n}", {f"x{n}{m}.txt": b"1" for m in range(4)}) for n in range(20)]
    most = [(f"b{n}", {"cls": b"%d" % n, "json": json.dumps({"n": n}).encode()}) for n in range(40)]
    write_shard(tmp_path / "ds/0.tar", few + most)
    prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    text = browse(tmp_path / "ds").get("/s/0/0/statistics").text
    titles = re.findall(r"<figcaption>(.*?)<span", text)
    assert len(titles) == statistics.MAX_FIELDS
    assert titles[0] == "parts of a sample"
    assert {"cls: label", "json.n", "json: bytes"} < set(titles)


def test_statistics_are_plots_of_what_samples_are_like(client):
    text = client.get("/s/0/0/statistics").text
    plots = dict(
        re.findall(r"<figcaption>(.*?)<span.*?</figcaption>(.*?)</figure>", text, re.DOTALL)
    )
    titles = re.findall(r"<title>(.*?)</title>", plots["json.label"])
    assert sorted(titles) == ["&lt;odd&gt;: 20", "even: 20"]
    sizes = re.findall(r"<title>.*?: (\d+)</title>", plots["json.n"])
    assert sum(map(int, sizes)) == 40
    # Texts that are all different are counted by their lengths, in bars that lead to them.
    longest = re.findall('href="(.*?)"', plots["json.said: characters"])[-1]
    assert ordinals(client.get(longest.replace("&amp;", "&")).text) == [38, 39]
    assert "30: 1" in plots["jpg: width"]
    assert "damaged: 1" in plots["json: damaged"]
    assert re.findall(r"<title>(.*?)</title>", plots["parts of a sample"]) == [
        "json: 30",
        "jpg json: 11",
    ]
