"""What samples and datasets are."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.sample": [
            "PinMemoryMixin",
            "Sample",
        ],
        "energon.task_encoder.dataset": [
            "SavableDataset",
        ],
        "energon.task_encoder.leaf_dataset": [
            ("BaseCoreDatasetFactory", "LeafDataset"),
        ],
    },
)
