"""What all pages share: how they are made, and what requests ask of them."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from energon.errors import EnergonError
from energon.inspect.part_facts import PartKind, extension_of, part_kind
from energon.io.address import address_name
from energon.messages import escape_text
from energon.viewer.notes import Notes, Said
from energon.viewer.parts import Tokenizer, snippet
from energon.viewer.reading_order import Pictures, pictures_of
from energon.viewer.shown import Shown, ShownLeaf, ShownPart, ShownSample

HERE = Path(__file__).parent
MAX_SNIPPETS = 4
"""This many parts say in a gallery what a sample without text holds."""


@dataclass(frozen=True, eq=False)
class Site:
    """Makes pages of what is shown. May be used by many threads.

    Args:
        shown: The datasets.
        allow: What data may do, see `get_train_dataset`.
        notes: Where it is written what people say about samples; None lets them say nothing.
        tokenizer: Makes text of tokens; None shows numbers.
    """

    shown: Shown
    allow: Collection[str]
    notes: Notes | None
    tokenizer: Tokenizer | None
    form: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """A page of someone else does not know it, so it cannot send forms in the user's name."""

    def page(self, template: str, *, status: int = 200, **values: Any) -> Response:
        """Return the page that a template makes of values."""
        text = templates().get_template(template).render(shown=self.shown, status=status, **values)
        content = text.encode("utf-8", "replace")
        return Response(content, status, media_type="text/html; charset=utf-8")

    def leaf(self, request: Request) -> ShownLeaf:
        """Return the dataset that an address names."""
        numbers = request.path_params
        try:
            return self.shown.leaf(numbers["split"], numbers["leaf"])
        except IndexError as error:
            raise HTTPException(404, "there is no such dataset") from error

    def sample(self, request: Request) -> tuple[ShownLeaf, ShownSample]:
        """Return the sample that an address names, and its dataset."""
        leaf = self.leaf(request)
        ordinal = request.path_params["ordinal"]
        if ordinal >= len(leaf):
            raise HTTPException(404, f"there is no sample {ordinal}, only 0 to {len(leaf) - 1}")
        return leaf, leaf.sample(ordinal)

    def place(self, request: Request, leaf: ShownLeaf) -> dict[str, Any]:
        """Return what templates have to know of a dataset and its address."""
        numbers = request.path_params
        base = f"/s/{numbers['split']}/{numbers['leaf']}"
        split = self.shown.splits[numbers["split"]]
        # A dataset on its own is named by the address already.
        crumb = (
            split.label if leaf.name == address_name(split.path) else f"{split.label}: {leaf.name}"
        )
        return {"leaf": leaf, "split": split.label, "crumb": crumb, "base": base}

    def said(self, leaf: ShownLeaf) -> dict[tuple[str, str | None], Said]:
        """Return what people have said about the samples of a dataset, by shard and key."""
        return {} if self.notes is None or leaf.leaf.join else self.notes.of(leaf.leaf.path)


@cache
def templates() -> Environment:
    """Return the templates of all pages."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_control_characters,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=format_bytes, count="{:,}".format)
    return environment


def number_of(request: Request, name: str, default: int = 0) -> int:
    """Return a number that a request names.

    Raises:
        HTTPException: If it is not valid.
    """
    text = request.query_params.get(name, "").replace(",", "").strip() or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise HTTPException(400, f"{name}={text!r}: expected a whole number from 0 up")
    return int(text)


def format_bytes(count: float) -> str:
    """Return a number of bytes as people write it.

    Example:
        >>> [format_bytes(count) for count in (0, 999, 1500, 70_000_000)]
        ['0 B', '999 B', '1.5 kB', '70.0 MB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Card(NamedTuple):
    """What a gallery shows of a sample."""

    picture: str | None
    """The end of the address of an image."""
    badge: str
    """What else there is that cannot be seen: sound, a video, how many images."""
    text: str
    """How its text begins."""
    names: str
    """Of its parts."""


def card(sample: ShownSample, tokenizer: Tokenizer | None = None) -> Card:
    """Return what a gallery shows of a sample; `tokenizer` makes text of its tokens."""
    names = ", ".join(part.name for part in sample.parts)
    try:
        kinds = [(part, part_kind(extension_of(part.name, part.file))) for part in sample.parts]
        text = _words(kinds, tokenizer)
    except EnergonError as error:
        return Card(None, "", str(error), names)
    found = [(part.number, kind) for part, kind in kinds if kind in _PICTURES]
    count = Counter(kind for _, kind in found)
    badges = [f"{count['image']} images"] if count["image"] > 1 else []
    badges += [kind for kind in ("video", "audio") if count[kind]]
    found.sort(key=lambda each: list(_PICTURES).index(each[1]))
    picture = f"{_PICTURES[found[0][1]]}/{found[0][0]}" if found else None
    return Card(picture, ", ".join(badges), text, names)


_PICTURES: dict[PartKind, str] = {"image": "thumb", "video": "thumb", "audio": "wave"}
"""What stands for a part in a gallery, best first."""


def _words(kinds: list[tuple[ShownPart, PartKind]], tokenizer: Tokenizer | None) -> str:
    """Return how the text of a sample begins; of one without text, what its values are."""
    for part, kind in kinds:
        if kind == "text" and not part.name.lower().endswith(".gz") and part.file.size:
            return snippet(part.name, part.file)
    values = [part for part, kind in kinds if kind in ("value", "arrays")]
    pictures = pictures_of([part.name for part, _ in kinds]) if values else {}
    return "\n".join(_said_first(values, pictures, tokenizer))


def _said_first(
    parts: list[ShownPart], pictures: Pictures, tokenizer: Tokenizer | None
) -> Iterator[str]:
    shown = 0
    for part in parts:
        text = snippet(part.name, part.file, pictures, tokenizer)
        if text:
            # What is all there is, or is a dict, needs no name.
            yield text if len(parts) == 1 or ": " in text else f"{_stem(part.name)}: {text}"
            shown += 1
        if shown == MAX_SNIPPETS:
            return


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def _without_control_characters(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return escape_text(value)
    return value
