"""Configurations that the documentation names, each against a server that checks what it can."""

from __future__ import annotations

import uuid

import pytest

from energon.errors import ConfigError, StorageAccessError
from energon.io.files import forget_stores, open_store
from energon.io.settings import RENEW_SECONDS
from tests.servers.clouds import AZURE_ACCOUNT, AZURE_KEY, S3_KEY, S3_SECRET, make_bucket
from tests.servers.places import BUCKET

VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_CONNECTION_STRING",
)


@pytest.fixture
def configure(monkeypatch, tmp_path):
    """Return what sets the environment of one configuration, and nothing else."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def set_all(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        forget_stores()

    yield set_all
    forget_stores()


@pytest.fixture(scope="module")
def public(moto_port):
    """The name of a bucket that anybody may use."""
    make_bucket(moto_port, "public", access="public-read-write")
    return "public"


def check(address):
    """Write, read and list at an address."""
    store, key = open_store(f"{address}/{uuid.uuid4().hex}")
    store.write(f"{key}/x", b"content")
    assert store.read_range(f"{key}/x", 1, 3) == b"on"
    assert [found.key for found in store.list(key)] == [f"{key}/x"]


@pytest.mark.slow  # as Ceph is, and no other server here checks keys
def test_s3_by_the_profile_of_the_aws_tools(configure, ceph_port, tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        f"[team]\naws_access_key_id = {S3_KEY}\naws_secret_access_key = {S3_SECRET}\n"
    )
    (tmp_path / ".aws/config").write_text(
        f"[profile team]\nregion = us-east-1\nendpoint_url = http://127.0.0.1:{ceph_port}\n"
    )
    configure(AWS_PROFILE="team")
    check(f"s3://{BUCKET}")
    check(f"s3a://{BUCKET}")
    configure(AWS_PROFILE="nobody")
    store, key = open_store(f"s3://{BUCKET}/x")
    with pytest.raises(ConfigError, match="AWS_PROFILE is 'nobody'"):
        store.read(key)


@pytest.mark.slow  # as Ceph is, and no other server here checks keys
def test_keys_that_the_server_refuses_are_looked_up_anew(configure, ceph_port, tmp_path):
    (tmp_path / ".aws").mkdir()

    def write_keys(secret):
        (tmp_path / ".aws/credentials").write_text(
            f"[default]\naws_access_key_id = {S3_KEY}\naws_secret_access_key = {secret}\n"
        )

    configure(AWS_ENDPOINT_URL=f"http://127.0.0.1:{ceph_port}", AWS_REGION="us-east-1")
    write_keys("rotated away")
    store, key = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    with pytest.raises(StorageAccessError, match="access denied, 403") as caught:
        store.write(key, b"content")
    assert "rotated" not in str(caught.value)
    write_keys(S3_SECRET)
    store.retries._renewed_at -= RENEW_SECONDS  # a minute later
    store.write(key, b"content")
    assert store.read(key) == b"content"


def test_public_buckets_without_credentials(configure, moto_port, public):
    configure(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{moto_port}",
        AWS_REGION="us-east-1",
        AWS_NO_SIGN_REQUEST="1",
    )
    check(f"s3://{public}")


def test_google_by_the_variable_of_emulators(configure, moto_port):
    configure(STORAGE_EMULATOR_HOST=f"127.0.0.1:{moto_port}")
    check(f"gs://{BUCKET}")
    check(f"gcs://{BUCKET}")


@pytest.mark.slow
def test_azure_by_account_and_key(configure, azurite_port):
    configure(
        AZURE_STORAGE_ACCOUNT_NAME=AZURE_ACCOUNT,
        AZURE_STORAGE_ACCOUNT_KEY=AZURE_KEY,
        AZURE_STORAGE_ENDPOINT=f"http://127.0.0.1:{azurite_port}/{AZURE_ACCOUNT}",
    )
    check(f"az://{BUCKET}")
    check(f"abfs://{BUCKET}@{AZURE_ACCOUNT}.dfs.core.windows.net")


def test_azure_without_an_account_says_what_to_set(configure):
    configure()
    store, key = open_store(f"az://{BUCKET}/x")
    with pytest.raises(ConfigError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        store.read(key)
