"""Rewrite addresses by rules in the environment, to use other copies of the same data.

GOPEN_REWRITE, or WDS_REWRITE, holds rules with semicolons between them: a regular expression
for the beginning of an address, an equals sign, and what stands there instead. The first rule
that fits is used, once. USE_AIS_FOR names schemes whose objects are asked of the AIStore at
AIS_ENDPOINT.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

from energon.errors import ConfigError
from energon.io.address import scheme_of
from energon.webdataset import security

_PROVIDERS = {"gs": "gcp", "s3": "aws", "az": "azure", "ais": "ais"}


def rewrite_url(url: str) -> str:
    """Return the address that is to be opened for `url`.

    Raises:
        ConfigError: If a rule is malformed, or AIStore is asked for without an endpoint.
        SecurityError: If there are rules, and the lock is on; see `security`.
    """
    text = os.environ.get("GOPEN_REWRITE") or os.environ.get("WDS_REWRITE") or ""
    if text:
        security.check_lock("rewrite")
    for pattern, replacement in _rules(text):
        rewritten = pattern.sub(replacement, url, count=1) if pattern.match(url) else url
        if rewritten != url:
            return rewritten
    return _through_aistore(url)


@lru_cache(maxsize=16)
def _rules(text: str) -> list[tuple[re.Pattern[str], str]]:
    rules = []
    for rule in filter(None, text.split(";")):
        pattern, equals, replacement = rule.partition("=")
        try:
            if not equals:
                raise ValueError("there is no equals sign")
            rules.append((re.compile(f"^(?:{pattern})"), replacement))
        except (ValueError, re.error) as error:
            raise ConfigError(
                f"GOPEN_REWRITE: rule {rule!r}: {error}; expected REGEX=REPLACEMENT, with "
                "semicolons between rules"
            ) from error
    return rules


def _through_aistore(url: str) -> str:
    scheme = scheme_of(url)
    routed = scheme and scheme in os.environ.get("USE_AIS_FOR", "").split(":")
    if scheme != "ais" and not routed:
        return url
    endpoint = os.environ.get("AIS_ENDPOINT")
    if not endpoint:
        raise ConfigError(
            f"{url}: is to be asked of AIStore; set AIS_ENDPOINT to its address, like "
            "http://host:51080"
        )
    if scheme not in _PROVIDERS:
        raise ConfigError(
            f"USE_AIS_FOR names {scheme}; AIStore knows {', '.join(sorted(_PROVIDERS))}"
        )
    path = url[len(scheme) + 3 :]
    return f"{endpoint.rstrip('/')}/v1/objects/{path}?provider={_PROVIDERS[scheme]}"
