"""Loaders with a state."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.loader.loader": [
            "BasicDataLoader",
        ],
        "energon.loader.savable": [
            "SavableDataLoader",
        ],
        "energon.stages.base": [
            ("SavableDataLoaderState", "State"),
            ("SavableDatasetCheckpoint", "State"),
            ("SavableDatasetState", "State"),
        ],
    },
)
