"""Classes of torch, for programs that look for them here. Without torch, placeholders."""

from __future__ import annotations

from typing import Any

try:
    from torch import Tensor
    from torch.utils.data import DataLoader as DataLoader
    from torch.utils.data import IterableDataset as IterableDataset
except ImportError:

    class IterableDataset:  # type: ignore[no-redef]
        """Stands for a class of torch where torch is not installed."""

        def __init__(self, *args: Any, **kw: Any) -> None:
            from energon.errors import MissingExtraError

            raise MissingExtraError("this needs torch; pip install 'energon-loader[torch]'")

    DataLoader = Tensor = IterableDataset  # type: ignore[misc,assignment]

TorchTensor = Tensor
