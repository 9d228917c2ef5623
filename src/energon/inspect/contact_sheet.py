"""Samples as one HTML file that needs nothing else: for a ticket, or beside a paper."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.messages import escape_text

MAX_IMAGE_PIXELS = 512
MAX_TEXT = 2000

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1rem; }}
main {{ display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); }}
section {{ border: 1px solid #8888; border-radius: .4rem; padding: .6rem; }}
section, dd {{ overflow-wrap: anywhere; }}
h2 {{ font-size: 1rem; margin: 0 0 .4rem; }}
img {{ max-width: 100%; }}
dt {{ opacity: .7; font-size: .8rem; }}
dd {{ margin: 0 0 .3rem; white-space: pre-wrap; }}
</style></head><body>
<h1>{title}</h1>
<main>
"""


def contact_sheet(title: str, samples: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Return HTML that shows samples.

    Args:
        title: Of the page.
        samples: What each is called, and its fields. Arrays that can be images are shown as
            images; other values should be text already.
    """
    parts = [_HEAD.format(title=_safe(title))]
    for name, fields in samples:
        parts.append(f"<section><h2>{_safe(name)}</h2><dl>\n")
        for field, value in fields.items():
            parts.append(f"<dt>{_safe(field)}</dt><dd>{_shown(value)}</dd>\n")
        parts.append("</dl></section>\n")
    return "".join([*parts, "</main></body></html>\n"])


def as_pixels(value: Any) -> NDArray[np.uint8] | None:
    """Return an array as pixels (height, width, 3), if it can be an image, else None."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or not value.size:
        return None
    if value.ndim == 2:
        return np.repeat(value[:, :, None], 3, axis=2)
    return value[:, :, :3] if value.ndim == 3 and value.shape[2] in (3, 4) else None


def _shown(value: Any) -> str:
    from PIL import Image

    pixels = as_pixels(value)
    if pixels is None:
        return _safe(str(value)[:MAX_TEXT])
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((MAX_IMAGE_PIXELS, MAX_IMAGE_PIXELS))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    data = base64.b64encode(buffer.getvalue()).decode()
    height, width = pixels.shape[:2]
    return f'<img src="data:image/jpeg;base64,{data}" alt="image"><br>{width} x {height} pixels'


def _safe(text: str) -> str:
    return escape(escape_text(text))
