"""Stages to put around datasets."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.errors": [
            "SkipSample",
        ],
        "energon.samples.collate": [
            "concat_pad",
            "generic_concat",
            "homogeneous_concat_mix",
        ],
        "energon.wrappers.batches": [
            "BatchDataset",
            "GroupBatchDataset",
            "MixBatchDataset",
            "PackingDataset",
        ],
        "energon.wrappers.items": [
            "FilterDataset",
            "IterMapDataset",
            "MapDataset",
        ],
        "energon.wrappers.streams": [
            "BlendDataset",
            "ConcatDataset",
            "EpochizeDataset",
            "LimitDataset",
            "RepeatDataset",
            "ShuffleBufferDataset",
        ],
        "energon.wrappers.watching": [
            "GcDataset",
            "LogSampleDataset",
            "WatchdogDataset",
        ],
    },
)
