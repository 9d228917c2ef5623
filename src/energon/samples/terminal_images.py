"""Images as characters and escape sequences, for terminals."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

DRAWN_COLUMNS = 48
DRAWN_PIXELS = 320
SIXEL_COLORS = 64
KITTY_PIECE = 4096

Drawing = Callable[[NDArray[np.uint8]], Iterator[str]]
"""Yields the lines that draw pixels (height, width, 3)."""


def draws_images(environment: Mapping[str, str]) -> bool:
    """Return whether a terminal draws anything but text, by what it reports."""
    return environment.get("TERM") != "dumb"


def image_protocol(environment: Mapping[str, str]) -> Drawing:
    """Return what draws images on a terminal, by what the terminal reports.

    kitty, Ghostty and WezTerm take PNG, xterm and foot with sixel in TERM take sixels. Within tmux
    and screen, which pass on neither, and everywhere else it is blocks of color.
    """
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if term.startswith(("tmux", "screen")) or environment.get("TMUX"):
        return half_blocks
    if "KITTY_WINDOW_ID" in environment or term in ("xterm-kitty", "xterm-ghostty"):
        return kitty_image
    if program in ("WezTerm", "ghostty"):
        return kitty_image
    if "sixel" in term or term in ("foot", "foot-extra", "mlterm") or program == "mintty":
        return sixel_image
    return half_blocks


def kitty_image(pixels: NDArray[np.uint8]) -> Iterator[str]:
    """Yield what draws an image on a terminal with the graphics protocol of kitty."""
    buffer = io.BytesIO()
    _thumbnail(pixels).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    pieces = [data[at : at + KITTY_PIECE] for at in range(0, len(data), KITTY_PIECE)]
    head = "f=100,a=T,"
    line = ""
    for number, piece in enumerate(pieces):
        line += f"\x1b_G{head if not number else ''}m={int(number + 1 < len(pieces))};{piece}\x1b\\"
    yield line


def sixel_image(pixels: NDArray[np.uint8]) -> Iterator[str]:
    """Yield what draws an image as sixels: rows of six pixels, color by color."""
    image = _thumbnail(pixels).quantize(SIXEL_COLORS)
    colors = np.asarray(image.getpalette(), np.int64).reshape(-1, 3)
    numbers = np.asarray(image)
    height, width = numbers.shape
    line = f'\x1bPq"1;1;{width};{height}'
    line += "".join(
        f"#{n};2;{r};{g};{b}" for n, (r, g, b) in enumerate((colors * 100 // 255).tolist())
    )
    for top in range(0, height, 6):
        band = numbers[top : top + 6]
        weights = (1 << np.arange(len(band)))[:, None]
        rows = (
            f"#{color}" + _runs((weights * (band == color)).sum(axis=0).tolist())
            for color in np.unique(band).tolist()
        )
        line += "$".join(rows) + "-"
    yield f"{line}\x1b\\"


def _runs(sixels: Sequence[int]) -> str:
    """Return sixels as characters, long runs of one counted."""
    groups = ((chr(63 + value), len(list(run))) for value, run in groupby(sixels))
    return "".join(f"!{count}{char}" if count > 3 else char * count for char, count in groups)


def _thumbnail(pixels: NDArray[np.uint8]) -> Image:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((DRAWN_PIXELS, DRAWN_PIXELS))
    return image


def half_blocks(pixels: NDArray[np.uint8]) -> Iterator[str]:
    """Yield lines that draw an image: each character is two pixels, one above the other."""
    from PIL import Image

    height, width = pixels.shape[:2]
    columns = min(DRAWN_COLUMNS, shutil.get_terminal_size().columns, width)
    rows = max(1, round(height / width * columns / 2)) * 2
    small = Image.fromarray(np.ascontiguousarray(pixels)).resize((columns, rows))
    lines = np.asarray(small).reshape(rows // 2, 2, columns, 3)
    for upper, lower in lines.tolist():
        cells = (
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m▀"
            for a, b in zip(upper, lower, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"
