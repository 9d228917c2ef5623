"""WebDataset pipelines: `import energon.webdataset as wds`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from energon.webdataset.gopen import gopen

_HOME = {"WebDataset": "compat", "DataPipeline": "pipeline", "SimpleShardList": "shardlists"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
