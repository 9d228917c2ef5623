"""What is known about media files."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.formats.media": [
            "AVMetadata",
            "ImageMetadata",
            ("MediaMetadataBase", "MediaMetadata"),
            "MediaMetadataType",
            "deserialize_media_metadata",
            "serialize_media_metadata",
        ],
    },
)
