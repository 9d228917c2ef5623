"""A dataset as its folder describes it."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.task_encoder.described": [
            "get_dataset_from_config",
        ],
        "energon.task_encoder.load_config": [
            "load_config",
        ],
    },
)
