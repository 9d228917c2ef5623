"""What is behind a path or document, opened."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.metadataset.leaf": [
            ("DatasetBlendMode", "BlendMode"),
            "TraversedDatasetReference",
        ],
        "energon.task_encoder.build": [
            "LoadedDataset",
        ],
        "energon.task_encoder.load_dataset": [
            ("DatasetLoaderInterface", "DatasetLoader"),
            "LoadedDatasetList",
        ],
    },
)
