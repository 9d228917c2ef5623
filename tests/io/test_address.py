from __future__ import annotations

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


@given(
    secret=st.text("abcdefgh0123456789%+", min_size=4, max_size=12),
    text=st.text("xyz ", max_size=9),
)
def test_secrets_of_urls_are_taken_out_of_any_text(secret, text):
    for url in (f"https://me:{secret}@host/x", f"https://host/x?sig={secret}&se=1"):
        assert secret not in redact(f"{text} {url} {text}")
        assert "host/x" in redact(url)


def test_a_path_is_no_url():
    assert scheme_of("a:b/c") == scheme_of("/x://y") == scheme_of("C:\\x") == ""
    assert scheme_of("pipe:cat x") == "pipe"
    assert scheme_of("S3://bucket/x") == "s3"
