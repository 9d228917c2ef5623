"""Cookers."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.crude": [
            "basic_sample_keys",
        ],
        "energon.task_encoder.cooker": [
            "Cooker",
            "cooker",
        ],
    },
)
