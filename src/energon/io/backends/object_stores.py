"""Makers of the backends that obstore serves, by address: S3, Google, Azure, web servers, and such.

Credentials for S3, and for everything that speaks its protocol, come from where other tools find
them: the environment, then the profile in `~/.aws` (with boto3 for profiles that log in or assume
roles), then the machine's own role.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urljoin, urlsplit

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EnergonError,
    RangesNotSupportedError,
    StorageError,
    needs_extra,
)
from energon.io.address import Address, redact
from energon.io.backends.base import ObjectInfo, seconds_left
from energon.io.backends.object_backend import (
    READ_SECONDS,
    RESPONSE_CHUNK_BYTES,
    ObjectBackend,
    StoreArguments,
    ask,
    info_of,
    read_all,
    refused_redirect,
)
from energon.io.settings import AISTORE_PROVIDERS
from energon.messages import describe_error

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult


_KEY_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_STATIC = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
_DYNAMIC = ("sso_session", "sso_start_url", "role_arn", "credential_process")


def s3_backend(
    bucket: str, options: Mapping[str, Any] | None = None, *, look_up: bool = True
) -> ObjectBackend:
    """Return a bucket.

    Args:
        bucket: Its name.
        options: Settings of obstore's `S3Store`, which override those that are found.
        look_up: Whether to look for settings in the environment and in the profile.
    """

    def arguments() -> StoreArguments:
        config = {**(s3_options(os.environ) if look_up else {}), **(options or {})}
        provider = config.pop("credential_provider", None) or _static_provider(config)
        endpoint = str(config.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", ""))
        settings = {"config": config, "credential_provider": provider}
        return StoreArguments("S3Store", bucket, endpoint, settings)

    return ObjectBackend(f"s3://{bucket}", arguments)


def _static_provider(options: dict[str, Any]) -> Any:
    """Take the keys out of the settings, so that no token of the environment is added to them."""
    if "access_key_id" not in options:
        return None
    keys = {
        "access_key_id": options.pop("access_key_id"),
        "secret_access_key": options.pop("secret_access_key", ""),
        "token": options.pop("session_token", None),
        "expires_at": None,
    }
    return lambda: keys


def s3_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return settings of obstore's `S3Store` from the environment and the profile.

    Those that the library itself finds in the environment are not repeated.

    Raises:
        ConfigError: If AWS_PROFILE names a profile that does not exist.
        MissingExtraError: If the profile needs boto3, which is not installed.
    """
    options: dict[str, Any] = {}
    if endpoint := environment.get("AWS_ENDPOINT_URL_S3"):
        options["endpoint"] = endpoint
    if environment.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes"):
        options["skip_signature"] = True
    if not any(environment.get(name) for name in _KEY_SOURCES) and not options.get(
        "skip_signature"
    ):
        options = {**_profile_options(environment), **options}
    return options


def _profile_options(environment: Mapping[str, str]) -> dict[str, Any]:
    name = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
    profile = _read_profile(name or "default", environment)
    if profile is None:
        if name:
            raise ConfigError(
                f"AWS_PROFILE is {name!r}, which is neither in ~/.aws/credentials nor in "
                "~/.aws/config; add it with `aws configure`, or name another"
            )
        return {}
    options = {ours: profile[theirs] for theirs, ours in _STATIC.items() if theirs in profile}
    if environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"):
        options.pop("region", None)
    if environment.get("AWS_ENDPOINT_URL"):
        options.pop("endpoint", None)
    if any(key in profile for key in _DYNAMIC) and "access_key_id" not in options:
        options["credential_provider"] = _boto_provider(name or "default")
    return options


def _read_profile(name: str, environment: Mapping[str, str]) -> dict[str, str] | None:
    home = Path.home() / ".aws"
    files = {
        environment.get("AWS_SHARED_CREDENTIALS_FILE") or str(home / "credentials"): name,
        environment.get("AWS_CONFIG_FILE") or str(home / "config"): (
            name if name == "default" else f"profile {name}"
        ),
    }
    merged: dict[str, str] | None = None
    for path, section in files.items():
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read(os.path.expanduser(path))
        except configparser.Error as error:
            raise ConfigError(f"{path}: {type(error).__name__}; not an AWS profile file") from None
        if parser.has_section(section):
            merged = {**dict(parser[section]), **(merged or {})}
    return merged


def _boto_provider(profile: str) -> Any:
    with needs_extra(
        "s3", f"AWS profile {profile!r}, which logs in or assumes a role, needs boto3"
    ):
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    return Boto3CredentialProvider(boto3.session.Session(profile_name=profile))


def s3(parts: Address) -> ObjectBackend:
    """Return an S3 bucket."""
    return s3_backend(parts.root.partition("://")[2])


def gcs(parts: Address) -> ObjectBackend:
    """Return a bucket of Google Cloud Storage, or of its emulator."""
    bucket = parts.root.partition("://")[2]

    def arguments() -> StoreArguments:
        config: dict[str, Any] = {}
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        if emulator:
            url = emulator if "://" in emulator else f"http://{emulator}"
            # Any token will do, but without one the library looks for a real one to write.
            config = {"base_url": url.rstrip("/"), "bearer_token": "emulator"}
        base = str(config.get("base_url") or os.environ.get("GOOGLE_BASE_URL", ""))
        return StoreArguments("GCSStore", bucket, base, {"config": config})

    return ObjectBackend(f"gs://{bucket}", arguments)


def azure(parts: Address) -> ObjectBackend:
    """Return a container of Azure Blob Storage.

    Either `az://container`, of the account that the environment names, or
    `abfs://container@account.dfs.core.windows.net`.
    """
    container, _, host = parts.root.partition("://")[2].partition("@")
    origin = f"{parts.scheme}://{container}" + (f"@{host}" if host else "")

    def arguments() -> StoreArguments:
        config = azure_options(os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
        if host:
            config["account_name"] = host.partition(".")[0]
        named = config.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        if not named and not config.get("use_emulator"):
            raise ConfigError(
                f"{origin}: no storage account; set AZURE_STORAGE_ACCOUNT_NAME, or write "
                "abfs://CONTAINER@ACCOUNT.dfs.core.windows.net"
            )
        endpoint = str(config.get("endpoint") or os.environ.get("AZURE_STORAGE_ENDPOINT", ""))
        return StoreArguments("AzureStore", container, endpoint, {"config": config})

    return ObjectBackend(origin, arguments)


def azure_options(connection_string: str) -> dict[str, Any]:
    """Return a connection string as settings of obstore's `AzureStore`."""
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
    """Return the files of a web server. The query of the address is sent with every request."""
    origin = redact(parts.root.partition("?")[0])
    return WebBackend(origin, parts.root, {}, can_list=False)


class WebBackend(ObjectBackend):
    """Files of a web server, allowing for how much these differ.

    Args:
        origin: The root for messages, without secrets.
        root: What keys are appended to, before the query.
        headers: Sent with every request, but not to other hosts it redirects to.
        can_list: Whether it supports listing.
    """

    def __init__(
        self, origin: str, root: str, headers: Mapping[str, str], *, can_list: bool = True
    ) -> None:
        self._root = root
        self._sent = headers
        arguments = StoreArguments("HTTPStore", root, root, headers=headers)
        super().__init__(origin, lambda: arguments, can_list=can_list, multipart=False)

    def head(self, key: str) -> ObjectInfo:
        try:
            return super().head(key)
        except StorageError as error:
            # HEAD may be refused, as for signed addresses, or be answered without a length.
            if error.transient:
                raise
            try:
                options: GetOptions = {"range": (0, 1)}
                answer = self._library().get(self._open(), key, options=options)
                self._check(answer, None, key)
                return info_of(answer.meta)
            except Exception:
                raise error from None

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        try:
            yield from super().stream(key, start, version)
        except RangesNotSupportedError:
            # The library refuses answers without a length, or of the whole for a part.
            yield from self._stream_whole(key, start)

    def _stream_whole(self, key: str, start: int) -> Iterator[bytes]:
        """Yield a file from byte `start`, however the server sends the whole of it."""
        address = f"{self.origin}/{key}"
        request = urllib.request.Request(self._url(key), headers=dict(self._sent))
        with ask(request, address, access="") as answer:
            self._check_encoding(answer.headers.get("Content-Encoding"), key)
            while part := answer.read1(RESPONSE_CHUNK_BYTES):
                if not seconds_left(READ_SECONDS):
                    raise StorageError(f"{address}: no answer in time", transient=True)
                wanted, start = part[start:], max(0, start - len(part))
                if wanted:
                    yield wanted

    def _check(self, answer: GetResult, version: str | None, key: str) -> None:
        super()._check(answer, version, key)
        self._check_encoding(dict(answer.attributes).get("Content-Encoding"), key)

    def _check_encoding(self, encoding: str | None, key: str) -> None:
        if encoding and not key.endswith(_COMPRESSED):
            raise StorageError(
                f"{self.origin}/{key}: the server compresses the answer ({encoding}), unasked; "
                "have the file served as it is"
            )

    def _translate(self, error: Exception, key: str) -> EnergonError:
        refused = None
        if "status code: 3" in str(error):
            refused = refused_redirect(self._url(key), self._sent, f"{self.origin}/{key}")
        return super()._translate(error, key) if refused is None else refused

    def _url(self, key: str) -> str:
        base, mark, query = self._root.partition("?")
        return f"{base}/{quote(key)}{mark}{query}"


_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".br", ".Z")
"""Files that servers declare as encoded, although their encoding is part of the file."""


class AIStore(WebBackend):
    """A bucket of AIStore, `ais://BUCKET`, or a cloud bucket behind it.

    The gateway redirects each request to the target that has the object. With USE_AIS_FOR=s3:gs,
    addresses with these schemes go to AIStore too.

    Raises:
        ConfigError: If AIS_ENDPOINT is not set.
    """

    def __init__(self, parts: Address) -> None:
        endpoint = os.environ.get("AIS_ENDPOINT", "").rstrip("/")
        if not endpoint:
            raise ConfigError(
                f"{parts.root}: set AIS_ENDPOINT to the address of AIStore, such as "
                "http://host:51080"
            )
        bucket = parts.root.partition("://")[2]
        token = os.environ.get("AIS_AUTHN_TOKEN")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._objects = f"{endpoint}/v1/objects/{bucket}"
        self._query = f"?provider={AISTORE_PROVIDERS[parts.scheme]}"
        super().__init__(parts.root, self._objects + self._query, self._headers)
        # Its own way to list wants a GET with a body; that of its S3 interface does not.
        options = {"endpoint": f"{endpoint}/s3", "skip_signature": True, "region": "us-east-1"}
        self._listing = s3_backend(bucket, options, look_up=False)

    def head(self, key: str) -> ObjectInfo:
        info = super().head(key)
        # A version that is only a date may be that of the last access.
        is_tag = info.version is not None and info.version.startswith('"')
        return info if is_tag else info._replace(version=None)

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        # The gateway takes no content: it says where to send it.
        url = f"{self._objects}/{quote(key)}{self._query}"
        with self._ask(url, None, 0, key) as answer:
            target = urljoin(url, answer.headers.get("Location") or url)
        with ExitStack() as files:
            if isinstance(content, bytes):
                files.enter_context(self._ask(target, content, len(content), key))
            else:
                file = files.enter_context(open(content, "rb"))
                files.enter_context(self._ask(target, file, os.path.getsize(content), key))

    def _ask(self, url: str, body: Any, size: int, key: str) -> AbstractContextManager[Any]:
        headers = {**self._headers, "content-length": str(size)}
        request = urllib.request.Request(url, data=body, headers=headers, method="PUT")
        return ask(request, f"{self.origin}/{key}", access="set AIS_AUTHN_TOKEN")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for info in self._listing.list(prefix):
            yield info._replace(version=None)


HUB_ENDPOINT = "https://huggingface.co"
_REPOSITORY_KINDS = ("datasets", "spaces")
_NEXT_PAGE = re.compile(r'<([^>]+)>;\s*rel="next"')


def find_token() -> str | None:
    """Return the token of the environment, or that of `hf auth login`."""
    if token := os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return token.strip()
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


class HuggingFaceHub(WebBackend):
    """A repository of the Hugging Face Hub, `hf://datasets/USER/REPO@REVISION`.

    HF_ENDPOINT is used, and HF_TOKEN or the token of a log-in. The hub redirects to the server that
    has the content; the token is not sent there.
    """

    def __init__(self, parts: Address) -> None:
        repository, _, revision = parts.root.partition("://")[2].partition("@")
        revision = quote(revision or "main", safe="")
        kind = repository.partition("/")[0]
        api = repository if kind in _REPOSITORY_KINDS else f"models/{repository}"
        endpoint = (os.environ.get("HF_ENDPOINT") or HUB_ENDPOINT).rstrip("/")
        token = find_token()
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._tree = f"{endpoint}/api/{api}/tree/{revision}"
        files = f"{endpoint}/{repository}/resolve/{revision}"
        super().__init__(parts.root, files, self._headers)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        url: str | None = f"{self._tree}/{quote(prefix)}".rstrip("/") + "?recursive=true"
        while url is not None:
            try:
                infos, url = self._page(url, prefix)
            except DatasetNotFoundError:
                return
            yield from infos

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        raise self._read_only(key)

    def delete(self, key: str) -> None:
        raise self._read_only(key)

    def _read_only(self, key: str) -> StorageError:
        return StorageError(
            f"{self.origin}/{key}: energon does not write to the hub; use `hf upload`"
        )

    def _page(self, url: str, prefix: str) -> tuple[Sequence[ObjectInfo], str | None]:
        """Return one page of a listing, and the address of the next."""
        address = f"{self.origin}/{prefix}"
        request = urllib.request.Request(url, headers=self._headers)
        with ask(request, address, access="set HF_TOKEN, or log in with `hf auth login`") as answer:
            link = _NEXT_PAGE.search(answer.headers.get("Link") or "")
            data = read_all(answer, address)
        following = link[1] if link else None
        try:
            if following and urlsplit(following)[:2] != urlsplit(url)[:2]:
                raise ValueError("the next page is on another server")
            # A listing lacks the tag that reading a file returns.
            files = [entry for entry in json.loads(data) if entry["type"] == "file"]
            return [ObjectInfo(str(e["path"]), int(e["size"])) for e in files], following
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StorageError(
                f"{address}: the answer of the hub is not a listing ({describe_error(error)})"
            ) from error
