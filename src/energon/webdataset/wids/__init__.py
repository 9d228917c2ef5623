"""Samples of shards by number: map-style datasets, their index files, and samplers for them."""

from energon.webdataset.wids.dataset import ShardListDataset
from energon.webdataset.wids.descriptor import (
    Descriptor,
    ShardInfo,
    create_descriptor,
    load_descriptor,
    save_descriptor,
)
from energon.webdataset.wids.samplers import (
    ChunkedSampler,
    DistributedChunkedSampler,
    ShardedSampler,
    ShardListSampler,
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
