"""What all libraries do to a picture, in their hooks: the same bytes to the same array."""

from __future__ import annotations

from typing import Any

SIDE = 224


def thumbnail(data: bytes) -> Any:
    """Return a JPEG as (224, 224, 3) bytes, decoded at the least scale that has as many pixels."""
    # Here, so that other programs do not import them.
    import numpy as np
    import simplejpeg
    from PIL import Image

    pixels = simplejpeg.decode_jpeg(data, fastdct=True, min_height=SIDE, min_width=SIDE)
    return np.asarray(Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def with_thumbnail(sample: Any) -> Any:
    """Decode the picture of a sample."""
    sample["jpg"] = thumbnail(sample["jpg"])
    return sample
