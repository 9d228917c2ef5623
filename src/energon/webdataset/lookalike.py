"""Be an IterableDataset of torch without importing torch.

torch's loaders, and libraries around them, ask `isinstance(dataset, IterableDataset)`. Importing
torch costs a second and 200 MB, which pipelines do not need. So their class is looked up as a
subclass of IterableDataset as soon as the program has imported torch, and not before.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any


class TorchLookalike:
    """Looks like an `torch.utils.data.IterableDataset` where there is torch."""

    # isinstance() believes what an object says of its class.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        data = sys.modules.get("torch.utils.data")
        base = getattr(data, "IterableDataset", None)
        own: Any = type(self)
        return own if base is None else _with_base(own, base)

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.__getstate__())


def _rebuild(kind: Any, state: Any) -> Any:
    value = kind.__new__(kind)
    value.__setstate__(state)
    return value


@lru_cache(maxsize=256)
def _with_base(kind: type, base: type) -> type:
    """Return `kind` as a subclass of `base`: only ever looked at, never instantiated."""
    return type(kind.__name__, (kind, base), {"__module__": kind.__module__})
