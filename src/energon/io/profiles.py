"""Stores named by a profile: `msc://PROFILE/PATH`, and `rclone://`, its older name.

Profiles come from the configuration files of multi-storage-client and rclone. Our own backends
serve the common kinds, so neither has to be installed; multi-storage-client serves the rest. A
profile may stand for a folder of a bucket, or for many buckets.
"""

from __future__ import annotations

import configparser
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from energon.errors import ConfigError
from energon.io.address import Address
from energon.io.backends.base import Backend, ObjectInfo
from energon.io.backends.local import LocalBackend
from energon.io.backends.object_stores import azure, azure_options, gcs, s3_backend


class PlacedKey(NamedTuple):
    """Where a key really is."""

    backend: Backend
    key: str


class PlacedBackend:
    """Forwards every request to the backend that `find` returns.

    Args:
        origin: The root for messages.
        find: Returns the backend and key for a key. Keys of one folder share a backend.
    """

    can_range = True
    can_list = True

    def __init__(self, origin: str, find: Callable[[str], PlacedKey]) -> None:
        self.origin = origin
        self._find = find

    def get(self, key: str, start: int, stop: int, version: str | None) -> bytes:
        backend, inner = self._find(key)
        return backend.get(inner, start, stop, version)

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        backend, inner = self._find(key)
        return backend.stream(inner, start, version)

    def head(self, key: str) -> ObjectInfo:
        backend, inner = self._find(key)
        return backend.head(inner)._replace(key=key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        backend, inner = self._find(prefix)
        for found in backend.list(inner):
            below = found.key[len(inner) :].lstrip("/")
            yield found._replace(key=f"{prefix}/{below}" if prefix else below)

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        backend, inner = self._find(key)
        backend.put(inner, content)

    def delete(self, key: str) -> None:
        backend, inner = self._find(key)
        backend.delete(inner)


def below_folder(origin: str, backend: Backend, folder: str) -> PlacedBackend:
    """Return the objects of `backend` below a folder."""
    folder = folder.strip("/")

    def find(key: str) -> PlacedKey:
        return PlacedKey(backend, "/".join(filter(None, (folder, key))))

    return PlacedBackend(origin, find)


def by_bucket(origin: str, open_bucket: Callable[[str], Backend]) -> PlacedBackend:
    """Return the objects of many buckets; the first part of a key names one."""
    opened: dict[str, Backend] = {}

    def find(key: str) -> PlacedKey:
        bucket, _, inner = key.partition("/")
        if bucket not in opened:
            opened[bucket] = open_bucket(bucket)
        return PlacedKey(opened[bucket], inner)

    return PlacedBackend(origin, find)


FILE_SYSTEM = "__filesystem__"
"""The built-in profile: the root of the file system."""

_RCLONE_KINDS = {
    "s3": "s3",
    "google cloud storage": "gcs",
    "azureblob": "azure",
    "local": "file",
    "alias": "file",
}
_RCLONE_OPTIONS = {
    "region": "region_name",
    "endpoint": "endpoint_url",
    "base_path": "base_path",
    "remote": "base_path",
}
_RCLONE_CREDENTIALS = {
    "access_key_id": "access_key",
    "secret_access_key": "secret_key",
    "session_token": "session_token",
    "connection": "connection",
    "account": "account_name",
    "key": "account_key",
    "sas_token": "sas_key",
    "service_account_file": "service_account",
    "service_account_credentials": "service_account_key",
}


def profile(parts: Address) -> Backend:
    """Return the store that a profile stands for.

    Raises:
        ConfigError: If there is no such profile, or it is invalid.
    """
    name = parts.root.partition("://")[2]
    if name == FILE_SYSTEM:
        return below_folder(parts.root, LocalBackend("/"), "")
    settings = _find_profile(name, parts.root)
    storage = settings.get("storage_provider") or {}
    options = dict(storage.get("options") or {})
    given = settings.get("credentials_provider") or {}
    credentials = dict(given.get("options") or {})
    open_bucket = _opener(storage.get("type"), options, credentials)
    special = given.get("type") not in (None, "S3Credentials", "AzureCredentials")
    if open_bucket is None or special or "metadata_provider" in settings:
        from energon.io.backends.libraries import MscBackend

        return MscBackend(parts.root, name)
    base = str(options.get("base_path") or "").strip("/")
    if storage.get("type") == "file":
        return below_folder(parts.root, open_bucket(""), base)
    if not base:
        return by_bucket(parts.root, open_bucket)
    bucket, _, folder = base.partition("/")
    return below_folder(parts.root, open_bucket(bucket), folder)


def _opener(
    kind: Any, options: Mapping[str, Any], credentials: Mapping[str, Any]
) -> Callable[[str], Backend] | None:
    """Return the function that opens a bucket of a profile; None for kinds we do not serve."""
    if kind == "file":
        return lambda bucket: LocalBackend("/")
    if kind in ("s3", "s8k"):
        settings = _present(
            endpoint=options.get("endpoint_url"),
            region=options.get("region_name"),
            access_key_id=credentials.get("access_key"),
            secret_access_key=credentials.get("secret_key"),
            session_token=credentials.get("session_token"),
        )
        signed = "access_key_id" in settings
        return lambda bucket: s3_backend(bucket, settings, look_up=not signed)
    if kind == "gcs":
        settings = _present(
            base_url=options.get("endpoint_url"),
            service_account=credentials.get("service_account"),
            service_account_key=credentials.get("service_account_key"),
        )
        return lambda bucket: gcs(Address("gs", f"gs://{bucket}", ""), settings)
    if kind == "azure":
        settings = {
            **azure_options(str(credentials.get("connection") or "")),
            **_present(
                endpoint=options.get("endpoint_url"),
                account_name=credentials.get("account_name"),
                account_key=credentials.get("account_key"),
                sas_key=credentials.get("sas_key"),
            ),
        }
        return lambda bucket: azure(Address("az", f"az://{bucket}", ""), settings)
    return None


def _find_profile(name: str, root: str) -> Mapping[str, Any]:
    looked = []
    for path in _msc_files():
        looked.append(str(path))
        profiles = _read_msc(path).get("profiles") or {}
        if name in profiles:
            found: Mapping[str, Any] = profiles[name]
            return found
    for path in _rclone_files():
        looked.append(str(path))
        sections = _read_rclone(path)
        if name in sections:
            return _from_rclone(sections[name], root)
    where = ", ".join(looked) or "no configuration file, for there is none"
    raise ConfigError(
        f"{root}: there is no profile {name!r}; looked in {where}. Set MSC_CONFIG to the file that "
        "has it. (The first part of the address names a profile, not a bucket.)"
    )


def _msc_files() -> Iterator[Path]:
    """Yield the configuration files that exist; the first one counts."""
    if named := os.environ.get("MSC_CONFIG"):
        yield Path(named)
        return
    home = Path.home()
    folders = [home / ".config" / "msc"]
    if base := os.environ.get("XDG_CONFIG_HOME"):
        folders.insert(0, Path(base) / "msc")
    system = (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    candidates = [folders[0] / "config", home / ".msc_config", folders[-1] / "config"]
    candidates += [Path(base) / "msc" / "config" for base in system] + [Path("/etc/msc_config")]
    for candidate in candidates:
        for suffix in (".yaml", ".json"):
            path = candidate.with_name(candidate.name + suffix)
            if path.is_file():
                yield path
                return


def _rclone_files() -> Iterator[Path]:
    home = Path.home()
    candidates = [home / ".config/rclone/rclone.conf", home / ".rclone.conf"]
    if base := os.environ.get("XDG_CONFIG_HOME"):
        candidates.insert(0, Path(base) / "rclone/rclone.conf")
    candidates.append(Path("/etc/rclone.conf"))
    yield from [path for path in candidates if path.is_file()][:1]


def _read_msc(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        text = path.read_text()
        document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise ConfigError(f"MSC_CONFIG: there is no file {path}") from None
    except (ValueError, yaml.YAMLError):
        # What the parser says may quote a line with a key in it.
        raise ConfigError(f"{path}: is not YAML or JSON") from None
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path}: expected `profiles:` with a profile for each name")
    expanded: Mapping[str, Any] = _expanded(document)
    return expanded


def _expanded(value: Any) -> Any:
    """Return a document with ${NAME} replaced from the environment."""
    if isinstance(value, Mapping):
        return {key: _expanded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return os.path.expandvars(value) if isinstance(value, str) else value


def _read_rclone(path: Path) -> Mapping[str, Mapping[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(path)
    except configparser.Error:
        raise ConfigError(f"{path}: is not a configuration of rclone") from None
    return {name: dict(parser[name]) for name in parser.sections()}


def _from_rclone(section: Mapping[str, str], root: str) -> Mapping[str, Any]:
    kind = section.get("type", "")
    if kind not in _RCLONE_KINDS:
        known = ", ".join(_RCLONE_KINDS)
        raise ConfigError(f"{root}: a profile of type {kind!r}; supported are {known}")
    options, credentials = (
        {ours: section[theirs] for theirs, ours in names.items() if theirs in section}
        for names in (_RCLONE_OPTIONS, _RCLONE_CREDENTIALS)
    )
    return {
        "storage_provider": {"type": _RCLONE_KINDS[kind], "options": options},
        "credentials_provider": {"options": credentials},
    }


def _present(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value}
