"""Conversations and interleaved documents in reading order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from energon.inspect.part_facts import part_extension, part_kind

MAX_PIECES = 200
PLACEHOLDERS = ("<image>", "<|image|>", "<img>")

ImageParts = Mapping[str, int]
"""The image parts of a sample: their numbers by their names."""


class Turn(NamedTuple):
    """A turn of a conversation, or a whole document."""

    who: str
    """The speaker; "" in a document."""
    number: int
    """0 for the first speaker and the system prompt, 1 for everyone else."""
    pieces: list[str | int]
    """Texts, and the numbers of parts that are images."""


def image_parts(names: Sequence[str]) -> dict[str, int]:
    """Return which parts of a sample are images, by name."""
    return {
        name: number
        for number, name in enumerate(names)
        if part_kind(part_extension(name)) == "image"
    }


def reading_order(value: Any, images: ImageParts) -> list[Turn]:
    """Return the turns of a conversation, or a document as one turn; [] if it is neither.

    Example:
        >>> reading_order({"messages": [{"role": "user", "content": "Hi"}]}, {})
        [Turn(who='user', number=0, pieces=['Hi'])]
        >>> reading_order({"sequence": ["See:", "a.jpg"]}, {"a.jpg": 3})
        [Turn(who='', number=0, pieces=['See:', 3])]
    """
    return _conversation(value, images) or _document(value, images)


def _conversation(value: Any, images: ImageParts) -> list[Turn]:
    if isinstance(value, Mapping):
        conversations = (value.get(name) for name in ("messages", "conversations", "conversation"))
        value = next((each for each in conversations if isinstance(each, list)), None)
    if not isinstance(value, list) or not value:
        return []
    left = iter(images.values())
    turns: list[Turn] = []
    for turn in value[:MAX_PIECES]:
        who = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
        if not isinstance(who, str):
            return []
        content = turn.get("content", turn.get("value"))
        pieces = content if isinstance(content, list) else [content]
        laid = [each for piece in pieces[:MAX_PIECES] for each in _pieces(piece, images, left)]
        first = next((turn.who for turn in turns if turn.who != "system"), who)
        turns.append(Turn(who, int(who not in (first, "system")), laid))
    return turns


def _pieces(piece: Any, images: ImageParts, left: Iterator[int]) -> Iterator[str | int]:
    """Yield the pieces of a turn; placeholders stand for the images in the order of their parts."""
    if isinstance(piece, str):
        yield from _with_images(piece, left)
    elif isinstance(piece, Mapping) and isinstance(piece.get("text"), str):
        yield from _with_images(piece["text"], left)
    elif isinstance(piece, Mapping) and str(piece.get("type", "")).startswith("image"):
        named = (_named(str(each), images) for each in piece.values())
        number = next((each for each in named if each is not None), None)
        yield next(left, "[image]") if number is None else number
    elif isinstance(piece, Mapping) and isinstance(piece.get("type"), str):
        yield f"[{piece['type']}]"
    elif piece is not None:
        yield str(piece)[:MAX_PIECES]


def _with_images(text: str, left: Iterator[int]) -> Iterator[str | int]:
    for mark in PLACEHOLDERS:
        if mark in text:
            for number, stretch in enumerate(text.split(mark)):
                if number:
                    yield next(left, mark)
                if stretch.strip():
                    yield stretch.strip()
            return
    yield text


def _document(value: Any, images: ImageParts) -> list[Turn]:
    """Return a document whose texts and images are interleaved."""
    pieces: Sequence[Any] = ()
    if isinstance(value, Mapping):
        drawn, texts = value.get("images"), value.get("texts")
        if isinstance(value.get("sequence"), list):
            pieces = value["sequence"]
        elif isinstance(drawn, list) and isinstance(texts, list):
            # Either each place has an entry in one list only, or texts and images alternate.
            pieces = [each for pair in zip_longest(drawn, texts) for each in pair]
    elif isinstance(value, list):
        pieces = value
    if not pieces or not all(each is None or isinstance(each, str) for each in pieces):
        return []
    laid: list[str | int] = []
    for piece in pieces[:MAX_PIECES]:
        if piece is not None:
            number = _named(piece, images)
            laid.append(piece if number is None else number)
    return [Turn("", 0, laid)] if any(isinstance(each, int) for each in laid) else []


def _named(text: str, images: ImageParts) -> int | None:
    """Return the image named by a text: by its part, or by its original file name."""
    if text in images:
        return images[text]
    return next((n for name, n in images.items() if text.endswith(f".{name}")), None)
