"""How stores are read: settings from the environment, the same in every process of a job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from energon.errors import (
    ConfigError,
)

SETTING_PREFIX = "ENERGON_STORAGE_"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?")
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)
_BINARY_UNITS = {"ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class StorageSettings:
    """Limits for reading from stores.

    Each can be set in the environment, as in `ENERGON_STORAGE_ATTEMPTS=3` or
    `ENERGON_STORAGE_CACHE_BYTES=200GB`.

    Args:
        attempts: Maximum number of attempts of a request, including the first; None for as many
            as the deadline allows.
        first_wait_seconds: Longest wait before the second attempt; it doubles from one attempt to
            the next. The actual wait is drawn uniformly from zero to that, so that clients do not
            retry in step.
        longest_wait_seconds: Upper limit of the doubling.
        deadline_seconds: Longest time for a request including all retries. While an object is
            streamed, every MiB may take this long.
        refused_seconds: How long to try a server that has never answered and refuses connections
            or does not accept any, to which there is no route, or whose name cannot be resolved.
        hedge_after_seconds: Send a read request a second time if it is not answered within this
            time, and take the first answer; None never does.
        parallel_requests: Maximum number of read-ahead requests of one process to one store at
            the same time.
        read_ahead_bytes: Maximum bytes of remote shards that a process holds fetched but unused.
        cache_shards: Whether to keep what is read of remote shards in the cache folder, so that
            the next epoch or job reads it from disk.
        cache_dir: Folder for copies of remote files; None for one below the user's cache.
        cache_bytes: Maximum size of that folder.
    """

    attempts: int | None = None
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 20.0
    deadline_seconds: float = 300.0
    refused_seconds: float = 10.0
    hedge_after_seconds: float | None = None
    parallel_requests: int = 16
    read_ahead_bytes: int = 256 << 20
    cache_shards: bool = False
    cache_dir: str | None = None
    cache_bytes: int = 20 << 30

    def __post_init__(self) -> None:
        hedge = self.hedge_after_seconds
        if (self.attempts is not None and self.attempts < 1) or self.parallel_requests < 1:
            raise ConfigError(f"{self}: expected at least one attempt and one request")
        if min(self.deadline_seconds, self.refused_seconds) <= 0 or (
            hedge is not None and hedge <= 0
        ):
            raise ConfigError(f"{self}: expected times above 0")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> StorageSettings:
        """Return the settings from the environment, with defaults for the rest.

        Raises:
            ConfigError: If a value is invalid.
        """
        found = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = SETTING_PREFIX + field.name.upper()
            if text := found.get(name):
                values[field.name] = _parse(name, str(field.type), text)
        return cls(**values)


def parse_bytes(text: str) -> int:
    """Return the number of bytes written as "4096", "200GB" or "1.5GiB".

    Raises:
        ConfigError: If it is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r}: expected a size such as 4096, 200GB or 1.5GiB")
    unit = found[2]
    return int(float(found[1]) * (_UNITS | _BINARY_UNITS).get(unit or "", 1))


def _parse(name: str, kind: str, text: str) -> Any:
    try:
        if name.endswith("_BYTES"):
            return parse_bytes(text)
        if kind == "bool":
            return _BOOLEANS[text.lower()]
        if kind.startswith("int"):
            return int(text)
        return float(text) if kind.startswith("float") else text
    except KeyError:
        raise ConfigError(f"{name}={text!r}: expected 1 or 0") from None
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: expected a number ({error})") from error
