from __future__ import annotations

import json
import re

import numpy as np
import pytest

from energon.prepare.dataset import prepare_dataset
from energon.prepare.jsonl import prepare_jsonl
from energon.viewer import shown
from tests.datasets import jpeg, write_shard
from tests.viewer.pages import browse

SIZES = np.random.default_rng(0).permutation(150).tolist()


@pytest.fixture
def client(tmp_path):
    samples = []
    for n, size in enumerate(SIZES):
        about = {"n": n % 7, "ok": n % 2 == 0, "name": f"<i>{size}"}
        parts = {"txt": b"x" * size, "json": json.dumps(about).encode()}
        samples.append((f"s{n}", parts | ({"jpg": jpeg(n)} if n % 50 == 0 else {})))
    for shard in range(3):
        write_shard(tmp_path / f"ds/{shard}.tar", samples[shard * 50 : shard * 50 + 50])
    prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    return browse(tmp_path / "ds")


def rows(text):
    """The numbers of the samples, in the order of the rows."""
    return [int(number) for number in re.findall(r'<tr><td><a href="/s/0/0/(\d+)">', text)]


def test_measures_sort_all_samples_over_all_pages(client):
    expected = np.argsort(SIZES).tolist()
    place, found = "?view=table&sort=txt:bytes", []
    while place:
        text = client.get(f"/s/0/0{place}").text
        found += rows(text)
        place = re.search(r'rel="next" href="/s/0/0(.*?)"|$', text)[1]
        place = place and place.replace("&amp;", "&")
    assert found == expected
    text = client.get("/s/0/0?view=table&sort=-txt:bytes").text
    assert rows(text) == expected[::-1][:60]
    assert 'aria-sort="descending"' in text


def test_values_sort_the_samples_of_a_page(client):
    text = client.get("/s/0/0?view=table&sort=json.n&from=60").text
    assert rows(text) == sorted(range(60, 120), key=lambda n: n % 7)
    text = client.get("/s/0/0?view=table&sort=-key").text
    assert rows(text) == sorted(range(60), key=lambda n: f"s{n}", reverse=True)
    # Samples without a value are last, whatever the direction.
    for sort in ("jpg: width", "-jpg: width"):
        found = rows(client.get(f"/s/0/0?view=table&sort={sort}").text)
        assert sorted(found[:2]) == [0, 50]
        assert sorted(found) == [*range(60)]
    assert f"<i>{SIZES[0]}" not in text
    assert rows(client.get("/s/0/0?view=table&sort=nothing").text) == [*range(60)]


def test_what_was_found_is_a_table_too(client):
    text = client.get("/s/0/0?view=table&where=json.n=3&sort=-bytes").text
    sizes = [SIZES[n] // 512 for n in rows(text)]
    assert sizes == sorted(sizes, reverse=True)
    assert sorted(rows(text)) == [*range(3, 150, 7)]
    assert "22 matches" in text or "21 matches" in text
    assert rows(client.get("/s/0/0?view=table&key=s14&sort=-key").text) == [
        *range(149, 139, -1),
        14,
    ]


def test_a_dataset_that_takes_too_long_is_sorted_as_far_as_it_was_measured(client, monkeypatch):
    monkeypatch.setattr(shown, "MEASURED_AT_ONCE", 40)
    monkeypatch.setattr(shown, "MEASURE_SECONDS", 0.0)
    text = client.get("/s/0/0?view=table&sort=txt:bytes").text
    assert rows(text) == np.argsort(SIZES[:40]).tolist()
    assert "Sorted are the first 40 of 150 samples." in text
    assert "150 of 150" not in client.get("/s/0/0/statistics").text


def test_bars_of_measures_lead_to_their_samples_in_the_table(client):
    text = client.get("/s/0/0/statistics").text
    figure = re.search(r"<figcaption>txt: bytes.*?</figure>", text, re.DOTALL)[0]
    assert "all 150 samples, 1 of which have no such part" in figure
    assert sum(map(int, re.findall(r"<title>.*? to .*?: (\d+)</title>", figure))) == 149
    bars = re.findall(r'<a href="(.*?)"><title>([\d.]+) to .*?: (\d+)</title>', figure)
    for href, low, count in bars[1:3]:
        found = rows(client.get(href.replace("&amp;", "&")).text)[: int(count)]
        assert min(SIZES[n] for n in found) >= float(low) - 1
        assert max(SIZES[n] for n in found) <= float(low) + 8


def test_every_kind_of_dataset_has_a_table(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = {"text": [f"row {n}" for n in range(9)], "score": [*range(8), None], "n": [*range(9)]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    client = browse(tmp_path / "rows.parquet")
    assert rows(client.get("/s/0/0?view=table&sort=-n").text) == [*range(8, -1, -1)]
    # A column with gaps is no measure; the page says so where it is asked to sort by it.
    answer = client.get("/s/0/0?view=table&sort=score")
    assert answer.status_code == 422
    assert "has no value in column" in answer.text
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * (9 - n)}) + "\n" for n in range(9)))
    prepare_jsonl(file)
    client = browse(file)
    assert rows(client.get("/s/0/0?view=table&sort=bytes").text) == [*range(8, -1, -1)]
