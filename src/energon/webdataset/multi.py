"""Load datasets in several processes, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from energon.webdataset.compat import FluidWrapper
from energon.webdataset.pipeline import DataPipeline
from energon.webdataset.utils import identity
from energon.webdataset.web_loader import WebLoader


class MultiLoader:
    """Yields the items of a dataset that worker processes load.

    Args:
        dataset: A pipeline, or anything to iterate over.
        workers: How many processes.
        verbose: Accepted for compatibility.
        nokill: Accepted for compatibility.
        prefix: Accepted for compatibility.
    """

    def __init__(
        self,
        dataset: Any,
        workers: int = 4,
        verbose: bool = False,
        nokill: bool = False,
        prefix: str = "",
    ) -> None:
        pipeline = dataset if isinstance(dataset, DataPipeline) else FluidWrapper(dataset)
        self.loader = WebLoader(pipeline, batch_size=None, num_workers=workers, collate_fn=identity)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def close(self) -> None:
        """Stop the processes."""
        self.loader.close()

    kill = close
