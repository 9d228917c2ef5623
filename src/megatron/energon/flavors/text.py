"""The sample type `TextSample`."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.types": [
            "TextSample",
        ],
        "energon.task_encoder.flavors": [
            "TextWebdataset",
        ],
    },
)
