"""Cut batches for context parallelism: each rank gets its part of every sequence."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from energon.errors import ConfigError
from energon.messages import counted
from energon.worker import Replica

Layout = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Divides the sequences of a batch among the ranks of a context-parallel group.

    With N ranks, "zigzag" cuts each sequence into 2 N chunks and gives rank r chunks r and
    2 N - 1 - r, so that causal attention takes all ranks the same time. That is the layout of
    Megatron-Core, Transformer Engine and `torch.distributed.tensor.experimental.context_parallel`.

    Args:
        dims: The dimension of the sequence in each field to cut, by name.
        rank: The rank of this process in the group; with None, `size` is None as well, and both
            are those of the worker config.
        size: The number of ranks in the group.
        layout: "zigzag" or "contiguous", which gives each rank one chunk.
        cu_seqlens: Name of the field with the bounds of packed sequences, from 0 to the sum of
            their lengths, which are cut one by one; None if each batch row is one sequence. The
            field itself is left as it is.

    Raises:
        ConfigError: If an argument is invalid.

    Example:
        >>> import numpy as np
        >>> cut = ContextParallel(dims={"tokens": 1}, rank=0, size=2)
        >>> cut({"tokens": np.arange(8)[None], "name": "a"})
        {'tokens': array([[0, 1, 6, 7]]), 'name': 'a'}
    """

    dims: Mapping[str, int]
    rank: int | None = None
    size: int | None = None
    layout: Layout = "zigzag"
    cu_seqlens: str | None = None

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise ConfigError(
                f"layout must be one of {', '.join(get_args(Layout))}, got {self.layout!r}"
            )
        if not self.dims:
            raise ConfigError("dims names no field; give the dimension of each field to cut")
        if (self.rank is None) != (self.size is None):
            raise ConfigError("rank and size must be given together, or neither of them")
        if self.rank is not None and not 0 <= self.rank < (self.size or 0):
            raise ConfigError(
                f"rank {self.rank} of {self.size} context-parallel ranks: ranks count from 0"
            )

    def of(self, replica: Replica | None) -> ContextParallel:
        """Return the same with the rank and size of this process.

        Raises:
            ConfigError: If the replica does not say them.
        """
        if self.rank is not None:
            return self
        if replica is None or replica.own.context_rank is None:
            raise ConfigError(
                "the rank of this process in its context-parallel group is unknown; create the "
                "worker config with from_mesh, from_megatron or from_groups, or pass "
                "ContextParallel(rank=..., size=...)"
            )
        return replace(self, rank=replica.own.context_rank, size=replica.context_size)

    def __call__(self, batch: Any) -> Any:
        """Return a batch with the part of this rank in the fields to cut; others are the same.

        Raises:
            ConfigError: If the batch lacks a field, or a sequence cannot be divided evenly.
        """
        if batch is None or self.size in (None, 1):
            return batch
        bounds = None
        if self.cu_seqlens is not None:
            bounds = _field(batch, self.cu_seqlens)
            bounds = np.asarray(bounds.cpu() if hasattr(bounds, "cpu") else bounds).reshape(-1)
        parts = {}
        for name, dim in self.dims.items():
            value = _field(batch, name)
            dims = len(getattr(value, "shape", ()))
            if not -dims <= dim < dims:
                raise ConfigError(
                    f"field {name!r} has {counted(dims, 'dimension')}, but dims names dimension "
                    f"{dim}; name that of the sequence, counted from 0"
                )
            chunks = self._chunks(name, value.shape[dim], bounds)
            parts[name] = _take(value, dim, chunks)
        if isinstance(batch, dict):
            return {**batch, **parts}
        changed = copy.copy(batch)
        for name, part in parts.items():
            setattr(changed, name, part)
        return changed

    def _chunks(self, name: str, length: int, bounds: Any) -> list[tuple[int, int]]:
        """Return where the chunks of this rank begin and end, in a dimension of some length."""
        rank, size = self.rank or 0, self.size or 1
        edges = [0, length] if bounds is None else bounds.tolist()
        if edges[0] != 0 or edges[-1] != length:
            raise ConfigError(
                f"field {name!r} has {length} elements, but {self.cu_seqlens!r} counts from "
                f"{edges[0]} to {edges[-1]}; it must count from 0 to {length}"
            )
        divisor = size if self.layout == "contiguous" else 2 * size
        chunks = []
        for start, stop in pairwise(edges):
            if (stop - start) % divisor:
                raise ConfigError(
                    f"field {name!r} has a sequence of {stop - start} elements, expected a "
                    f"multiple of {divisor} for {size} context-parallel ranks; pad sequences in "
                    "the encoder"
                )
            step = (stop - start) // divisor
            chunks.append((start + rank * step, start + (rank + 1) * step))
            if self.layout == "zigzag":
                chunks.append((stop - (rank + 1) * step, stop - rank * step))
        return chunks


def _field(batch: Any, name: str) -> Any:
    try:
        return batch[name] if isinstance(batch, dict) else getattr(batch, name)
    except (KeyError, AttributeError):
        names = batch if isinstance(batch, dict) else getattr(batch, "__dict__", ())
        raise ConfigError(
            f"the batch has no field {name!r} to cut for context parallelism; it has "
            f"{', '.join(map(str, names))}"
        ) from None


def _take(value: Any, dim: int, chunks: list[tuple[int, int]]) -> Any:
    """Return chunks of an array or tensor side by side: a view if there is one only."""
    before = (slice(None),) * (dim % value.ndim)
    parts = [value[(*before, slice(start, stop))] for start, stop in chunks]
    if len(parts) == 1:
        return parts[0]
    if isinstance(value, np.ndarray):
        return np.concatenate(parts, axis=dim)
    import torch

    return torch.cat(parts, dim=dim)
