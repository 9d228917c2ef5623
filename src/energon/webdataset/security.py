"""What is refused unless the user allows it: unpickling, and commands for the shell.

Data are data: neither a shard nor a list of shards may run code. Allow by name, per stage with
`allow=("pickle",)`, for the process with ENERGON_ALLOW=pickle,shell or WDS_SECURE=0, or with
`energon.webdataset.utils.enforce_security = False`. Set to True (or WDS_SECURE=1), the same switch
is a lock: nothing of this is done, whatever else allows it.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from energon.allow import allowed_by_environment, check_allow, refusal
from energon.errors import SecurityError

INSECURE = frozenset(("pickle", "shell"))
"""What programs of old allow with a switch of their own."""

LOCKED = "locked"
"""In what `resolve` returns, says that the lock was on when a stage was made."""

_LOCKS = {
    "pickle": "Unpickling is not allowed for security reasons when enforce_security is set",
    "torch": "torch.loads is not allowed for security reasons when enforce_security is set",
    "shell": "gopen_pipe: unsafe_gopen is False, cannot open pipe URLs",
    "file": "gopen: unsafe_gopen is False, cannot open local files",
    "rewrite": "rewrite_url: unsafe_gopen is False, cannot rewrite URLs using environment "
    "variables",
}
"""What the lock refuses, in the words that programs look for."""


def resolve(allow: Collection[str] = ()) -> frozenset[str]:
    """Return all that is allowed here and now, `allow` included.

    Stages call this when they are made and keep the answer, so that workers know it.

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
        capability: Which one.
        allowed: What `resolve` returned.
        what: What is refused, and why: the beginning of the message.
    """
    check_lock(capability, allowed)
    if capability not in allowed:
        raise refusal(capability, what)


def check_lock(act: str, allowed: Collection[str] = ()) -> None:
    """Raise SecurityError if the lock is on, or was when `allowed` was resolved.

    Args:
        act: What is about to be done: "pickle", "torch", "shell", "file" or "rewrite".
        allowed: What `resolve` returned.
    """
    if LOCKED in allowed or _switch() is True:
        raise SecurityError(
            f"{_LOCKS[act]}; energon.webdataset.utils.enforce_security is True, or WDS_SECURE=1 "
            "is in the environment: take the lock off, and allow by name what you trust"
        )


def _switch() -> bool | None:
    """Return what the program, or else the environment, says; None if neither does."""
    # Not imported as a name: programs set it.
    import energon.webdataset.utils as utils

    if utils.enforce_security is not None:
        return bool(utils.enforce_security)
    named = os.environ.get("WDS_SECURE")
    return None if named is None else named.lower() not in ("0", "false", "no", "")
