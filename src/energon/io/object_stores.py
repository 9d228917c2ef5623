"""Makers of the backends that obstore serves, by address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from energon.errors import ConfigError
from energon.io.address import Address, redact
from energon.io.object_backend import (
    Connect,
    ObjectBackend,
    connection_settings,
    object_library,
)
from energon.io.s3 import s3_backend

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def s3(parts: Address) -> ObjectBackend:
    """Return an S3 bucket."""
    return s3_backend(parts.root.partition("://")[2])


def gcs(parts: Address, options: dict[str, Any] | None = None) -> ObjectBackend:
    """Return a bucket of Google Cloud Storage, or of its emulator."""
    bucket = parts.root.partition("://")[2]
    origin = f"gs://{bucket}"

    def connect(seconds: float) -> ObjectStore:
        object_library(origin)
        from obstore.store import GCSStore

        found: dict[str, Any] = dict(options or {})
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        if emulator and not found:
            url = emulator if "://" in emulator else f"http://{emulator}"
            # Any token will do, but without one the library looks for a real one to write.
            found = {"base_url": url.rstrip("/"), "bearer_token": "emulator"}
        base = str(found.get("base_url") or os.environ.get("GOOGLE_BASE_URL", ""))
        return GCSStore(
            bucket,
            config=found,  # type: ignore[arg-type]
            **connection_settings(seconds, base),
        )

    return ObjectBackend(origin, connect)


def azure(parts: Address, options: dict[str, Any] | None = None) -> ObjectBackend:
    """Return a container of Azure Blob Storage.

    Either `az://container`, of the account that the environment names, or
    `abfs://container@account.dfs.core.windows.net`.
    """
    container, _, host = parts.root.partition("://")[2].partition("@")
    origin = f"{parts.scheme}://{container}" + (f"@{host}" if host else "")

    def connect(seconds: float) -> ObjectStore:
        object_library(origin)
        from obstore.store import AzureStore

        found = {
            **azure_options(os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")),
            **(options or {}),
        }
        if host:
            found["account_name"] = host.partition(".")[0]
        named = found.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        if not named and not found.get("use_emulator"):
            raise ConfigError(
                f"{origin}: no storage account; set AZURE_STORAGE_ACCOUNT_NAME, or write "
                "abfs://CONTAINER@ACCOUNT.dfs.core.windows.net"
            )
        endpoint = str(found.get("endpoint") or os.environ.get("AZURE_STORAGE_ENDPOINT", ""))
        return AzureStore(
            container,
            config=found,  # type: ignore[arg-type]
            **connection_settings(seconds, endpoint),
        )

    return ObjectBackend(origin, connect)


def azure_options(connection_string: str) -> dict[str, Any]:
    """Return what a connection string says, as settings of obstore's `AzureStore`."""
    entries = dict(
        entry.partition("=")[::2] for entry in connection_string.split(";") if "=" in entry
    )
    names = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "BlobEndpoint": "endpoint",
        "SharedAccessSignature": "sas_key",
    }
    return {ours: entries[theirs] for theirs, ours in names.items() if entries.get(theirs)}


def web(parts: Address) -> ObjectBackend:
    """Return the files of a web server. What the address has as a query goes with every request."""
    origin = redact(parts.root.partition("?")[0])
    return ObjectBackend(origin, connect_web(parts.root, {}), can_list=False, multipart=False)


def connect_web(root: str, headers: Mapping[str, str]) -> Connect:
    """Return what connects to a web server.

    Args:
        root: What keys are appended to, before the query.
        headers: Sent with every request, but not to other hosts it redirects to.
    """

    def connect(seconds: float) -> ObjectStore:
        object_library(redact(root))
        from obstore.store import HTTPStore

        return HTTPStore(root, **connection_settings(seconds, root, headers))

    return connect
