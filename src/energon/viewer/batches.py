"""Show a batch field by field: arrays, images, texts, and packed sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from energon.samples.notebook import as_array
from energon.viewer.images import inline_thumbnail
from energon.viewer.parts import (
    ShownArray,
    Tokenizer,
    show_array,
    shown_value,
    tokenizer_of,
    value_tree,
)
from energon.viewer.plots import packed

MAX_BATCH_IMAGES = 64


class ShownField(NamedTuple):
    """A field of a batch."""

    name: str
    array: ShownArray | None
    """If it is an array or tensor."""
    images: list[str]
    """If the array can be images: the `data:` addresses of the first ones."""
    html: Markup
    """The value, if it is not an array."""
    items: list[str]
    """A summary of this field for each sample of the batch; [] if they cannot be told apart."""


class ShownBatch(NamedTuple):
    """A batch, field by field."""

    fields: list[ShownField]
    packing: Markup
    """Packed sequences as bars; "" if there are none."""


def show_batch(batch: Any, tokenizer: Tokenizer | None) -> ShownBatch:
    """Return a batch as the page of a step shows it.

    Args:
        batch: The batch.
        tokenizer: Turns tokens into text.
    """
    shown = [_show(name, value, tokenizer) for name, value in _fields(batch)]
    return ShownBatch(shown, draw_packing(batch))


def _fields(batch: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(batch):
        yield from ((each.name, getattr(batch, each.name)) for each in fields(batch))
    elif isinstance(batch, Mapping):
        yield from ((str(name), value) for name, value in batch.items())
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        yield from ((str(number), value) for number, value in enumerate(batch))
    else:
        yield type(batch).__name__, batch


def _show(name: str, value: Any, tokenizer: Tokenizer | None) -> ShownField:
    array = as_array(value)
    if array is None:
        items = value if isinstance(value, list | tuple) else []
        return ShownField(name, None, [], value_tree(value), [shown_value(each) for each in items])
    items = [shown_value(each) for each in array] if array.ndim else []
    shown = show_array(name, array, tokenizer_of(name, tokenizer))
    return ShownField(name, shown, list(_images(array)), Markup(), items)


def draw_packing(value: Any) -> Markup:
    """Return the packed sequences in a batch as bars; nothing if it has none.

    The result of `pack_sequences` states how much is padding. In other batches with `cu_seqlens`
    and tokens, padding is everything after the last sequence, or a last sequence in which all
    tokens are equal.
    """
    rows: list[list[int]] = []
    pads: list[int] = []
    for each in _packs(value, 0):
        lengths, pad = each
        rows.append(lengths)
        pads.append(pad)
    return packed(rows[:MAX_BATCH_IMAGES], pads[:MAX_BATCH_IMAGES]) if rows else Markup()


def _packs(value: Any, level: int) -> Iterator[tuple[list[int], int]]:
    if (
        level > 4
        or isinstance(value, str | bytes)
        or not (is_dataclass(value) or isinstance(value, Mapping | Sequence))
    ):
        return
    named = dict(_fields(value))
    starts = next((v for n, v in named.items() if "cu_seqlens" in n.lower()), None)
    if starts is None:
        for each in named.values():
            yield from _packs(each, level + 1)
        return
    tokens = next(
        (v for n, v in named.items() if n.lower() in ("tokens", "input_ids", "values", "text")),
        None,
    )
    count = named.get("num_values")
    edges_of_all = as_array(starts)
    several = edges_of_all is None or edges_of_all.ndim == 2
    for number, each in enumerate(starts if several else [starts]):
        edges = np.asarray(as_array(each))
        lengths = [int(n) for n in np.diff(edges) if n > 0]
        own = tokens[number] if several and tokens is not None else tokens
        values = None if own is None else np.asarray(as_array(own)).reshape(-1)
        yield _without_padding(lengths, values, count if isinstance(count, int) else None)


def _without_padding(
    lengths: list[int], values: NDArray[Any] | None, count: int | None
) -> tuple[list[int], int]:
    """Return the lengths of sequences without padding, and the length of the padding."""
    total = sum(lengths)
    if count is not None and count < total:
        return lengths[:-1], total - count
    if values is None:
        return lengths, 0
    if len(values) > total:
        return lengths, len(values) - total
    if lengths and lengths[-1] > 1 and len(values) == total:
        last = values[-lengths[-1] :]
        if (last == last[0]).all():
            return lengths[:-1], lengths[-1]
    return lengths, 0


def _images(array: NDArray[Any]) -> Iterator[str]:
    """Yield the images in an array of bytes, or of floats around 0 to 1."""
    if array.ndim != 4 or not array.size or array.dtype.kind not in "uf":
        return
    if array.shape[1] in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.shape[3] not in (1, 3) or min(array.shape[1:3]) < 4:
        return
    for pixels in array[:MAX_BATCH_IMAGES]:
        if pixels.dtype != np.uint8:
            values = np.nan_to_num(pixels.astype(np.float32))
            low, high = min(0.0, float(values.min())), max(1.0, float(values.max()))
            # Normalized images have values on both sides of 0: their whole range is shown.
            pixels = ((values - low) / (high - low) * 255).astype(np.uint8)
        yield inline_thumbnail(np.repeat(pixels, 3 // pixels.shape[2], axis=2))
