"""Places to store objects in, as fixtures: every server that tests can have, behind a proxy."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from energon.io.files import forget_stores
from tests.servers.aistore import aistore
from tests.servers.ceph import ceph_gateway
from tests.servers.clouds import (
    AZURE_ACCOUNT,
    AZURE_KEY,
    S3_KEY,
    S3_SECRET,
    azurite,
    make_bucket,
    make_container,
    moto,
)
from tests.servers.proxy import FaultProxy
from tests.servers.web import web_server

BUCKET = "bucket"


@dataclass
class Place:
    """Where a test may write.

    Args:
        address: A folder of its own.
        proxy: What all requests go through; None for no server.
        can_list: Whether the place can say what it holds.
        environment: How clients find it.
        secrets: What must never be shown to anybody.
    """

    address: str
    proxy: FaultProxy | None = None
    can_list: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()


def s3_environment(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": S3_KEY,
        "AWS_SECRET_ACCESS_KEY": S3_SECRET,
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def shared(
    folder: Path, start: Callable[[], AbstractContextManager[int]], make: Callable[[int, str], None]
) -> Iterator[int]:
    """Yield the port of a server that runs once for all processes of a test run.

    The process that comes first starts it, makes the bucket, and waits at its end until no other
    process uses the server. A process that is killed uses it no more.

    Args:
        folder: Where the processes find each other.
        start: Runs the server until the end of the block.
        make: Makes a bucket, given the port and a name.
    """
    folder.mkdir(exist_ok=True)
    known = folder / "port"
    with open(folder / "starting", "w") as starting, open(folder / "users", "w") as users:
        fcntl.flock(starting, fcntl.LOCK_EX)
        if known.exists():
            fcntl.flock(users, fcntl.LOCK_SH)
            fcntl.flock(starting, fcntl.LOCK_UN)
            try:
                yield int(known.read_text())
            finally:
                fcntl.flock(users, fcntl.LOCK_UN)  # of forks that are left, too
            return
        with start() as port:
            make(port, BUCKET)
            known.write_text(str(port))
            fcntl.flock(starting, fcntl.LOCK_UN)
            yield port
            fcntl.flock(starting, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_EX)
            known.unlink()


def _of_all_processes(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that all processes of a test run have in common."""
    own = factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name


@pytest.fixture(scope="session")
def moto_port(tmp_path_factory) -> Iterator[int]:
    with shared(_of_all_processes(tmp_path_factory, "moto"), moto, make_bucket) as port:
        yield port


@pytest.fixture(scope="session")
def ceph_port(tmp_path_factory) -> Iterator[int]:
    with shared(_of_all_processes(tmp_path_factory, "ceph"), ceph_gateway, make_bucket) as port:
        yield port


@pytest.fixture(scope="session")
def azurite_port(tmp_path_factory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("azurite")
    place = _of_all_processes(tmp_path_factory, "azurite-of-all")
    with shared(place, lambda: azurite(folder), make_container) as port:
        yield port


@pytest.fixture
def quick_retries(monkeypatch) -> None:
    """Wait for milliseconds where users wait for seconds, and give up as soon."""
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "10")
    monkeypatch.setenv("ENERGON_STORAGE_FIRST_WAIT_SECONDS", "0.001")
    monkeypatch.setenv("ENERGON_STORAGE_LONGEST_WAIT_SECONDS", "0.01")


def open_place(kind: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Yield a place of a kind, with the environment that it needs."""
    monkeypatch = request.getfixturevalue("monkeypatch")
    cache = request.getfixturevalue("tmp_path") / "cache"
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(cache))
    for place in _MAKERS[kind](request):
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        forget_stores()
        yield place
        forget_stores()


def _local(request: pytest.FixtureRequest) -> Iterator[Place]:
    yield Place(str(request.getfixturevalue("tmp_path") / "files"))


def _s3(request: pytest.FixtureRequest, port: int) -> Iterator[Place]:
    with FaultProxy(port) as proxy:
        yield Place(
            f"s3://{BUCKET}/{uuid.uuid4().hex}",
            proxy,
            environment=s3_environment(proxy.port),
            secrets=(S3_SECRET,),
        )


def _moto(request: pytest.FixtureRequest) -> Iterator[Place]:
    yield from _s3(request, request.getfixturevalue("moto_port"))


def _ceph(request: pytest.FixtureRequest) -> Iterator[Place]:
    yield from _s3(request, request.getfixturevalue("ceph_port"))


def _gcs(request: pytest.FixtureRequest) -> Iterator[Place]:
    # The XML API of Google Cloud Storage is that of S3, but for the signatures.
    with FaultProxy(request.getfixturevalue("moto_port")) as proxy:
        yield Place(
            f"gs://{BUCKET}/{uuid.uuid4().hex}",
            proxy,
            environment={"GOOGLE_BASE_URL": proxy.url, "GOOGLE_BEARER_TOKEN": "a-secret-token"},
            secrets=("a-secret-token",),
        )


def _azure(request: pytest.FixtureRequest) -> Iterator[Place]:
    with FaultProxy(request.getfixturevalue("azurite_port")) as proxy:
        yield Place(
            f"az://{BUCKET}/{uuid.uuid4().hex}",
            proxy,
            environment={
                "AZURE_STORAGE_CONNECTION_STRING": (
                    f"AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
                    f"BlobEndpoint={proxy.url}/{AZURE_ACCOUNT}"
                )
            },
            secrets=(AZURE_KEY,),
        )


def _web(request: pytest.FixtureRequest) -> Iterator[Place]:
    folder = request.getfixturevalue("tmp_path") / "web"
    folder.mkdir()
    with web_server(folder, token="a-secret-signature") as server, FaultProxy(server.port) as proxy:
        yield Place(
            f"{proxy.url}/data?sig=a-secret-signature",
            proxy,
            can_list=False,
            secrets=("a-secret-signature",),
        )


def _msc(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A profile of multi-storage-client."""
    path = request.getfixturevalue("tmp_path") / "msc.json"
    with FaultProxy(request.getfixturevalue("moto_port")) as proxy:
        keys = {"access_key": S3_KEY, "secret_key": "${THE_SECRET}"}
        base = f"{BUCKET}/{uuid.uuid4().hex}"
        storage = {"base_path": base, "endpoint_url": proxy.url, "region_name": "us-east-1"}
        profile = {
            "storage_provider": {"type": "s3", "options": storage},
            "credentials_provider": {"type": "S3Credentials", "options": keys},
        }
        name = f"test-{uuid.uuid4().hex}"  # its client remembers profiles
        path.write_text(json.dumps({"profiles": {name: profile}}))
        yield Place(
            f"msc://{name}/data",
            proxy,
            environment={"MSC_CONFIG": str(path), "THE_SECRET": S3_SECRET},
            secrets=(S3_SECRET,),
        )


def _aistore(request: pytest.FixtureRequest) -> Iterator[Place]:
    folder = request.getfixturevalue("tmp_path") / "aistore"
    folder.mkdir()
    with (
        aistore(folder, token="a-secret-token") as gateway,
        FaultProxy(gateway.server_address[1]) as proxy,
    ):
        yield Place(
            f"ais://{BUCKET}/data",
            proxy,
            environment={"AIS_ENDPOINT": proxy.url, "AIS_AUTHN_TOKEN": "a-secret-token"},
            secrets=("a-secret-token",),
        )


def _fsspec(request: pytest.FixtureRequest) -> Iterator[Place]:
    pytest.importorskip("fsspec")
    yield Place(f"memory://{uuid.uuid4().hex}/data")


_MAKERS = {
    "local": _local,
    "moto": _moto,
    "ceph": _ceph,
    "gcs": _gcs,
    "azure": _azure,
    "web": _web,
    "msc": _msc,
    "aistore": _aistore,
    "fsspec": _fsspec,
}
KINDS = tuple(_MAKERS)
SERVERS = tuple(kind for kind in KINDS if kind not in ("local", "fsspec", "msc"))
