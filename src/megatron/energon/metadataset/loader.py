"""What is behind a path or document."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.metadataset.resolve": [
            "traverse_metadataset",
        ],
        "energon.task_encoder.load_dataset": [
            "load_dataset",
            "prepare_metadataset",
        ],
    },
)
