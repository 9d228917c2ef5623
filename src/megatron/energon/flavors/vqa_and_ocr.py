"""The sample type `VQAOCRSample`."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.types": [
            "VQAOCRSample",
        ],
        "energon.task_encoder.flavors": [
            "VQAOCRWebdataset",
        ],
    },
)
