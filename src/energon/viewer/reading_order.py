"""Conversations and interleaved documents in reading order, with their images, sounds and videos.

Media are parts of the sample, or files that it names: in the fields `image`, `images`, `video` and
so on, or in the typed parts of a message. A placeholder such as `<image>` stands for the next one.
"""

from __future__ import annotations

import binascii
import json
import mimetypes
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import EnergonError
from energon.inspect.where import part_extension, part_kind
from energon.packing.tokens import role_and_content, turns_of
from energon.sources.tree import BrowsedFile, MemoryFile
from energon.viewer.shown import MEDIA_KINDS, ShownPart

MAX_PIECES = 200
MAX_VALUE_BYTES = 4 << 20
MAX_NAME_LETTERS = 1000
_PLACEHOLDER = re.compile(
    r"(?:<\|vision_start\|>)?<\|?(image|img|video|audio)(?:_pad|_\d+)?\|?>(?:<\|vision_end\|>)?"
)
_SPEAKERS = ("system", "user", "human", "assistant", "gpt")


class Turn(NamedTuple):
    """A turn of a conversation, or a whole document."""

    who: str
    """The speaker; "" in a document."""
    number: int
    """0 for the first speaker and the system prompt, 1 for everyone else."""
    pieces: list[str | int]
    """Texts, and the numbers of parts that are media."""


class ReadingOrder(NamedTuple):
    """A sample in reading order."""

    parts: list[ShownPart]
    """The parts of the sample, and behind them the files that it names."""
    turns: dict[int, list[Turn]]
    """By the numbers of parts: the conversation or document in each."""

    @property
    def order(self) -> list[int]:
        """The parts that are shown one after another, those in reading order first."""
        in_turns = set(self._media())
        shown = (part for part in self.parts if part.is_own or part.number not in in_turns)
        return sorted((part.number for part in shown), key=lambda n: n not in self.turns)

    def first_medium(self) -> int | None:
        """Return the number of the first medium that a reader meets."""
        return next(self._media(), None)

    def _media(self) -> Iterator[int]:
        pieces = (each for turns in self.turns.values() for turn in turns for each in turn.pieces)
        return (piece for piece in pieces if isinstance(piece, int))

    def answer(self) -> str:
        """Return the first text of another than the first speaker; without one, the first text."""
        turns = [turn for turns in self.turns.values() for turn in turns]
        answers = [turn for turn in turns if turn.number]
        answers = answers or [turn for turn in turns if turn.who != "system"] or turns
        texts = (piece for turn in answers for piece in turn.pieces if isinstance(piece, str))
        return next((text for text in texts if not _PLACEHOLDER.fullmatch(text)), "")


def lay_out(
    parts: Sequence[ShownPart], find_file: Callable[[str], BrowsedFile | None]
) -> ReadingOrder:
    """Return the parts of a sample in reading order.

    Args:
        parts: The parts.
        find_file: Returns the file that a sample names; None if there is none.
    """
    values: dict[int, Any] = {}
    fields: dict[str, Any] = {}
    for part in parts:
        value = _value(part)
        if value is None:
            continue
        values[part.number] = value
        if isinstance(value, Mapping):
            fields |= value
        else:
            fields[part.name.partition(".")[0]] = value
    media = _Media([*parts], fields, find_file)
    turns = {
        number: _conversation(value, media) or _document(value, media)
        for number, value in values.items()
    }
    return ReadingOrder(media.parts, {number: each for number, each in turns.items() if each})


def _value(part: ShownPart) -> Any:
    """Return the value of a part that can be a conversation, or name a medium; None for others."""
    is_name = part.kind == "text" and part.name.partition(".")[0].removesuffix("s") in MEDIA_KINDS
    if part.file.size > (MAX_NAME_LETTERS if is_name else MAX_VALUE_BYTES):
        return None
    try:
        if is_name:
            return part.file.read().decode().strip()
        return SampleDecoder().decode(part.name, part.file.read()) if part.kind == "value" else None
    except (EnergonError, ValueError):
        return None  # the page says so where the part is shown


class _Media:
    """The media of a sample, by number, in the order in which placeholders stand for them."""

    def __init__(
        self,
        parts: list[ShownPart],
        fields: Mapping[str, Any],
        find_file: Callable[[str], BrowsedFile | None],
    ) -> None:
        self.parts = parts
        self._find_file = find_file
        self._own = list(parts)
        self._numbers: dict[str, int | None] = {}
        self._queues = {str(kind): self._queue(kind, fields) for kind in MEDIA_KINDS}

    def _queue(self, kind: str, fields: Mapping[str, Any]) -> Iterator[str | int]:
        named = fields.get(f"{kind}s", fields.get(kind))
        names = [*_names(named)][:MAX_PIECES]
        numbers = [self.find(name) for name in names]
        others = iter([p.number for p in self._own if p.kind == kind and p.number not in numbers])
        laid: list[str | int] = []
        for name, number in zip(names, numbers, strict=True):
            laid.append(next(others, _not_found(name)) if number is None else number)
        return iter([*laid, *others])

    def take(self, kind: str, otherwise: str) -> str | int:
        """Return the next medium of a kind; `otherwise` if there are no more."""
        return next(self._queues["image" if kind == "img" else kind], otherwise)

    def find(self, name: str) -> int | None:
        """Return the number of the medium that a sample names, by part, file or `data:` address."""
        if name not in self._numbers:
            self._numbers[name] = self._find(name)
        return self._numbers[name]

    def _find(self, name: str) -> int | None:
        own = next((part.number for part in self._own if part.name == name), None)
        if own is not None:
            return own
        file = _inline(name) if name.startswith("data:") else None
        if file is None and len(name) <= MAX_NAME_LETTERS:
            extension = part_extension(name)
            file = self._find_file(name) if part_kind(extension) in MEDIA_KINDS else None
        if file is not None:
            label = name if len(name) <= MAX_NAME_LETTERS else name.partition(";")[0]
            short = label.rpartition("/")[2]
            self.parts.append(ShownPart(len(self.parts), short, label, file, is_own=False))
            return len(self.parts) - 1
        # The original name of a file whose content is a part: `coco/17.jpg` of the part `jpg`.
        endings = (
            p.number for p in self._own if name.endswith(f".{p.name}") and p.kind in MEDIA_KINDS
        )
        return next(endings, None)


def _inline(address: str) -> BrowsedFile | None:
    """Return the content of a `data:` address; None if it is not one."""
    head, comma, text = address.partition(",")
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    kind = head.removeprefix("data:").partition(";")[0]
    name = f"inline{mimetypes.guess_extension(kind) or ''}"
    return BrowsedFile(partial(MemoryFile, name, data), 0, len(data)) if comma and data else None


def _names(value: Any) -> Iterator[str]:
    """Yield the names of media in a field: a text, a dict like `{"url": …}`, or a list of these."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if isinstance(value.get("data"), str):  # with a "format", "wav", or a "media_type"
            kind = value.get("media_type", f"audio/{value.get('format')}")
            yield f"data:{kind};base64,{value['data']}"
        else:
            named = (value.get(key) for key in ("path", "url", "file", "image", "video", "audio"))
            yield from (each for each in named if isinstance(each, str))
    elif isinstance(value, list):
        for each in value[:MAX_PIECES]:
            yield from _names(each)


def _not_found(name: str) -> str:
    return f"[{name[:200]}: not found]"


def _conversation(value: Any, media: _Media) -> list[Turn]:
    messages = turns_of(value)
    if messages is None and isinstance(value, Mapping):
        messages = turns_of(value.get("texts"))
    if messages is None or not all(isinstance(turn, Mapping) for turn in messages):
        return []
    turns: list[Turn] = []
    for who, content in chain.from_iterable(map(_sides, messages[:MAX_PIECES])):
        pieces = content if isinstance(content, list) else [content]
        laid = [each for piece in pieces[:MAX_PIECES] for each in _pieces(piece, media)]
        first = next((turn.who for turn in turns if turn.who != "system"), str(who))
        turns.append(Turn(str(who), int(who not in (first, "system")), laid))
    return turns


def _sides(turn: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield speaker and content of a message, or of each side of `{"user": …, "assistant": …}`."""
    who, content = role_and_content(turn)
    if who is None:
        yield from ((name, turn[name]) for name in _SPEAKERS if isinstance(turn.get(name), str))
        return
    yield who, content
    if turn.get("tool_calls"):
        yield who, json.dumps(turn["tool_calls"], ensure_ascii=False, default=repr)


def _pieces(piece: Any, media: _Media) -> Iterator[str | int]:
    """Yield the texts and media of a piece of a turn."""
    if isinstance(piece, Mapping) and isinstance(piece.get("text"), str):
        piece = piece["text"]
    if isinstance(piece, str):
        yield from _with_media(piece, media)
    elif isinstance(piece, Mapping) and isinstance(piece.get("type"), str):
        type_ = piece["type"]
        kind = next((each for each in MEDIA_KINDS if each in type_), None)
        names = [name for key, of in piece.items() if key != "type" for name in _names(of)]
        number = next((n for n in map(media.find, names) if n is not None), None)
        if number is not None:
            yield number
        elif names:
            yield _not_found(names[0])
        else:
            yield media.take(kind, f"[{kind}]") if kind else f"[{type_}]"
    elif piece is not None:
        yield str(piece)[:MAX_PIECES]


def _with_media(text: str, media: _Media) -> Iterator[str | int]:
    at = 0
    for mark in _PLACEHOLDER.finditer(text):
        if before := text[at : mark.start()].strip():
            yield before
        yield media.take(mark[1], mark[0])
        at = mark.end()
    if after := text[at:].strip() if at else text:
        yield after


def _document(value: Any, media: _Media) -> list[Turn]:
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
    numbers = [(each, media.find(each)) for each in pieces[:MAX_PIECES] if each is not None]
    laid = [text if number is None else number for text, number in numbers]
    return [Turn("", 0, laid)] if any(isinstance(each, int) for each in laid) else []
