"""Datasets of tar shards with a field map."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.task_encoder.factories": [
            ("DefaultGenericWebdatasetFactory", "WebdatasetFactory"),
        ],
    },
)
