"""The fluid interface: pipelines written as one chain of calls."""

from __future__ import annotations

from typing import Any

from energon.webdataset import filters
from energon.webdataset.pipeline import DataPipeline
from energon.webdataset.shardlists import (
    ShuffleShards,
    SimpleShardList,
    split_by_node,
    split_by_worker,
)
from energon.webdataset.tar_samples import TarSamples


class FluidInterface:
    """Methods that append a stage, and return a new pipeline."""

    def shuffle(self, size, **kw):
        return self.compose(filters.shuffle(size, **kw))

    def map(self, f, **kw):
        return self.compose(filters.map(f, **kw))

    def decode(self, *args, **kw):
        return self.compose(filters.decode(*args, **kw))

    def to_tuple(self, *args, **kw):
        return self.compose(filters.to_tuple(*args, **kw))

    def batched(self, batchsize, **kw):
        return self.compose(filters.batched(batchsize, **kw))

    def unbatched(self):
        return self.compose(filters.unbatched())


class WebDataset(DataPipeline, FluidInterface):
    """Samples of tar files."""

    def __init__(self, urls, shardshuffle=None, **kw):
        super().__init__(
            SimpleShardList(urls),
            ShuffleShards() if shardshuffle else None,
            split_by_node,
            split_by_worker,
            TarSamples(local_path=True),
        )
