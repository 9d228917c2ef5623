"""Samples of shards by number: map-style datasets, their index files, and samplers for them."""

from energon.webdataset.wids.dataset import (
    ChunkedSampler,
    DistributedChunkedSampler,
    ShardedSampler,
    ShardListDataset,
    ShardListSampler,
)
from energon.webdataset.wids.descriptor import (
    Descriptor,
    ShardInfo,
    create_descriptor,
    load_descriptor,
    save_descriptor,
)

__all__ = [
    "ChunkedSampler",
    "Descriptor",
    "DistributedChunkedSampler",
    "ShardInfo",
    "ShardListDataset",
    "ShardListSampler",
    "ShardedSampler",
    "create_descriptor",
    "load_descriptor",
    "save_descriptor",
]
