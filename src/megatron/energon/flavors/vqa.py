"""The sample type `VQASample`."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.types": [
            "VQASample",
        ],
        "energon.task_encoder.flavors": [
            "VQAWebdataset",
        ],
    },
)
