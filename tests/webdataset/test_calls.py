"""What a sample of a stream costs, in calls: counts are the same on every machine."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import islice

import pytest

import energon.webdataset as wds

SAMPLES = 2000
JSON_CALLS = 4 if find_spec("msgspec") is None else 1


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    with wds.ShardWriter(f"{folder}/x-%d.tar", maxcount=2500, index=False) as sink:
        for n in range(5000):
            sink.write({"__key__": f"{n:06}", "txt": f"text {n}", "cls": n % 9, "json": {"n": n}})
    return f"{folder}/x-{{0..1}}.tar"


def calls_per_sample(dataset, samples_of_item):
    items = iter(dataset)
    list(islice(items, 1200 // samples_of_item))
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in islice(items, SAMPLES // samples_of_item):
            pass
    finally:
        sys.setprofile(None)
    return calls / SAMPLES


# At most 10 % above what was counted when the limit was set. Lower it where there are fewer.
@pytest.mark.parametrize(
    ("counted", "items", "make"),
    [
        (12.5, 1, lambda urls: wds.WebDataset(urls).shuffle(500)),
        (
            27.7 + JSON_CALLS,
            16,
            lambda urls: (
                wds.WebDataset(urls).shuffle(500).decode().to_tuple("txt", "json").batched(16)
            ),
        ),
    ],
    ids=["shuffle", "shuffle, decode, to_tuple, batched"],
)
def test_calls_per_sample_do_not_grow(urls, counted, items, make):
    assert calls_per_sample(make(urls), items) < 1.1 * counted
