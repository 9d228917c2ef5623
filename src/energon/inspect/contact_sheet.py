"""Samples as one HTML file that needs nothing else: for a ticket, or beside a paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from energon.samples.notebook import as_pixels, image_html, recording_in_words, safe_html

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
    parts = [_HEAD.format(title=safe_html(title))]
    for name, fields in samples:
        parts.append(f"<section><h2>{safe_html(name)}</h2><dl>\n")
        for field, value in fields.items():
            parts.append(f"<dt>{safe_html(field)}</dt><dd>{_shown(value)}</dd>\n")
        parts.append("</dl></section>\n")
    return "".join([*parts, "</main></body></html>\n"])


def _shown(value: Any) -> str:
    pixels = as_pixels(value)
    if pixels is None:
        return safe_html(str(value)[:MAX_TEXT])
    height, width = pixels.shape[:2]
    about = recording_in_words(value) or f"{width} x {height} pixels"
    return f"{image_html(pixels, MAX_IMAGE_PIXELS)}<br>{safe_html(about)}"
