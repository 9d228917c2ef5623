"""Connect to S3 and everything that speaks its protocol.

Credentials are looked for where other tools look for them: the environment, then the profile
of `~/.aws` (with boto3 for profiles that log in or assume roles), then the machine's own role.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energon.errors import ConfigError
from energon.extra import needs_extra
from energon.io.backends.object_backend import (
    Connect,
    ObjectBackend,
    connection_settings,
    object_library,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore


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
        options: Settings of obstore's `S3Store`, which go over those that are found.
        look_up: Whether to look for settings in the environment and in the profile.
    """
    origin = f"s3://{bucket}"
    return ObjectBackend(origin, _connecting(bucket, origin, dict(options or {}), look_up))


def _connecting(bucket: str, origin: str, options: Mapping[str, Any], look_up: bool) -> Connect:
    def connect(seconds: float) -> ObjectStore:
        object_library(origin)
        from obstore.store import S3Store

        found = {**(s3_options(os.environ) if look_up else {}), **options}
        provider = found.pop("credential_provider", None) or _static_provider(found)
        endpoint = str(found.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", ""))
        return S3Store(
            bucket,
            config=found,  # type: ignore[arg-type]
            **connection_settings(seconds, endpoint),
            credential_provider=provider,
        )

    return connect


def _static_provider(options: dict[str, Any]) -> Any:
    """Take keys out of settings, so that no token of the environment is added to them."""
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
    """Return what environment and profile say, as settings of obstore's `S3Store`.

    What the library finds in the environment by itself is not repeated.

    Raises:
        ConfigError: If the profile that is asked for does not exist.
        MissingExtraError: If the profile needs boto3 and that is not installed.
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
    found = {ours: profile[theirs] for theirs, ours in _STATIC.items() if theirs in profile}
    if environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"):
        found.pop("region", None)
    if environment.get("AWS_ENDPOINT_URL"):
        found.pop("endpoint", None)
    if any(key in profile for key in _DYNAMIC) and "access_key_id" not in found:
        found["credential_provider"] = _boto_provider(name or "default")
    return found


def _read_profile(name: str, environment: Mapping[str, str]) -> dict[str, str] | None:
    home = Path.home() / ".aws"
    files = {
        environment.get("AWS_SHARED_CREDENTIALS_FILE") or str(home / "credentials"): name,
        environment.get("AWS_CONFIG_FILE") or str(home / "config"): (
            name if name == "default" else f"profile {name}"
        ),
    }
    merged: dict[str, str] = {}
    known = False
    for path, section in files.items():
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read(os.path.expanduser(path))
        except configparser.Error as error:
            raise ConfigError(f"{path}: {type(error).__name__}; not an AWS profile file") from None
        if parser.has_section(section):
            known = True
            merged = {**dict(parser[section]), **merged}
    return merged if known else None


def _boto_provider(profile: str) -> Any:
    with needs_extra(
        "s3", f"AWS profile {profile!r}, which logs in or assumes a role, needs boto3"
    ):
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    return Boto3CredentialProvider(boto3.session.Session(profile_name=profile))
