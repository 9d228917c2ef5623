"""The public names and their modules, as listed once, in the stub that type checkers read."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from energon.installation import names_in_stub

PACKAGE = "energon.webdataset"
HOMES = names_in_stub(str(Path(__file__).with_name("__init__.py")))
"""The module of each public name; the package itself for names of modules."""

_HINTS = {
    "MultiDataset": "use WebLoader(dataset, num_workers=n)",
    "Dataset": "use WebDataset(urls)",
    "SampleEqually": "use RandomMix",
    "ShardedWriter": "use ShardWriter",
    "lru_cleanup": "use WebDataset(cache_dir=..., cache_size=...)",
    "dbcache": "use mcached() or lmdb_cached(path)",
    "Shorthands": "use FluidInterface",
    "Composable": "use DataPipeline, which has compose()",
}
"""Replacements for removed names."""


def __getattr__(name: str) -> Any:
    """Return the object of a public name; all modules that programs import have this function.

    Programs look for names in other modules than their own, too.
    """
    home = HOMES.get(name)
    if home is None:
        hint = f"; {_HINTS[name]}" if name in _HINTS else ""
        raise AttributeError(f"{PACKAGE!r} has no attribute {name!r}{hint}")
    if home in (PACKAGE, f"{PACKAGE}.{name}"):
        return import_module(f"{PACKAGE}.{name}")
    return getattr(import_module(home), name)
