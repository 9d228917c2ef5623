"""A pool that caches nothing."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.cache.lazy": [
            "DirectLazy",
        ],
        "energon.cache.pool": [
            "NoCachePool",
        ],
    },
)
