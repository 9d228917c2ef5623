"""Files by name, now or later."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.cache.file_pool": [
            "FileCacheLazy",
            "FileStoreCachePool",
        ],
        "energon.cache.lazy": [
            "DirectLazy",
            "Lazy",
            "MockLazy",
        ],
        "energon.cache.pool": [
            "CachePool",
            "NoCachePool",
        ],
        "energon.sources.file_store": [
            "DecodeFileStore",
            "FileStore",
            "FileStoreDecoder",
            "PrimaryFileStore",
        ],
        "energon.sources.file_store_folder": [
            "SystemFileStore",
        ],
    },
)
