"""Samples and batches as programs make them, with the subflavor of Megatron-Energon 5 and 6.

Datasets yield the samples of `energon`, which count as instances of the types here. Programs may
pass `__subflavor__` to these types, and to those that they derive from them.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Self

from energon.samples import sample, sample_types


class _StandsFor(ABC):  # noqa: B024  # only counts instances
    """Counts instances of the first base, a class of the core, as instances of a class here."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        is_here = cls.__module__ == __name__ and cls is not _StandsFor
        return True if is_here and issubclass(kind, cls.__bases__[0]) else NotImplemented


@dataclass(kw_only=True)
class Sample(sample.Sample, _StandsFor):
    """Base class of a program's samples, see `energon.Sample`."""

    # Leaves no attribute on the class, which fields that declare it again would inherit.
    __subflavor__: str | None = field(default_factory=NoneType)

    @classmethod
    def derive_from(cls, base_sample: Any, **values: Any) -> Self:
        """Return a sample with the key, subflavors and sources of `base_sample`, and `values`."""
        subflavor = getattr(base_sample, "__subflavor__", None)
        return super().derive_from(base_sample, **{"__subflavor__": subflavor, **values})


@dataclass(kw_only=True)
class Batch(sample.Batch, _StandsFor):
    """Base class of a program's batches, see `energon.Batch`; they may have no keys."""

    __key__: list[str] = field(default_factory=list)


@dataclass
class VideoData:
    """A video that has been decoded as a whole; datasets yield `AVData` and `AVDecoder` instead.

    Args:
        frames: The images: (frames, channels, height, width).
        aframes: The audio: (channels, points).
        info: `video_fps` and `audio_fps`, as far as they are known.
    """

    frames: Any
    aframes: Any
    info: dict[str, Any]


@dataclass(kw_only=True)
class CaptioningSample(sample_types.CaptioningSample, Sample):
    """See `energon.CaptioningSample`."""


@dataclass(kw_only=True)
class ImageSample(sample_types.ImageSample, Sample):
    """See `energon.ImageSample`."""


@dataclass(kw_only=True)
class ImageClassificationSample(sample_types.ImageClassificationSample, Sample):
    """See `energon.ImageClassificationSample`."""


@dataclass(kw_only=True)
class InterleavedSample(sample_types.InterleavedSample, Sample):
    """See `energon.InterleavedSample`."""


@dataclass(kw_only=True)
class MultiChoiceVQASample(sample_types.MultiChoiceVQASample, Sample):
    """See `energon.MultiChoiceVQASample`."""


@dataclass(kw_only=True)
class OCRSample(sample_types.OCRSample, Sample):
    """See `energon.OCRSample`."""


@dataclass(kw_only=True)
class SimilarityInterleavedSample(sample_types.SimilarityInterleavedSample, Sample):
    """See `energon.SimilarityInterleavedSample`."""


@dataclass(kw_only=True)
class TextSample(sample_types.TextSample, Sample):
    """See `energon.TextSample`."""


@dataclass(kw_only=True)
class VidQASample(sample_types.VidQASample, Sample):
    """See `energon.VidQASample`."""


@dataclass(kw_only=True)
class VQASample(sample_types.VQASample, Sample):
    """See `energon.VQASample`."""


@dataclass(kw_only=True)
class VQAOCRSample(sample_types.VQAOCRSample, Sample):
    """See `energon.VQAOCRSample`."""
