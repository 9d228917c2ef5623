"""Profiles: which there are, and what they stand for. Reading is tested by the store suite."""

from __future__ import annotations

import json

import pytest

from energon.errors import ConfigError
from energon.io.files import forget_stores, open_store
from tests.servers.clouds import AZURE_ACCOUNT, AZURE_KEY
from tests.servers.places import BUCKET


@pytest.fixture
def configure(monkeypatch, tmp_path):
    """Return what writes the profiles that there are, and nothing else is known."""
    for name in ("MSC_CONFIG", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    forget_stores()

    def write(path="config/msc/config.yaml", *, text=None, **profiles):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text or json.dumps({"profiles": profiles}))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        return target

    yield write
    forget_stores()


def roundtrip(address):
    store, key = open_store(address)
    store.write(key, b"content")
    assert store.read_range(key, 1, 3) == b"on"


def storage(kind, **options):
    return {"storage_provider": {"type": kind, "options": options}}


def test_a_profile_of_files_is_a_folder(configure, tmp_path):
    configure(data=storage("file", base_path=str(tmp_path / "data")))
    roundtrip("msc://data/x/y")
    assert (tmp_path / "data/x/y").read_bytes() == b"content"


def test_the_profile_that_is_always_there_is_the_file_system(configure, tmp_path):
    roundtrip(f"msc://__filesystem__{tmp_path}/x")
    assert (tmp_path / "x").read_bytes() == b"content"


def test_a_profile_of_azure_has_a_key_or_a_connection(configure, azurite_port):
    endpoint = f"http://127.0.0.1:{azurite_port}/{AZURE_ACCOUNT}"
    connection = f"AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};BlobEndpoint={endpoint}"
    named = {"account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY}
    given = {"type": "AzureCredentials", "options": {"connection": connection}}
    configure(
        one={**storage("azure", base_path=BUCKET), "credentials_provider": given},
        two={
            **storage("azure", base_path=BUCKET, endpoint_url=endpoint),
            "credentials_provider": {"options": named},
        },
    )
    roundtrip("msc://one/x")
    roundtrip("msc://two/x")


def test_without_a_base_path_the_first_part_names_the_bucket(configure, moto_port, monkeypatch):
    from tests.servers.clouds import S3_KEY, S3_SECRET

    monkeypatch.setenv("THE_SECRET", S3_SECRET)
    keys = {"access_key": S3_KEY, "secret_key": "${THE_SECRET}"}
    endpoint = f"http://127.0.0.1:{moto_port}"
    configure(
        all={
            **storage("s3", endpoint_url=endpoint, region_name="us-east-1"),
            "credentials_provider": {"type": "S3Credentials", "options": keys},
        }
    )
    roundtrip(f"msc://all/{BUCKET}/profiles/x")
    store, _ = open_store("msc://all/")
    assert [found.key for found in store.list(f"{BUCKET}/profiles")] == [f"{BUCKET}/profiles/x"]


def test_a_remote_of_rclone_may_be_an_alias_of_a_folder(configure, tmp_path):
    configure(
        "config/rclone/rclone.conf", text=f"[here]\ntype = alias\nremote = {tmp_path / 'data'}\n"
    )
    roundtrip("rclone://here/x")
    assert (tmp_path / "data/x").read_bytes() == b"content"


def test_a_name_that_is_unknown_says_where_it_was_looked_for(configure, tmp_path):
    with pytest.raises(ConfigError, match=r"no profile 'nobody'; looked in no configuration file"):
        open_store("msc://nobody/x")
    path = configure(data=storage("file"))
    with pytest.raises(ConfigError, match=rf"no profile 'nobody'; looked in {path}"):
        open_store("msc://nobody/x")


@pytest.mark.parametrize("text", ["profiles: [", "- a", "secret_key: {"])
def test_a_file_that_is_none_is_named_and_not_quoted(configure, text):
    configure(text=text)
    with pytest.raises(ConfigError, match=r"config\.yaml: ") as caught:
        open_store("msc://data/x")
    assert "secret_key" not in str(caught.value)


def test_a_remote_of_a_type_that_is_not_served_is_named(configure):
    configure("config/rclone/rclone.conf", text="[tape]\ntype = tape\n")
    with pytest.raises(ConfigError, match="type 'tape'; supported are s3"):
        open_store("rclone://tape/x")
