"""What data may make a program do: nothing, unless the user allows it by name.

The user allows it for a call (`allow=("code",)`), for a command (`--allow code`), or for a
process and its workers (`ENERGON_ALLOW=code,pickle` in the environment).
"""

from __future__ import annotations

import os
from collections.abc import Collection

from energon.errors import ConfigError, SecurityError
from energon.messages import nearest

VARIABLE = "ENERGON_ALLOW"
CAPABILITIES = {
    "code": "import modules, call functions and run files that a document names",
    "pickle": "unpickle samples or their parts, which runs any code that they contain",
    "shell": "run addresses that are shell commands (pipe:…)",
    "env": "read environment variables into a document (${NAME})",
    "outside": "read shards and documents outside the folder of their dataset",
}
"""What can be allowed, and what it lets data do."""


def is_allowed(capability: str, allow: Collection[str] = ()) -> bool:
    """Return whether the user allows something.

    Args:
        capability: One of `CAPABILITIES`.
        allow: What the call allows; the environment may allow more.

    Raises:
        ConfigError: If `allow` has a name that means nothing.
    """
    named = {allow} if isinstance(allow, str) else set(allow)
    check_allow(named)
    return capability in named | allowed_by_environment()


def check_allow(allow: Collection[str]) -> None:
    """Raise ConfigError if something is to be allowed that does not exist."""
    if not isinstance(allow, Collection):
        raise ConfigError(
            f"allow={allow!r}: expected some of {', '.join(CAPABILITIES)}, in a tuple"
        )
    for name in sorted({allow} if isinstance(allow, str) else allow, key=str):
        if name not in CAPABILITIES:
            near = nearest(name, CAPABILITIES)
            hint = f"did you mean {near!r}?" if near else "expected one of them"
            raise ConfigError(f"allow={name!r} is not one of {', '.join(CAPABILITIES)}; {hint}")


def allowed_by_environment() -> set[str]:
    """Return the capabilities that `ENERGON_ALLOW` names."""
    return {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}


def refusal(capability: str, problem: str) -> SecurityError:
    """Return the error that refuses a capability, and names the switch that allows it.

    Args:
        capability: Which one.
        problem: What is refused, and what to do instead.
    """
    return SecurityError(
        f'{problem}; if you trust it, allow it with allow=("{capability}",), with --allow '
        f"{capability} on the command line, or with {VARIABLE}={capability} in the environment"
    )
