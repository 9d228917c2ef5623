"""The sample types that come with energon, and the resolver of their names in documents.

It is the only place where text of a document becomes a Python object. A document is data, and data
must not decide which code runs. So a name stands for

- a class of ours, from a fixed list, or
- a class that derives from one of ours (a `Sample`, say), and that the program itself has defined
  or imported: it is in the namespace of a module that is loaded, under its plain name.

Resolving neither imports a module nor reads an attribute of one: both may run code. Anything else
needs `allow=("code",)`, which imports modules and permits functions and dotted names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError, EnergonError
from energon.limits import is_allowed, refusal
from energon.messages import describe_error, nearest
from energon.samples.collate import generic_batch
from energon.samples.sample import Sample, edataclass

if TYPE_CHECKING:
    import torch


@edataclass
class CaptioningSample(Sample):
    """An image and its caption.

    Example:
        >>> import torch
        >>> sample = CaptioningSample(__key__="a", image=torch.zeros(3, 24, 32), caption="a cat")
        >>> sample.image.shape, sample.caption
        (torch.Size([3, 24, 32]), 'a cat')
    """

    image: torch.Tensor
    caption: str


@edataclass
class ImageSample(Sample):
    """An image, for example to be reconstructed.

    Example:
        >>> import torch
        >>> ImageSample(__key__="a", image=torch.zeros(3, 24, 32)).image.shape
        torch.Size([3, 24, 32])
    """

    image: torch.Tensor


@edataclass
class ImageClassificationSample(Sample):
    """An image and its class.

    Example:
        >>> import torch
        >>> sample = ImageClassificationSample(__key__="a", image=torch.zeros(3, 24, 32), label=2)
        >>> sample.label, sample.label_name
        (2, None)
    """

    image: torch.Tensor
    label: int | None = None
    label_name: str | None = None


@edataclass
class InterleavedSample(Sample):
    """Images and texts in reading order.

    Example:
        >>> import torch
        >>> sample = InterleavedSample(__key__="a", sequence=["A cat:", torch.zeros(3, 24, 32)])
        >>> [type(each).__name__ for each in sample.sequence]
        ['str', 'Tensor']
    """

    sequence: list[torch.Tensor | str]


@edataclass
class MultiChoiceVQASample(Sample):
    """An image and a question about it, with answers to choose from.

    Example:
        >>> import torch
        >>> sample = MultiChoiceVQASample(
        ...     __key__="a",
        ...     image=torch.zeros(3, 24, 32),
        ...     context="Which animal is it?",
        ...     choices=["a cat", "a dog"],
        ...     correct_choice_idx=1,
        ... )
        >>> sample.choices[sample.correct_choice_idx]
        'a dog'
    """

    image: torch.Tensor
    context: str
    choices: list[str] | None = None
    correct_choice_idx: int = 0


@edataclass
class OCRSample(Sample):
    """An image of text, and the text in it.

    Boxes are (num_boxes, 4) as x, y, width, height, or (num_boxes, 5) with a confidence.

    Example:
        >>> import torch
        >>> sample = OCRSample(
        ...     __key__="a",
        ...     image=torch.zeros(3, 24, 32),
        ...     text="STOP",
        ...     words_boxes=torch.tensor([[4, 8, 24, 9]]),
        ...     words_text=["STOP"],
        ... )
        >>> sample.words_boxes.shape
        torch.Size([1, 4])
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
    """Images and texts of a document, and how well they go together.

    Example:
        >>> import torch
        >>> sample = SimilarityInterleavedSample(
        ...     __key__="a",
        ...     images=[torch.zeros(3, 24, 32)],
        ...     texts=["a cat", "a dog"],
        ...     similarity_matrix=torch.tensor([[0.9, 0.2]]),
        ...     matched_text_indices=[0],
        ... )
        >>> sample.texts[sample.matched_text_indices[0]]
        'a cat'
    """

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
    """A text.

    Example:
        >>> TextSample(__key__="a", text="Once upon a time").text
        'Once upon a time'
    """

    text: str


@edataclass
class TokensSample(Sample):
    """Tokens of a document, or of a window over several documents.

    Example:
        >>> tokens, cu_seqlens = np.array([5, 6, 7, 8, 9]), np.array([0, 3, 5], np.int32)
        >>> sample = TokensSample(__key__="a", tokens=tokens, cu_seqlens=cu_seqlens)
        >>> sample.positions
        array([0, 1, 2, 0, 1])
    """

    tokens: NDArray[Any]
    """(length,), int64."""
    cu_seqlens: NDArray[np.int32]
    """Start of each sequence of the document, or of each document of the window, and the end."""
    modes: NDArray[np.int8] | None = None
    """(length,): the mode of each token, of multimodal files."""

    @property
    def positions(self) -> Any:
        """The position of each token in its sequence or document, counted within the sample.

        In a batch it has the shape of `tokens`, with zeros for padding.
        """
        edges: Any = self.cu_seqlens
        if isinstance(edges, list):
            return generic_batch([_positions(each) for each in edges])
        return _positions(edges)

    @classmethod
    def from_samples(cls, samples: Sequence[Self]) -> Self:
        """Collate samples: tokens and modes are stacked (and padded), the rest become lists."""
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
    """A video and a question about it.

    Example:
        >>> from pathlib import Path
        >>> from energon import AVDecoder
        >>> sample = VidQASample(
        ...     __key__="a",
        ...     video=AVDecoder(Path("clip.mp4").read_bytes()),
        ...     context="Does it grow brighter?",
        ...     answers=["yes"],
        ... )
        >>> sample.video.get_video_fps()
        10.0
    """

    video: Any
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class VQASample(Sample):
    """An image and a question about it.

    Example:
        >>> import torch
        >>> sample = VQASample(
        ...     __key__="a",
        ...     image=torch.zeros(3, 24, 32),
        ...     context="What color is it?",
        ...     answers=["black", "dark"],
        ...     answer_weights=torch.tensor([0.75, 0.25]),
        ... )
        >>> sample.answers[sample.answer_weights.argmax()]
        'black'
    """

    image: torch.Tensor
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class VQAOCRSample(Sample):
    """An image with text in it and a question about it.

    Example:
        >>> import torch
        >>> sample = VQAOCRSample(
        ...     __key__="a",
        ...     image=torch.zeros(3, 24, 32),
        ...     context="What does the sign say?",
        ...     text="STOP",
        ...     answers=["stop"],
        ... )
        >>> sample.text.lower() in sample.answers
        True
    """

    image: torch.Tensor
    context: str
    text: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None
    words_boxes: torch.Tensor | None = None
    words_text: list[str] | None = None


_OURS = ("energon", "megatron.energon")


@cache
def sample_types() -> dict[str, type[Sample]]:
    """Return the sample types that come with energon, by name."""
    return {
        name: value
        for name, value in globals().items()
        if isinstance(value, type) and issubclass(value, Sample)
    }


def flavors() -> dict[str, type[Sample]]:
    """Return them by the names of the old dataset classes, which implied a sample type."""
    return {
        name.removesuffix("Sample") + "Webdataset": value
        for name, value in sample_types().items()
        if name != "Sample"
    }


def resolve_class(
    module: str,
    name: str,
    *,
    allow: Collection[str] = (),
    kinds: tuple[type, ...] = (Sample,),
    ours: Mapping[str, type] | None = None,
) -> Any:
    """Return the class that a document names with `__module__` and `__class__`.

    Args:
        module: E.g. "megatron.energon".
        name: E.g. "CaptioningSample".
        allow: "code" permits importing modules, and any name.
        kinds: The class has to derive from one of these.
        ours: Classes of energon that may be named besides the sample types.

    Raises:
        ConfigError: If there is no such name.
        SecurityError: If it is not such a class, or its module would have to be imported.
    """
    if _is_ours(module):
        types = {**sample_types(), **flavors(), **(ours or {})}
        if name in types:
            return types[name]
        near = nearest(name, types)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(sample_types())}"
        raise ConfigError(f"{module} has no sample type {name!r}; {hint}")
    if is_allowed("code", allow):
        return _import(module, name)
    chosen: Any = _loaded(module).get(name)
    # Not isinstance, which may run code of an object of unknown type.
    if issubclass(type(chosen), type) and any(kind in type.mro(chosen) for kind in kinds):
        return chosen
    raise _unusable(module, name, " or ".join(f"energon.{kind.__name__}" for kind in kinds))


def resolve_function(module: str, name: str, *, allow: Collection[str] = ()) -> Callable[..., Any]:
    """Return the function that a document names with `__module__` and `__function__`.

    Raises:
        SecurityError: If code is not allowed.
        ConfigError: If there is no such function.
    """
    if not is_allowed("code", allow):
        raise refusal(
            "code",
            f"{module}.{name} is a function, and a document may not choose the function to call; "
            "name a subclass of energon.Sample, whose `from_joined` is called, with __class__",
        )
    function = _import(module, name)
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"{module}.{name} is not a function; a class is named by __class__")
    return function  # type: ignore[no-any-return]


def _is_ours(module: str) -> bool:
    return module in _OURS or module.startswith(tuple(f"{ours}." for ours in _OURS))


def _loaded(module: str) -> Mapping[str, Any]:
    """Return the namespace of a module; an empty one if it is not loaded.

    Reads `__dict__` directly: any attribute access would load a lazy module.
    """
    loaded = sys.modules.get(module)
    if not issubclass(type(loaded), ModuleType):
        return {}
    namespace: Mapping[str, Any] = object.__getattribute__(loaded, "__dict__")
    return namespace


def _unusable(module: str, name: str, expected: str) -> EnergonError:
    """Return the error for a name that does not stand for a usable class."""
    if module not in sys.modules:
        problem = "importing its module would run code; import it in your program"
    elif name in _loaded(module):
        problem = f"it is not a subclass of {expected}, and a document may name nothing else"
    elif "." in name:
        problem = "names with dots may lead anywhere; name what the module itself has"
    else:
        near = nearest(name, _loaded(module))
        hint = f", did you mean {near!r}?" if near else f"; expected a subclass of {expected}."
        return ConfigError(
            f"module {module} has no {name!r}{hint} Names that it creates on access are "
            'found with allow=("code",) or ENERGON_ALLOW=code'
        )
    return refusal("code", f"{module}.{name} is named by a document: {problem}")


def _import(module: str, name: str) -> Any:
    """Import the module and return what a dotted name refers to; the user allows it."""
    try:
        value: Any = import_module(module)
    except Exception as error:
        why = describe_error(error)
        raise ConfigError(f"{module}.{name}: cannot import {module!r}: {why}") from error
    for step in name.split("."):
        if not hasattr(value, step):
            raise ConfigError(f"module {module} has no {name!r}")
        value = getattr(value, step)
    return value
