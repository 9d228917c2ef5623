"""Operations that are refused unless the user allows them: unpickling, and shell commands.

Data is data: neither a shard nor a list of shards may run code. Permissions are given by name: per
stage with `allow=("pickle",)`, per process with ENERGON_ALLOW=pickle,shell or WDS_SECURE=0, or with
`energon.webdataset.utils.enforce_security = False`. Set to True (or WDS_SECURE=1), the same switch
is a lock: all of these are refused, whatever else allows them.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from energon.errors import SecurityError
from energon.limits import allowed_by_environment, check_allow, refusal

INSECURE = frozenset(("pickle", "shell"))
"""What older programs allow with a switch."""

LOCKED = "locked"
"""In the result of `resolve`, means that the lock was on when a stage was created."""

_LOCKS = {
    "pickle": "Unpickling is not allowed for security reasons when enforce_security is set",
    "torch": "torch.loads is not allowed for security reasons when enforce_security is set",
    "shell": "gopen_pipe: unsafe_gopen is False, cannot open pipe URLs",
    "file": "gopen: unsafe_gopen is False, cannot open local files",
    "rewrite": "rewrite_url: unsafe_gopen is False, cannot rewrite URLs using environment "
    "variables",
}
"""Messages of the lock, in the words that programs look for."""


def resolve(allow: Collection[str] = ()) -> frozenset[str]:
    """Return everything that is allowed now, including `allow`.

    Stages call this when they are created and keep the result, so that it also holds in workers.

    Raises:
        ConfigError: If there is no such capability.
    """
    names = {allow} if isinstance(allow, str) else set(allow)
    check_allow(names)
    switch = _switch()
    if switch is True:
        return frozenset({LOCKED})
    return frozenset(names | allowed_by_environment() | (INSECURE if switch is False else set()))


def require(capability: str, allowed: Collection[str], what: str) -> None:
    """Raise SecurityError unless `capability` is allowed.

    Args:
        capability: The capability.
        allowed: The result of `resolve`.
        what: What is refused, and why: the beginning of the message.
    """
    check_lock(capability, allowed)
    if capability not in allowed:
        raise refusal(capability, what)


def check_lock(act: str, allowed: Collection[str] = ()) -> None:
    """Raise SecurityError if the lock is on, or was when `allowed` was resolved.

    Args:
        act: The operation: "pickle", "torch", "shell", "file" or "rewrite".
        allowed: The result of `resolve`.
    """
    if LOCKED in allowed or _switch() is True:
        raise SecurityError(
            f"{_LOCKS[act]}; energon.webdataset.utils.enforce_security is True, or WDS_SECURE=1 "
            "is in the environment: unset it, and allow what you trust by name"
        )


def _switch() -> bool | None:
    """Return the switch set by the program or else the environment; None if neither sets it."""
    # Looked up each time, since programs set it.
    import energon.webdataset.utils as utils

    if utils.enforce_security is not None:
        return bool(utils.enforce_security)
    named = os.environ.get("WDS_SECURE")
    return None if named is None else named.lower() not in ("0", "false", "no", "")
