"""Datasets that are joined."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.task_encoder.join_factory": [
            "JoinedWebdatasetFactory",
        ],
    },
)
