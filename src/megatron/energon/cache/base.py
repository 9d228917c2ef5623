"""What stores, pools and lazies are."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.cache.lazy": [
            "Lazy",
            "MockLazy",
        ],
        "energon.cache.pool": [
            "CachePool",
        ],
        "energon.sources.file_store": [
            "FileStore",
            "FileStoreDecoder",
            "PrimaryFileStore",
        ],
    },
)
