"""The sample type `InterleavedSample`."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.types": [
            "InterleavedSample",
        ],
        "energon.task_encoder.flavors": [
            "InterleavedWebdataset",
        ],
    },
)
