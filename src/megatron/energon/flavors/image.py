"""The sample type `ImageSample`."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.types": [
            "ImageSample",
        ],
        "energon.task_encoder.flavors": [
            "ImageWebdataset",
        ],
    },
)
