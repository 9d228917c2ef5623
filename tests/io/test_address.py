from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.io.address import (
    address_name,
    is_remote,
    join_address,
    local_path,
    parent_address,
    redact,
    scheme_of,
    split_address,
)
from energon.messages import redact_text

ROOTS = ["s3://bucket", "https://host:80?sig=a", "hf://datasets/me/texts@v1", "ais://bucket"]
names = st.text("abcü.-_ +", min_size=1, max_size=5).filter(lambda name: name.strip("."))


def below(root, names):
    base, _, query = root.partition("?")
    return "/".join([base, *names]) + (f"?{query}" if query else "")


@pytest.mark.parametrize("root", ROOTS)
@given(folder=st.lists(names, max_size=3), rest=st.lists(names, min_size=1, max_size=3))
def test_joining_and_going_up_are_opposites(root, folder, rest):
    address = below(root, folder)
    joined = join_address(address, "/".join(rest))
    assert address_name(joined) == rest[-1]
    for _ in rest:
        joined = parent_address(joined)
    assert split_address(joined) == split_address(address)


@pytest.mark.parametrize(
    ("folder", "path", "wanted"),
    [
        ("/a/b", "../c", "/a/c"),
        ("file:///a/b", "c", "/a/b/c"),
        ("s3://b/a", "s3://c/x", "s3://c/x"),
        ("s3://b/a", "/mnt/x", "/mnt/x"),
        ("s3://b", "x/./y", "s3://b/x/y"),
        ("https://h/a?sig=s", "../x", "https://h/x?sig=s"),
    ],
)
def test_paths_start_from_their_folder_unless_they_are_whole(folder, path, wanted):
    assert join_address(folder, path) == wanted


@pytest.mark.parametrize("path", ["../..", "../../x", "a/../../../x"])
def test_nothing_leads_out_of_a_bucket(path):
    with pytest.raises(ConfigError, match="is outside s3://bucket"):
        join_address("s3://bucket/a", path)


def test_dss_addresses_are_folders_of_this_machine(monkeypatch):
    monkeypatch.setenv("NVDATASET_CACHE_DIR", "/cache")
    assert not is_remote("dss://coco@v2/shards")
    assert local_path("dss://coco@v2/shards/0.tar") == "/cache/coco/v2/shards/0.tar"
    for wrong in ("dss://coco/x", "dss://@v2/x"):
        with pytest.raises(ConfigError, match="dss://DATASET@VERSION/PATH"):
            local_path(wrong)
    monkeypatch.delenv("NVDATASET_CACHE_DIR")
    with pytest.raises(ConfigError, match="set NVDATASET_CACHE_DIR"):
        local_path("dss://coco@v2/x")


@pytest.mark.parametrize("address", ["s3://", "s3:///x", "https://?sig=secret"])
def test_a_bucket_or_host_is_data_file(address):
    with pytest.raises(ConfigError, match="no bucket or host") as caught:
        split_address(address)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("address", ["hf://x", "hf://datasets/me", "hf://datasets//x/y"])
def test_a_repository_of_the_hub_has_an_owner_and_a_name(address):
    with pytest.raises(ConfigError, match="hf://datasets/USER/NAME/PATH"):
        split_address(address)


def test_local_paths_of_other_hosts_are_refused():
    assert local_path("file://localhost/a%20b") == "/a b"
    with pytest.raises(ConfigError, match="file:///PATH"):
        local_path("file://host/x")


SECRETS = st.builds("{}s3cr3t{}".format, st.text(max_size=8), st.text(max_size=8))
NO_AT = SECRETS.filter(lambda text: "@" not in text)
ODD = st.text("ab1@:'\"` ,;()[]{}\\%+=&~\n\t", max_size=8)
PASSWORDS = st.builds("{}s3cr3t{}".format, ODD, ODD)
SCHEMES = st.sampled_from(["http", "https", "s3", "gs", "az", "HTTPS", "webdav+ssl"])


@given(scheme=SCHEMES, user=st.text("ab1'\" ", max_size=4), password=PASSWORDS)
def test_an_address_is_shown_without_its_password(scheme, user, password):
    assert redact(f"{scheme}://{user}:{password}@host/x") == f"{scheme}://***@host/x"
    assert redact(f"{scheme}://{password}@host") == f"{scheme}://***@host"


@given(scheme=SCHEMES, before=st.text("ab'\" :", min_size=1, max_size=4), password=NO_AT)
def test_a_password_that_makes_an_address_invalid_is_not_shown(scheme, before, password):
    shown = redact(f"{scheme}://id:{before}{password}@bucket/x")
    assert "s3cr3t" not in shown
    assert shown.startswith(f"{scheme}://")


@given(signature=SECRETS)
def test_an_address_is_shown_without_its_query(signature):
    assert redact(f"https://host/x y?sig={signature}") == "https://host/x y?***"
    assert "s3cr3t" not in redact(f"az://host/x?sig={signature}")


@given(
    password=PASSWORDS.filter(lambda text: not re.match(r"\d*\s", text) and "\n" not in text),
    signature=st.text("ab=&'\"#@:?/%", max_size=8).map("{}s3cr3t".format),
    before=st.sampled_from(
        ["", "GET ", "'", '("', "cannot read 'a', 'b' or ", "http://other ", "<"]
    ),
    after=st.sampled_from(
        ["", ": no such file", "' failed", '") failed', ", http://other/x", "\n"]
    ),
)
def test_secrets_of_urls_are_taken_out_of_any_text(password, signature, before, after):
    text = f"{before}https://me:{password}@host/x?sig={signature}{after}"
    shown = redact_text(text)
    assert "s3cr3t" not in shown
    assert shown.startswith(before)
    assert redact_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket: no object matches icon@2x.png",
        "http://host:80 refuses me@example.com",
        "http://[::1]:80/icon@2x.png",
        "s3://bucket/shard-?.tar",
        "dss://coco@v2/shards",
        "/data/a?b=c@d",
        "is it http://host/x? Yes",
    ],
)
def test_texts_without_secrets_stay_as_they_are(text):
    assert redact_text(text) == text


@pytest.mark.slow
def test_redaction_takes_linear_time():
    for part in ("a", "a:", "://", "'a://", "a://b:c ", "a://b:c@", "?a", "a://b?c=d "):
        start = time.process_time()
        redact_text(part * (400_000 // len(part)))
        assert time.process_time() - start < 5


def test_a_path_is_no_url():
    assert scheme_of("a:b/c") == scheme_of("/x://y") == scheme_of("C:\\x") == ""
    assert scheme_of("pipe:cat x") == "pipe"
    assert scheme_of("S3://bucket/x") == "s3"
