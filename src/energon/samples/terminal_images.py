"""Images as colored characters, for terminals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def half_blocks(pixels: NDArray[np.uint8], columns: int, rows: int) -> Iterator[str]:
    """Yield lines that draw an image: each character is two pixels, one above the other.

    Args:
        pixels: Of shape (height, width, 3).
        columns: Maximum number of characters in a line.
        rows: Maximum number of lines.
    """
    from PIL import Image

    height, width = pixels.shape[:2]
    scale = min(columns / width, 2 * rows / height, 1.0)
    size = max(1, round(width * scale)), 2 * max(1, round(height * scale / 2))
    small = np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize(size))
    for upper, lower in zip(small[::2].tolist(), small[1::2].tolist(), strict=True):
        cells = (
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m▀"
            for a, b in zip(upper, lower, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"
