"""What data may make a program do: nothing, unless the user allows it by name."""

from __future__ import annotations

import os
from collections.abc import Collection

VARIABLE = "ENERGON_ALLOW"


def is_allowed(capability: str, allow: Collection[str] = ()) -> bool:
    """Return whether the user allows something: "code", "pickle" or "shell".

    Args:
        capability: What.
        allow: What the call allows; the environment may allow more, as ENERGON_ALLOW=code,pickle.
    """
    named = {allow} if isinstance(allow, str) else set(allow)
    return capability in named | set(os.environ.get(VARIABLE, "").split(","))
