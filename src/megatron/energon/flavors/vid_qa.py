"""The sample type `VidQASample`."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.types": [
            "VidQASample",
        ],
        "energon.task_encoder.flavors": [
            "VidQAWebdataset",
        ],
    },
)
