"""From a path to a pipeline."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.task_encoder.getters": [
            "get_train_dataset",
            "get_val_dataset",
            "get_val_datasets",
        ],
    },
)
