"""What all pages share: rendering, request parameters, and the cards of samples."""

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
from energon.inspect.part_facts import PartKind, part_extension, part_kind
from energon.io.address import address_name
from energon.messages import escape_text, format_bytes
from energon.viewer.notes import Notes, SampleNote
from energon.viewer.parts import Tokenizer, snippet
from energon.viewer.reading_order import ImageParts, image_parts
from energon.viewer.shown import Shown, ShownLeaf, ShownPart, ShownSample

HERE = Path(__file__).parent
MAX_SNIPPETS = 4
"""The card of a sample without text describes up to this many parts."""


@dataclass(frozen=True, eq=False)
class Site:
    """Renders pages. Thread-safe.

    Args:
        shown: The datasets.
        allow: What data may do, see `get_train_dataset`.
        notes: Where excluded and flagged samples are listed; None if nobody can do that.
        tokenizer: Turns tokens into text; None shows their numbers.
    """

    shown: Shown
    allow: Collection[str]
    notes: Notes | None
    tokenizer: Tokenizer | None
    form: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """Token in all forms. Other sites do not know it, so they cannot submit forms."""

    def page(self, template: str, *, status: int = 200, **values: Any) -> Response:
        """Return a page rendered from a template and values."""
        text = templates().get_template(template).render(shown=self.shown, status=status, **values)
        content = text.encode("utf-8", "replace")
        return Response(content, status, media_type="text/html; charset=utf-8")

    def leaf(self, request: Request) -> ShownLeaf:
        """Return the dataset at the address of a request."""
        numbers = request.path_params
        try:
            return self.shown.leaf(numbers["split"], numbers["leaf"])
        except IndexError as error:
            raise HTTPException(404, "there is no such dataset") from error

    def sample(self, request: Request) -> tuple[ShownLeaf, ShownSample]:
        """Return the sample at the address of a request, and its dataset."""
        leaf = self.leaf(request)
        ordinal = request.path_params["ordinal"]
        if ordinal >= len(leaf):
            raise HTTPException(404, f"there is no sample {ordinal}, only 0 to {len(leaf) - 1}")
        return leaf, leaf.sample(ordinal)

    def place(self, request: Request, leaf: ShownLeaf) -> dict[str, Any]:
        """Return what templates have to know about a dataset and its address."""
        numbers = request.path_params
        base = f"/s/{numbers['split']}/{numbers['leaf']}"
        split = self.shown.splits[numbers["split"]]
        # The breadcrumbs already name a dataset that is not part of a metadataset.
        crumb = (
            split.label if leaf.name == address_name(split.path) else f"{split.label}: {leaf.name}"
        )
        return {"leaf": leaf, "split": split.label, "crumb": crumb, "base": base}

    def said(self, leaf: ShownLeaf) -> dict[tuple[str, str | None], SampleNote]:
        """Return the notes about the samples of a dataset, by shard and key."""
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
    """Return a number from the parameters of a request.

    Raises:
        HTTPException: If it is not valid.
    """
    text = request.query_params.get(name, "").replace(",", "").strip() or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise HTTPException(400, f"{name}={text!r}: expected a whole number of 0 or more")
    return int(text)


class Card(NamedTuple):
    """What a gallery shows of a sample."""

    image: str | None
    """The end of the address of an image."""
    badge: str
    """What the image does not show: audio, video, how many images there are."""
    text: str
    """The beginning of its text."""
    names: str
    """The names of its parts."""


def card(sample: ShownSample, tokenizer: Tokenizer | None = None) -> Card:
    """Return what a gallery shows of a sample; `tokenizer` turns its tokens into text."""
    names = ", ".join(part.name for part in sample.parts)
    try:
        kinds = [(part, _kind_of(part)) for part in sample.parts]
        text = _words(kinds, tokenizer)
    except EnergonError as error:
        return Card(None, "", str(error), names)
    found = [(part.number, kind) for part, kind in kinds if kind in _THUMBNAILS]
    count = Counter(kind for _, kind in found)
    badges = [f"{count['image']} images"] if count["image"] > 1 else []
    badges += [kind for kind in ("video", "audio") if count[kind]]
    found.sort(key=lambda each: list(_THUMBNAILS).index(each[1]))
    image = f"{_THUMBNAILS[found[0][1]]}/{found[0][0]}" if found else None
    return Card(image, ", ".join(badges), text, names)


_THUMBNAILS: dict[PartKind, str] = {"image": "thumb", "video": "thumb", "audio": "wave"}
"""The image that represents a part in a gallery, the best kind first."""


def _kind_of(part: ShownPart) -> PartKind:
    """Return how a part is shown; gzipped media are not unpacked, see `view_part`."""
    kind = part_kind(part_extension(part.name, part.file))
    return "bytes" if kind in _THUMBNAILS and part.name.lower().endswith(".gz") else kind


def _words(kinds: list[tuple[ShownPart, PartKind]], tokenizer: Tokenizer | None) -> str:
    """Return the beginning of the text of a sample; without text, a summary of its values."""
    for part, kind in kinds:
        if kind == "text" and not part.name.lower().endswith(".gz") and part.file.size:
            return snippet(part.name, part.file)
    values = [part for part, kind in kinds if kind in ("value", "arrays")]
    images = image_parts([part.name for part, _ in kinds]) if values else {}
    return "\n".join(_said_first(values, images, tokenizer))


def _said_first(
    parts: list[ShownPart], images: ImageParts, tokenizer: Tokenizer | None
) -> Iterator[str]:
    shown = 0
    for part in parts:
        text = snippet(part.name, part.file, images, tokenizer)
        if text:
            # A dict needs no name, and neither does the only part.
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
