"""The sample type `CaptioningSample`."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.types": [
            "CaptioningSample",
        ],
        "energon.task_encoder.flavors": [
            "CaptioningWebdataset",
        ],
    },
)
