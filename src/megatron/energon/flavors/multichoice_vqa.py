"""The sample type `MultiChoiceVQASample`."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.types": [
            "MultiChoiceVQASample",
        ],
        "energon.task_encoder.flavors": [
            "MultiChoiceVQAWebdataset",
        ],
    },
)
