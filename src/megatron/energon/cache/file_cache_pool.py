"""A pool of files on local disk."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.cache.file_pool": [
            "FileCacheLazy",
            "FileStoreCachePool",
        ],
    },
)
