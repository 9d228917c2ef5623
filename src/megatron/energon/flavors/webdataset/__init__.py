"""Datasets of tar shards."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.decode.av": [
            "AVData",
            "AVDecoder",
        ],
        "energon.decode.sample_decoder": [
            "SampleDecoder",
        ],
        "energon.decode.spec_names": [
            "AVDecoderType",
            "ImageDecoderType",
        ],
        "energon.errors": [
            "EmptyDatasetError",
        ],
        "energon.task_encoder.factories": [
            ("BaseWebdatasetFactory", "WebdatasetFactory"),
            ("DefaultDecoderWebdatasetFactory", "WebdatasetFactory"),
            ("DefaultGenericWebdatasetFactory", "WebdatasetFactory"),
            "StandardWebdatasetFactory",
        ],
        "energon.task_encoder.join_factory": [
            "JoinedWebdatasetFactory",
        ],
        "energon.task_encoder.webdataset_meta": [
            "WebdatasetMeta",
        ],
    },
)
