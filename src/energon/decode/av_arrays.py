"""Frames and samples as tensors, or as arrays where there is no torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from energon.decode.av_video import Clip, Size


def as_frames(clip: Clip, size: Size | None = None) -> Any:
    """Return the frames of a clip as (frames, channels, height, width).

    Args:
        clip: The clip.
        size: Height and width, for clips without a frame.
    """
    frames = clip.frames
    pixels = np.stack(frames) if frames else np.empty((0, *(size or (0, 0)), 3), np.uint8)
    return as_tensor(pixels.transpose(0, 3, 1, 2))


def as_tensor(array: Any) -> Any:
    """Return an array as a tensor that shares its memory; without torch, as it is."""
    if find_spec("torch") is None:
        return array
    import torch

    return torch.from_numpy(array)
