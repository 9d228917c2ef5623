from __future__ import annotations

import json
import re

import pytest

from energon.prepare.dataset import prepare_dataset
from tests.datasets import make_crude, write_shard
from tests.media_files import damaged, media_files
from tests.viewer.pages import browse

ALL = {"split_parts": ["train:.*"], "sample_type": "CrudeWebdataset"}
SCRIPT = "<script>alert(1)</script>"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>alert(1)</script></svg>'


@pytest.fixture
def hostile(tmp_path):
    """Pages of samples whose names and contents try to run, to lead away and to be long."""
    samples = [
        (SCRIPT, {"txt": SCRIPT.encode()}),
        ('"><img src=x onerror=alert(1)>', {"json": json.dumps({SCRIPT: SCRIPT}).encode()}),
        ("../../etc/passwd", {"txt": b"x"}),
        ("svg", {"svg": SVG, "html": SCRIPT.encode(), "jpg": SVG, "pkl": b"cos\nsystem\n."}),
        ("turned\u202earound\x1b[2J", {"txt": "a\u202eb\x1b[2J".encode()}),
        ("header\r\nSet-Cookie: a=b", {"bin": b"x", "txt": b"y"}),
        ("deep", {"json": b"[" * 300 + b"]" * 300}),
        ("wide", {"json": json.dumps([list(range(300))] * 300).encode()}),
        ("{{7*7}}{% raw %}", {"txt": b"{{7*7}}"}),
        ("empty", {"txt": b"", "jpg": b"", "json": b"", "npy": b"", "mp4": b"", "wav": b""}),
        ("no text", {"json": rb'{"a\ud800": "\ud800", "b": NaN}', "\udcff.txt": b"\xff"}),
    ]
    write_shard(tmp_path / "ds/0.tar", samples)
    prepare_dataset(tmp_path / "ds", **ALL)
    return browse(tmp_path / "ds")


def test_names_and_contents_are_text_on_every_page(hostile):
    galleries = [f"/s/0/0{end}" for end in ("", "?key=%3Cscript%3E", "/statistics", "/shards")]
    for path in ["/", *galleries, *(f"/s/0/0/{n}" for n in range(11))]:
        answer = hostile.get(path)
        assert answer.status_code == 200
        assert "<script>alert" not in answer.text
        assert "<img src=x" not in answer.text
        assert not re.search("[\x1b\u202e]", answer.text)
        assert "49" not in re.findall(r"<h1>(.*?)</h1>", answer.text)
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert "set-cookie" not in answer.headers


def test_errors_are_text_too(hostile):
    answer = hostile.get(f"/s/0/0?from={SCRIPT}")
    assert answer.status_code == 400
    assert "<script>alert" not in answer.text


@pytest.mark.parametrize("part", range(4))
def test_no_part_can_run_in_a_browser(hostile, part):
    answer = hostile.get(f"/s/0/0/3/raw/{part}")
    kind = answer.headers["content-type"]
    assert kind == ("image/jpeg" if part == 2 else "application/octet-stream")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
    shown = "inline" if part == 2 else "attachment"
    assert answer.headers["content-disposition"].startswith(f"{shown}; filename*=UTF-8''")


def test_names_of_downloads_stay_in_their_header(hostile):
    answer = hostile.get("/s/0/0/5/raw/0?save")
    assert answer.headers["content-disposition"] == (
        "attachment; filename*=UTF-8''header%0D%0ASet-Cookie%3A%20a%3Db.bin"
    )
    assert "/" not in hostile.get("/s/0/0/2/raw/0?save").headers["content-disposition"][30:]


def test_large_values_are_cut(hostile):
    assert hostile.get("/s/0/0/6").text.count("<details") == 40
    assert len(hostile.get("/s/0/0/7").text) < 300_000


def test_nothing_beside_the_dataset_is_served(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    root = make_crude(tmp_path / "ds", [2])
    client = browse(root)
    for path in [
        *("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/secret.txt"),
        *("/../secret.txt", "/s/0/0/0/raw/../../../../secret.txt", "/s/0/0/-1", "/s/-1/0"),
        *(
            "/s/0/0/0/raw/7",
            "/s/0/0/0/raw/%2e%2e",
            "/static/%2fetc%2fpasswd",
            "/static//etc/passwd",
        ),
    ]:
        answer = client.get(path)
        assert answer.status_code in (404, 405), path
        assert "secret\n" not in answer.text


def test_pages_ask_for_nothing_from_elsewhere(tmp_path):
    client = browse(make_crude(tmp_path / "ds", [2]))
    for path in ("/", "/s/0/0", "/s/0/0/1", "/static/view.css", "/static/view.js"):
        text = client.get(path).text
        assert not re.search(r"(https?:)?//\w", text), path
        assert " style=" not in text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8710", "[::1]:8710", "LOCALHOST:1"])
def test_this_machine_is_served(tmp_path, host):
    client = browse(make_crude(tmp_path / "ds", [1]))
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8710", "10.0.0.1", ""])
def test_a_name_that_was_pointed_at_this_machine_is_refused(tmp_path, host):
    client = browse(make_crude(tmp_path / "ds", [1]))
    answer = client.get("/s/0/0/0/raw/0", headers={"Host": host})
    assert answer.status_code == 421
    assert "text 0" not in answer.text


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_may_only_link_here(tmp_path, site):
    client = browse(make_crude(tmp_path / "ds", [1]))

    def status(mode, dest, method="GET"):
        said = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
        return client.request(method, "/s/0/0/0", headers=said).status_code

    assert status("navigate", "document") == 200
    assert status("navigate", "iframe") == 403
    assert status("no-cors", "image") == 403
    assert status("cors", "empty") == 403
    assert status("navigate", "document", "POST") == 403


def test_a_name_can_be_given(tmp_path):
    client = browse(make_crude(tmp_path / "ds", [1]), server_names={"box.example"})
    assert client.get("/", headers={"Host": "box.example:8710"}).status_code == 200


def test_elsewhere_a_token_has_to_be_shown_once(tmp_path):
    root = make_crude(tmp_path / "ds", [1])
    client = browse(root, token="t0ken", base_url="http://10.0.0.1:8710")
    for path in ("/", "/s/0/0/0/raw/0", "/static/view.css", "/?token=wrong", "/?token="):
        assert client.get(path).status_code == 403
    bearer = {"Authorization": "Bearer t0ken"}
    assert client.get("/", headers=bearer).status_code == 200
    answer = client.get("/s/0/0?key=s&token=t0ken", follow_redirects=False)
    assert answer.headers["location"] == "/s/0/0?key=s"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/s/0/0/0/raw/0").content == b"text 0"
    # The redirection leads to this server, whatever the path looks like.
    answer = client.get("//evil.example/?token=t0ken", follow_redirects=False)
    assert not answer.headers["location"].startswith("//")
    # A name that was pointed here is refused even with the token.
    assert client.get("/", headers={"Host": "evil.example", **bearer}).status_code == 421


def test_damaged_media_are_problems_on_a_page_and_nothing_more(tmp_path):
    import random

    rng = random.Random(0)
    samples = [
        (f"k{n}.{name}", {name: damaged(data, rng)})
        for n, (name, data) in enumerate(media_files().items())
    ]
    write_shard(tmp_path / "ds/0.tar", samples)
    prepare_dataset(tmp_path / "ds", **ALL)
    client = browse(tmp_path / "ds")
    for number in range(len(samples)):
        assert client.get(f"/s/0/0/{number}").status_code == 200
        for image in ("thumb", "image", "wave"):
            status = client.get(f"/s/0/0/{number}/{image}/0").status_code
            assert status in (200, 404, 422), (samples[number][0], image)
