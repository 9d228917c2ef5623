"""Makers of the backends that obstore serves, by address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from energon.errors import ConfigError, EnergonError, StorageError
from energon.io.address import Address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.backends.object_backend import (
    Connect,
    ObjectBackend,
    connection_settings,
    info_of,
    object_library,
)
from energon.io.backends.s3 import s3_backend
from energon.io.backends.web_request import refused_redirect

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
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
    return WebBackend(origin, parts.root, {}, can_list=False)


class WebBackend(ObjectBackend):
    """Files of a web server, as different as these are.

    Args:
        origin: The root for messages, without secrets.
        root: What keys are appended to, before the query.
        headers: Sent with every request, but not to other hosts it redirects to.
        can_list: Whether it can say what it has.
    """

    def __init__(
        self, origin: str, root: str, headers: Mapping[str, str], *, can_list: bool = True
    ) -> None:
        self._root = root
        self._sent = headers
        super().__init__(origin, connect_web(root, headers), can_list=can_list, multipart=False)

    def head(self, key: str) -> ObjectInfo:
        try:
            return super().head(key)
        except StorageError as error:
            # HEAD may be refused, as for signed addresses, or be answered without a length.
            if error.transient:
                raise
            try:
                options: GetOptions = {"range": (0, 1)}
                found = self._library().get(self._open(), key, options=options)
                self._check(found, None, key)
                return info_of(found.meta)
            except Exception:
                raise error from None

    def _check(self, answer: GetResult, version: str | None, key: str) -> None:
        super()._check(answer, version, key)
        encoding = dict(answer.attributes).get("Content-Encoding")
        if encoding and not key.endswith(_COMPRESSED):
            raise StorageError(
                f"{self.origin}/{key}: the server compresses the answer ({encoding}), unasked; "
                "have the file served as it is"
            )

    def _translate(self, error: Exception, key: str) -> EnergonError:
        refused = None
        if "status code: 3" in str(error):
            base, mark, query = self._root.partition("?")
            url = f"{base}/{quote(key)}{mark}{query}"
            refused = refused_redirect(url, self._sent, f"{self.origin}/{key}")
        return super()._translate(error, key) if refused is None else refused


_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".br", ".Z")
"""Files that servers call encoded, though what is read are the files themselves."""


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
