"""The sample types that come with energon. Images are tensors of shape (C, H, W)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from energon.samples.collate import generic_batch
from energon.samples.sample import Sample, edataclass

if TYPE_CHECKING:
    import torch


@edataclass
class CaptioningSample(Sample):
    """An image and what it shows."""

    image: torch.Tensor
    caption: str


@edataclass
class ImageSample(Sample):
    """An image, for example to be reconstructed."""

    image: torch.Tensor


@edataclass
class ImageClassificationSample(Sample):
    """An image and its class."""

    image: torch.Tensor
    label: int | None = None
    label_name: str | None = None


@edataclass
class InterleavedSample(Sample):
    """Images and texts in the order of reading."""

    sequence: list[torch.Tensor | str]


@edataclass
class MultiChoiceVQASample(Sample):
    """An image and a question about it, with answers to choose from."""

    image: torch.Tensor
    context: str
    choices: list[str] | None = None
    correct_choice_idx: int = 0


@edataclass
class OCRSample(Sample):
    """An image of text, and the text in it.

    Boxes are (num_boxes, 4) as x, y, width, height, or (num_boxes, 5) with a confidence.
    """

    image: torch.Tensor
    text: str
    block_boxes: torch.Tensor | None = None
    block_classes: torch.Tensor | list[str] | None = None
    block_text: list[str] | None = None
    lines_boxes: torch.Tensor | None = None
    lines_text: list[str] | None = None
    words_boxes: torch.Tensor | None = None
    words_text: list[str] | None = None
    chars_boxes: torch.Tensor | None = None
    chars_text: list[str] | None = None


@edataclass
class SimilarityInterleavedSample(Sample):
    """Images and texts of a document, and how well they go together."""

    images: list[torch.Tensor]
    texts: list[str]
    audio: Any = None
    video: Any = None
    similarity_matrix: torch.Tensor | None = None
    """(num_images, num_texts)."""
    matched_text_indices: list[int] | None = None
    """For each image, the text that fits best."""


@edataclass
class TextSample(Sample):
    """A text."""

    text: str


@edataclass
class TokensSample(Sample):
    """Tokens of a document, or of a window over several documents."""

    tokens: NDArray[Any]
    """(length,), int64."""
    cu_seqlens: NDArray[np.int32]
    """Where each sequence of the document, or each document of the window, begins, and the end."""
    modes: NDArray[np.int8] | None = None
    """(length,): the mode of each token, of multimodal files."""

    @property
    def positions(self) -> Any:
        """The place of each token in its sequence or document, as far as that is in the sample.

        Of a batch, the same shape as `tokens`, with zeros where these are padded.
        """
        edges: Any = self.cu_seqlens
        if isinstance(edges, list):
            return generic_batch([_positions(each) for each in edges])
        return _positions(edges)

    @classmethod
    def from_samples(cls, samples: Sequence[Self]) -> Self:
        """Return samples as one: tokens and modes stacked (and padded), the rest as lists."""
        modes: Any = [sample.modes for sample in samples]
        values: dict[str, Any] = {
            name: [getattr(sample, name) for sample in samples]
            for name in ("__key__", "__subflavors__", "__sources__", "cu_seqlens")
        }
        return cls(
            **values,
            __restore_key__=tuple(sample.__restore_key__ for sample in samples),
            tokens=generic_batch([sample.tokens for sample in samples]),
            modes=None if modes[0] is None else generic_batch(modes),
        )


def _positions(edges: NDArray[np.int32]) -> NDArray[np.int64]:
    starts = np.asarray(edges, np.int64)
    return np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))


@edataclass
class VidQASample(Sample):
    """A video and a question about it."""

    video: Any
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class VQASample(Sample):
    """An image and a question about it."""

    image: torch.Tensor
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class VQAOCRSample(Sample):
    """An image with text in it and a question about it."""

    image: torch.Tensor
    context: str
    text: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None
    words_boxes: torch.Tensor | None = None
    words_text: list[str] | None = None
