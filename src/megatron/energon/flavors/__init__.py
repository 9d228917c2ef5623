"""Sample types, and dataset classes."""

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
        "energon.samples.crude": [
            "CrudeSample",
        ],
        "energon.samples.sample": [
            "PinMemoryMixin",
            "Sample",
        ],
        "energon.samples.types": [
            "CaptioningSample",
            "ImageClassificationSample",
            "ImageSample",
            "InterleavedSample",
            "MultiChoiceVQASample",
            "OCRSample",
            "SimilarityInterleavedSample",
            "TextSample",
            "VQAOCRSample",
            "VQASample",
            "VidQASample",
        ],
        "energon.task_encoder.dataset": [
            "SavableDataset",
        ],
        "energon.task_encoder.factories": [
            ("BaseWebdatasetFactory", "WebdatasetFactory"),
            "CrudeWebdataset",
            ("DefaultDecoderWebdatasetFactory", "WebdatasetFactory"),
            ("DefaultGenericWebdatasetFactory", "WebdatasetFactory"),
            "StandardWebdatasetFactory",
        ],
        "energon.task_encoder.flavors": [
            "CaptioningWebdataset",
            "ImageClassificationWebdataset",
            "ImageWebdataset",
            "InterleavedWebdataset",
            "MultiChoiceVQAWebdataset",
            "OCRWebdataset",
            "SimilarityInterleavedWebdataset",
            "TextWebdataset",
            "VQAOCRWebdataset",
            "VQAWebdataset",
            "VidQAWebdataset",
        ],
        "energon.task_encoder.join_factory": [
            "JoinedWebdatasetFactory",
        ],
        "energon.task_encoder.jsonl_factory": [
            ("CrudeJsonlDatasetFactory", "JsonlFactory"),
            ("DefaultCrudeJsonlDatasetFactory", "JsonlFactory"),
        ],
        "energon.task_encoder.leaf_dataset": [
            ("BaseCoreDatasetFactory", "LeafDataset"),
        ],
        "energon.task_encoder.webdataset_meta": [
            "WebdatasetMeta",
        ],
    },
)
