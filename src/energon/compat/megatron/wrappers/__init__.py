"""Stages as classes that users nest to build their own pipelines.

Every wrapper is a dataset: it can be wrapped again, passed to a loader, saved and resumed.
"""

from energon.compat.megatron.wrappers.base import WrapperDataset
from energon.compat.megatron.wrappers.batches import (
    BatchDataset,
    GroupBatchDataset,
    MixBatchDataset,
    PackingDataset,
)
from energon.compat.megatron.wrappers.monitoring import GcDataset, LogSampleDataset, WatchdogDataset
from energon.compat.megatron.wrappers.streams import (
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    FilterDataset,
    IterMapDataset,
    LimitDataset,
    MapDataset,
    RepeatDataset,
    ShuffleBufferDataset,
)

__all__ = [
    "BatchDataset",
    "BlendDataset",
    "ConcatDataset",
    "EpochizeDataset",
    "FilterDataset",
    "GcDataset",
    "GroupBatchDataset",
    "IterMapDataset",
    "LimitDataset",
    "LogSampleDataset",
    "MapDataset",
    "MixBatchDataset",
    "PackingDataset",
    "RepeatDataset",
    "ShuffleBufferDataset",
    "WatchdogDataset",
    "WrapperDataset",
]
