"""Samples as they are in the shards."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.crude": [
            "CrudeSample",
        ],
        "energon.task_encoder.factories": [
            "CrudeWebdataset",
        ],
    },
)
