"""What is refused unless the user allows it: unpickling, and commands for the shell.

Data are data: neither a shard nor a list of shards may run code. Allow by name, per stage with
`allow=("pickle",)`, for the process with ENERGON_ALLOW=pickle,shell or WDS_SECURE=0, or with
`energon.webdataset.utils.enforce_security = False`.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from energon.allow import allowed_by_environment, check_allow, refusal

INSECURE = frozenset(("pickle", "shell"))
"""What programs of old allow with a switch of their own."""


def resolve(allow: Collection[str] = ()) -> frozenset[str]:
    """Return all that is allowed here and now, `allow` included.

    Stages call this when they are made and keep the answer, so that workers know it.

    Raises:
        ConfigError: If there is no such capability.
    """
    names = {allow} if isinstance(allow, str) else set(allow)
    check_allow(names)
    return frozenset(names | _from_environment())


def require(capability: str, allowed: Collection[str], what: str) -> None:
    """Raise SecurityError unless `capability` is allowed.

    Args:
        capability: Which one.
        allowed: What `resolve` returned.
        what: What is refused, and why: the beginning of the message.
    """
    if capability not in allowed:
        raise refusal(capability, what)


def _from_environment() -> set[str]:
    # Not imported as a name: programs set it.
    import energon.webdataset.utils as utils

    named = allowed_by_environment()
    insecure = os.environ.get("WDS_SECURE", "1").lower() in ("0", "false", "no", "")
    return named | INSECURE if insecure or not utils.enforce_security else named
