"""The names of energon under the import path that programs written for Megatron-Energon use.

Nothing is defined here. The modules below this package have the names that those of
Megatron-Energon have; `energon.compat.megatron.finder` is the table of all of them.
"""

from __future__ import annotations

import sys

try:
    from energon.compat.megatron.finder import install
except ModuleNotFoundError as error:
    if error.name != "energon.compat":
        raise
    # A folder or file of the program has the name of the library and comes first in sys.path.
    import energon

    path = getattr(energon, "__file__", None) or next(iter(energon.__path__))
    raise ImportError(
        f"megatron.energon needs the package energon of energon-loader, but {path} was imported "
        "in its place, because it comes first in sys.path; rename it, or start the program from "
        "another folder",
        name="energon",
        path=path,
    ) from None

install(sys.modules[__name__])
