"""WebDataset pipelines: streaming over tar files, from any storage.

    import energon.webdataset as wds

    dataset = wds.WebDataset("shards/{000..127}.tar", shardshuffle=True)
    dataset = dataset.shuffle(1000).decode("rgb").to_tuple("jpg;png", "json").batched(16)

The names, arguments and meaning are those of the webdataset library. Names are looked up when
they are first used, so importing this costs next to nothing, and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# A function and a module have this name. The module is imported first, once and for all.
from energon.webdataset.gopen import gopen as gopen
from energon.webdataset.names import HOMES, PACKAGE
from energon.webdataset.names import __getattr__ as find_name

if TYPE_CHECKING:
    from energon.webdataset import utils as utils

__version__ = "1.0.2"
"""The release of webdataset whose interface this is."""

__all__ = sorted(name for name, home in HOMES.items() if home != PACKAGE)


def __getattr__(name: str) -> Any:
    value = globals()[name] = find_name(name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
