from __future__ import annotations

import pytest

from energon.prepare.dataset import prepare_dataset
from tests.datasets import write_shard
from tests.viewer.pages import browse

DATA = bytes(range(256)) * 12_000  # three pieces


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranges") / "ds"
    write_shard(root / "0.tar", [("a", {"txt": b"before"}), ("b", {"mp4": DATA, "txt": b""})])
    prepare_dataset(root, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    return browse(root)


def ask(client, wanted, path="/s/0/0/1/raw/0", **headers):
    return client.get(path, headers={"Range": wanted, **headers})


@pytest.mark.parametrize(
    ("wanted", "start", "stop"),
    [
        ("bytes=0-", 0, len(DATA)),
        ("bytes=5-9", 5, 10),
        ("bytes=1048570-1048590", 1048570, 1048591),
        ("bytes=-7", len(DATA) - 7, len(DATA)),
        (f"bytes={len(DATA) - 1}-{len(DATA) + 50}", len(DATA) - 1, len(DATA)),
        ("bytes=-99999999999999999999", 0, len(DATA)),
    ],
)
def test_gives_the_range_that_is_asked_for(client, wanted, start, stop):
    answer = ask(client, wanted)
    assert answer.status_code == 206
    assert answer.content == DATA[start:stop]
    assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"
    assert answer.headers["content-length"] == str(stop - start)
    assert answer.headers["content-type"] == "video/mp4"


@pytest.mark.parametrize("wanted", ["bytes=0-1,5-6", "bytes=9-5", "bytes=-", "lines=1-2", "x"])
def test_gives_all_where_no_single_range_is_meant(client, wanted):
    answer = ask(client, wanted)
    assert answer.status_code == 200
    assert answer.content == DATA


@pytest.mark.parametrize("wanted", [f"bytes={len(DATA)}-", "bytes=-0", f"bytes={'9' * 5000}-"])
def test_says_where_the_end_is(client, wanted):
    answer = ask(client, wanted)
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(DATA)}"


def test_a_part_without_bytes_has_no_range(client):
    assert ask(client, "bytes=0-", "/s/0/0/1/raw/1").status_code == 416
    assert client.get("/s/0/0/1/raw/1").content == b""


def test_a_range_of_another_version_is_answered_with_all_of_this_one(client):
    tag = client.head("/s/0/0/1/raw/0").headers["etag"]
    assert ask(client, "bytes=0-4", **{"If-Range": tag}).status_code == 206
    assert ask(client, "bytes=0-4", **{"If-Range": '"other"'}).status_code == 200


def test_a_head_has_no_body(client):
    answer = client.head("/s/0/0/1/raw/0")
    assert answer.headers["content-length"] == str(len(DATA))
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.content == b""
