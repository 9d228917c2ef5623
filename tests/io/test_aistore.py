"""AIStore: what the store suite does not show."""

from __future__ import annotations

import pytest

from energon.errors import ConfigError, StorageAccessError, StorageError
from energon.io.files import forget_stores, open_store
from energon.io.settings import goes_to_aistore
from tests.servers.aistore import aistore

TOKEN = "a-secret-token"


@pytest.fixture
def gateway(tmp_path, monkeypatch, request):
    with aistore(tmp_path, token=TOKEN, tags=getattr(request, "param", True)) as gateway:
        monkeypatch.setenv("AIS_ENDPOINT", f"http://127.0.0.1:{gateway.server_address[1]}/")
        monkeypatch.setenv("AIS_AUTHN_TOKEN", TOKEN)
        forget_stores()
        yield gateway
    forget_stores()


@pytest.mark.parametrize(("scheme", "provider"), [("s3", "aws"), ("gs", "gcp"), ("az", "azure")])
def test_buckets_of_clouds_are_read_through_it_if_the_environment_says_so(
    gateway, monkeypatch, scheme, provider
):
    monkeypatch.setenv("USE_AIS_FOR", "s3:gs:az")
    forget_stores()
    store, key = open_store(f"{scheme}://bucket/x.bin")
    store.write(key, b"content")
    assert store.read_range(key, 1, 3) == b"on"
    assert [found.key for found in store.list()] == ["x.bin"]
    assert gateway.providers == {provider}
    assert not goes_to_aistore("http")


def test_without_an_endpoint_it_says_what_to_set(monkeypatch):
    monkeypatch.delenv("AIS_ENDPOINT", raising=False)
    forget_stores()
    with pytest.raises(ConfigError, match="set AIS_ENDPOINT"):
        open_store("ais://bucket/x")


def test_a_refused_token_is_told_without_the_token(gateway, monkeypatch):
    monkeypatch.setenv("AIS_AUTHN_TOKEN", "another-secret")
    forget_stores()
    store, key = open_store("ais://bucket/x")
    for ask in (lambda: store.write(key, b"x"), lambda: store.read(key)):
        with pytest.raises(StorageAccessError, match="access denied, 401") as caught:
            ask()
        assert "another-secret" not in str(caught.value)


@pytest.mark.parametrize("gateway", [True, False], indirect=True, ids=["tags", "dates"])
def test_the_date_of_an_object_is_no_version_for_it_may_be_that_of_the_last_access(
    gateway, request
):
    store, key = open_store("ais://bucket/x")
    store.write(key, b"content")
    assert (store.info(key).version is not None) == ("tags" in request.node.name)


def test_names_that_cannot_be_redirected_are_told(gateway):
    store, key = open_store("ais://bucket/a[1].tar")
    with pytest.raises(StorageError, match=r"names with \[ or \]: rename"):
        store.read(key)
