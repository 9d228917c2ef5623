"""Find the classes that documents name."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from energon.errors import ConfigError, SecurityError
from energon.samples import types
from energon.samples.sample import Sample

_OURS = ("energon", "megatron.energon")
SAMPLE_TYPES: dict[str, type[Sample]] = {
    name: value
    for name, value in vars(types).items()
    if isinstance(value, type) and issubclass(value, Sample)
}
"""The sample types that come with energon, by name."""
_FLAVORS = {
    name.removesuffix("Sample") + "Webdataset": value
    for name, value in SAMPLE_TYPES.items()
    if name != "Sample"
}
"""Names from the time when a dataset class said what its samples are."""


def resolve_class(module: str, name: str, *, allow_code: bool = False) -> Any:
    """Return the class that a document names with `__module__` and `__class__`.

    Names of energon come from a fixed list. Another module is only looked into if the program
    has imported it already: importing runs code, and data shall not decide on that.

    Args:
        module: E.g. "megatron.energon".
        name: E.g. "CaptioningSample".
        allow_code: Whether to import other modules; also switched on by ENERGON_ALLOW=code.

    Raises:
        ConfigError: If there is no such name.
        SecurityError: If the module would have to be imported.
    """
    if module in _OURS or module.startswith(tuple(f"{ours}." for ours in _OURS)):
        known = {**SAMPLE_TYPES, **_FLAVORS}
        if name in known:
            return known[name]
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SAMPLE_TYPES)}"
        raise ConfigError(f"{module} has no sample type {name!r}; {hint}")
    if module not in sys.modules:
        allowed = os.environ.get("ENERGON_ALLOW", "").split(",")
        if not allow_code and "code" not in allowed:
            raise SecurityError(
                f"{module}.{name} is named by a dataset, and importing it would run code; import "
                f'{module} in your program, or allow it with allow=("code",) or ENERGON_ALLOW=code'
            )
        import_module(module)
    found: Any = sys.modules[module]
    for step in name.split("."):
        if not hasattr(found, step):
            raise ConfigError(f"module {module} has no {name!r}")
        found = getattr(found, step)
    return found
