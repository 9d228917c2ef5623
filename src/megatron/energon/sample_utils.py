"""Keys of batches."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.wrappers.watching": [
            ("default_get_batch_keys", "default_get_keys"),
        ],
    },
)
