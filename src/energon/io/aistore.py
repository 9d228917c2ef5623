"""AIStore: `ais://BUCKET/KEY`, and buckets of clouds that it stands in front of.

The gateway answers with a redirect to the target that has the object. With USE_AIS_FOR=s3:gs,
addresses of these schemes go to AIStore, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from energon.errors import ConfigError
from energon.io.address import Address
from energon.io.backend import ObjectInfo
from energon.io.object_backend import ObjectBackend
from energon.io.object_stores import connect_web
from energon.io.s3 import s3_backend

PROVIDERS = {"ais": "ais", "s3": "aws", "gs": "gcp", "az": "azure"}


def aistore(parts: Address) -> ObjectBackend:
    """Return a bucket.

    Raises:
        ConfigError: If AIS_ENDPOINT does not say where AIStore is.
    """
    endpoint = os.environ.get("AIS_ENDPOINT")
    if not endpoint:
        raise ConfigError(
            f"{parts.root}: set AIS_ENDPOINT to the address of AIStore, as http://host:51080"
        )
    return _AIStore(parts, endpoint.rstrip("/"))


def goes_to_aistore(scheme: str) -> bool:
    """Return whether the environment sends a scheme to AIStore."""
    return scheme in PROVIDERS and scheme in os.environ.get("USE_AIS_FOR", "").split(":")


class _AIStore(ObjectBackend):
    def __init__(self, parts: Address, endpoint: str) -> None:
        bucket = parts.root.partition("://")[2]
        token = os.environ.get("AIS_AUTHN_TOKEN")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        root = f"{endpoint}/v1/objects/{bucket}?provider={PROVIDERS[parts.scheme]}"
        super().__init__(parts.root, connect_web(root, headers), multipart=False)
        # Its own way to list wants a GET with a body; that of its S3 interface does not.
        options = {"endpoint": f"{endpoint}/s3", "skip_signature": True, "region": "us-east-1"}
        self._listing = s3_backend(bucket, options, look_up=False)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for found in self._listing.list(prefix):
            yield found._replace(version=None)
