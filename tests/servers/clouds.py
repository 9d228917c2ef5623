"""Servers that stand for the object stores of clouds, from packages of the registries."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

from tests.servers.process import find_program, free_port, lack, running

S3_KEY, S3_SECRET = "AKTEST", "SKTEST"
AZURE_ACCOUNT = "tests"
AZURE_KEY = base64.b64encode(b"a key for tests").decode()


@contextlib.contextmanager
def moto() -> Iterator[int]:
    """S3 for small objects, started in a second; takes any credentials. Yields its port."""
    program = find_program("moto_server")
    with contextlib.ExitStack() as stack:
        for tries_left in (2, 1, 0):
            port = free_port()
            try:
                stack.enter_context(running([program, "-p", str(port)], port))
                break
            except RuntimeError:  # someone else has taken the port meanwhile
                if not tries_left:
                    raise
        yield port


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[int]:
    """Azure Blob Storage; checks signatures. Yields its port."""
    port = free_port()
    command = [find_program("azurite-blob"), "--silent", "--disableTelemetry"]
    command += ["--skipApiVersionCheck", "--blobPort", str(port), "--location", str(folder)]
    accounts = f"{AZURE_ACCOUNT}:{AZURE_KEY}"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(running(command, port, environment={"AZURITE_ACCOUNTS": accounts}))
        except RuntimeError as exc:  # Node.js is missing or too old
            lack("Azurite", str(exc))
        yield port


def make_bucket(port: int, name: str, *, access: str = "private") -> None:
    """Make a bucket of an S3 server, which object-store clients cannot."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=S3_KEY,
        aws_secret_access_key=S3_SECRET,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=name, ACL=access)


def make_container(port: int, name: str) -> None:
    """Make a container of Azurite, with a request that is signed with the shared key."""
    date = formatdate(usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    path = f"/{AZURE_ACCOUNT}/{name}"
    resource = f"/{AZURE_ACCOUNT}{path}\nrestype:container"
    text = "PUT" + "\n" * 12 + headers + resource
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    signature = base64.b64encode(digest).decode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Authorization": f"SharedKey {AZURE_ACCOUNT}:{signature}",
        },
    )
    with urllib.request.urlopen(request, timeout=10):
        pass
