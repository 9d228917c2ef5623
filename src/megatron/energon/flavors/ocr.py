"""The sample type `OCRSample`."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.types": [
            "OCRSample",
        ],
        "energon.task_encoder.flavors": [
            "OCRWebdataset",
        ],
    },
)
