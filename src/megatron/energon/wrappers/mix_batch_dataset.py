"""Batches of several datasets."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.collate": [
            "concat_pad",
            "generic_concat",
            "homogeneous_concat_mix",
        ],
        "energon.wrappers.batches": [
            "MixBatchDataset",
        ],
    },
)
