"""Write the stubs of `megatron.energon` whenever the package is built or installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsBuildHook(BuildHookInterface):
    """Makes `.pyi` files of the table of names, which are not kept in the repository."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files below `src`, from where the build takes them."""
        source = Path(self.root, "src")
        sys.path.insert(0, str(source))
        try:
            from energon.compat.megatron.finder import write_stubs
        finally:
            sys.path.remove(str(source))
        stubs = write_stubs(source / "megatron" / "energon")
        build_data["artifacts"] += [f"/{file.relative_to(self.root)}" for file in stubs]
