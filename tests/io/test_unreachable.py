"""A host that does not exist or never answers: an error of ours that says so, soon."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack

import pytest

from energon.errors import StorageError, StorageTimeoutError
from energon.io.backends import object_backend
from energon.io.files import forget_stores, open_store

HOST = "no-such-host.invalid"
URL = f"http://{HOST}:9000"


def _profile(kind, tmp_path):
    storage = {"type": "s3", "options": {"base_path": "bucket", "endpoint_url": URL}}
    keys = {"type": kind, "options": {"access_key": "a", "secret_key": "s"}}
    if kind == "FileBasedCredentials":
        path = tmp_path / "keys.json"
        path.write_text(json.dumps({"AccessKeyId": "a", "SecretAccessKey": "s", "Version": 1}))
        keys["options"] = {"credential_file_path": str(path)}
    profile = {"storage_provider": storage, "credentials_provider": keys}
    if kind == "FileBasedCredentials":
        profile["retry"] = {"attempts": 1, "delay": 0.01}
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {f"gone-{kind}": profile}}))
    return {"MSC_CONFIG": str(tmp_path / "msc.json")}


CASES = {
    "s3://bucket/x": lambda _: {
        "AWS_ENDPOINT_URL": URL,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "s",
    },
    "gs://bucket/x": lambda _: {"GOOGLE_BASE_URL": URL, "GOOGLE_BEARER_TOKEN": "t"},
    "az://bucket/x": lambda _: {
        "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=a;AccountKey=a2V5;BlobEndpoint={URL}/a"
    },
    f"{URL}/x": lambda _: {},
    "hf://datasets/me/x/y": lambda _: {"HF_ENDPOINT": URL},
    "ais://bucket/x": lambda _: {"AIS_ENDPOINT": URL},
    "msc://gone-S3Credentials/x": lambda tmp_path: _profile("S3Credentials", tmp_path),
    "msc://gone-FileBasedCredentials/x": lambda tmp_path: _profile(
        "FileBasedCredentials", tmp_path
    ),
    f"ftp://me:secret@{HOST}/x": lambda _: {},
}


@pytest.mark.slow
@pytest.mark.parametrize("address", CASES)
def test_a_host_that_does_not_exist_is_told(address, tmp_path, monkeypatch, quick_retries):
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "1")
    for name, value in CASES[address](tmp_path).items():
        monkeypatch.setenv(name, value)
    forget_stores()

    def ask(what):
        store, key = open_store(address)
        getattr(store, what)(key)

    asked = ["info", "read"] + (["list"] if address.startswith(("s3", "hf", "ais")) else [])
    for what in asked:
        with pytest.raises(
            StorageError, match="host name cannot be resolved|EndpointConnection"
        ) as caught:
            ask(what)
        assert "secret" not in str(caught.value)
    forget_stores()


@pytest.fixture
def silent():
    """A port that drops connections, like hosts behind firewalls: its queue is full."""
    with ExitStack() as sockets:
        server = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("scheme", ["http", "hf"])
def test_a_host_that_accepts_no_connection_is_given_up_early(
    silent, scheme, monkeypatch, caplog, quick_retries
):
    monkeypatch.setattr(object_backend, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr("energon.io.threads._reads_samples", True)  # in this process
    monkeypatch.setenv("ENERGON_STORAGE_REFUSED_SECONDS", "0.4")
    monkeypatch.setenv("HF_ENDPOINT", f"http://{silent}")
    forget_stores()
    address = {"http": f"http://{silent}/x", "hf": "hf://datasets/me/x/y"}[scheme]
    store, key = open_store(address)
    with pytest.raises(StorageTimeoutError, match=r"no connection in time.*REFUSED_SECONDS=0\.4"):
        list(store.list(key)) if scheme == "hf" else store.read(key)
    assert "accepted no connection in time; retrying" in caplog.text
    forget_stores()
