"""The names of energon under the import path that programs written for Megatron-Energon use.

The modules below have the names that those of Megatron-Energon have. All are only other ways to
what is at home in energon.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import energon
from megatron.energon._alias import alias

# A function and a module have this name: whoever imports it from here wants the function.
from megatron.energon.edataclass import edataclass as edataclass

_look_up, _, _former = alias(
    __name__,
    {
        "energon.task_encoder.factories": [
            ("BaseWebdataset", "WebdatasetFactory"),
            ("BaseWebdatasetFactory", "WebdatasetFactory"),
            "CrudeWebdataset",
            ("DefaultDecoderWebdataset", "WebdatasetFactory"),
            ("DefaultDecoderWebdatasetFactory", "WebdatasetFactory"),
            ("DefaultGenericWebdataset", "WebdatasetFactory"),
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
            ("BaseCoreDataset", "LeafDataset"),
            ("BaseCoreDatasetFactory", "LeafDataset"),
        ],
        "energon.task_encoder.load_dataset": [
            ("DatasetLoaderInterface", "DatasetLoader"),
            ("Metadataset", "DatasetLoader"),
            ("MetadatasetV2", "DatasetLoader"),
        ],
    },
)
_MODULES = frozenset(
    (
        "av",
        "cache",
        "cli",
        "dataset_config",
        "epathlib",
        "errors",
        "flavors",
        "loader",
        "media",
        "metadataset",
        "sample_utils",
        "savable_loader",
        "source_info",
        "task_encoder",
        "tools",
        "transforms",
        "worker",
        "wrappers",
    )
)

__all__ = sorted({*energon.__all__, *_former})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    return _look_up(name) if name in _former else getattr(energon, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
