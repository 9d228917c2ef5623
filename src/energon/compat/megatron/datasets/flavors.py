"""Dataset classes named after their sample type, as they were before `sample_type`."""

from __future__ import annotations

import os
import warnings
from typing import Any

from energon.compat.megatron.datasets.webdataset import StandardWebdatasetFactory
from energon.samples import types


class FlavorWebdataset(StandardWebdatasetFactory):
    """A dataset of one sample type. Deprecated: name the type with `sample_type`."""

    __sample_type__: type

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        kind = type(self)
        sample_type = kind.__sample_type__
        warnings.warn(
            f"{kind.__name__} is deprecated; use StandardWebdatasetFactory(path, "
            f"sample_type={sample_type.__name__})",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__(path, sample_type=sample_type, **settings)


class CaptioningWebdataset(FlavorWebdataset):
    """Images and what they show."""

    __sample_type__ = types.CaptioningSample


class ImageWebdataset(FlavorWebdataset):
    """Images."""

    __sample_type__ = types.ImageSample


class ImageClassificationWebdataset(FlavorWebdataset):
    """Images and their classes."""

    __sample_type__ = types.ImageClassificationSample


class InterleavedWebdataset(FlavorWebdataset):
    """Images and texts in the order of reading."""

    __sample_type__ = types.InterleavedSample


class MultiChoiceVQAWebdataset(FlavorWebdataset):
    """Images and questions with answers to choose from."""

    __sample_type__ = types.MultiChoiceVQASample


class OCRWebdataset(FlavorWebdataset):
    """Images of text, and the text in them."""

    __sample_type__ = types.OCRSample


class SimilarityInterleavedWebdataset(FlavorWebdataset):
    """Images and texts, and how well they go together."""

    __sample_type__ = types.SimilarityInterleavedSample


class TextWebdataset(FlavorWebdataset):
    """Texts."""

    __sample_type__ = types.TextSample


class VidQAWebdataset(FlavorWebdataset):
    """Videos and questions about them."""

    __sample_type__ = types.VidQASample


class VQAOCRWebdataset(FlavorWebdataset):
    """Images with text in them and questions about them."""

    __sample_type__ = types.VQAOCRSample


class VQAWebdataset(FlavorWebdataset):
    """Images and questions about them."""

    __sample_type__ = types.VQASample
