"""energon: training data from sharded tar files, in one order on any topology.

Prepare a folder of WebDataset shards once (`energon prepare PATH`), then

    from energon import WorkerConfig, get_savable_loader, get_train_dataset

    config = WorkerConfig.default_worker_config(num_workers=4)
    dataset = get_train_dataset(PATH, worker_config=config, batch_size=32)
    loader = get_savable_loader(dataset)

All public names are importable from here. They are looked up when first used, so importing
energon costs next to nothing and never imports torch. Type checkers read `__init__.pyi`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

try:
    import fcntl  # noqa: F401 - locks files; systems without it lack more that is needed
except ImportError:
    raise ImportError("energon runs on Linux and macOS; on Windows, run it in WSL") from None
from energon.installation import names_in_stub, say_what_is_wrong

say_what_is_wrong()

_HOME = names_in_stub(__file__)

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
