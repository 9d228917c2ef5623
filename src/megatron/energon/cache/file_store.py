"""Stores of files by name."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.sources.file_store": [
            "DecodeFileStore",
        ],
        "energon.sources.file_store_folder": [
            "SystemFileStore",
        ],
        "energon.sources.file_store_webdataset": [
            "WebdatasetFileStore",
        ],
        "energon.sources.jsonl": [
            "JsonlFileStore",
        ],
    },
)
