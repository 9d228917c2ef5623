"""Classes of torch, for programs that look for them here. Without torch, placeholders."""

from __future__ import annotations

from typing import Any

_HOME = {
    "IterableDataset": "torch.utils.data",
    "DataLoader": "torch.utils.data",
    "TorchTensor": "torch",
}


class _Missing:
    """Stands for a class of torch where torch is not installed."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        from energon.errors import MissingExtraError

        raise MissingExtraError("this needs torch; pip install 'energon-loader[torch]'")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torch
        import torch.utils.data
    except ImportError:
        return _Missing
    return torch.Tensor if name == "TorchTensor" else getattr(torch.utils.data, name)
