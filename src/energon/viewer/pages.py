"""Rendering, request parameters and cards for all pages; the page of a sample and its parts.

The requested bytes of parts are sent directly from the shard.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from energon.errors import EnergonError
from energon.inspect.where import part_extension, part_kind
from energon.io.address import address_name
from energon.messages import counted, escape_text, format_bytes
from energon.sources.tree import BrowsedFile, MemoryFile
from energon.viewer import images
from energon.viewer.guard import PART_POLICY
from energon.viewer.notes import Notes, SampleNote
from energon.viewer.parts import SNIPPET_LETTERS, Tokenizer, boxes_of, snippet, view_part
from energon.viewer.reading_order import lay_out
from energon.viewer.shown import MEDIA_KINDS, Shown, ShownLeaf, ShownPart, ShownSample

HERE = Path(__file__).parent
_HTML = "text/html; charset=utf-8"
MAX_SNIPPETS = 4
"""The card of a sample without text describes up to this many parts."""


@dataclass(frozen=True, eq=False)
class Site:
    """Renders pages. Thread-safe.

    Args:
        shown: The datasets.
        notes: Where excluded and flagged samples are listed; None if samples cannot be marked.
        tokenizer: Turns tokens into text; None shows their numbers.
    """

    shown: Shown
    notes: Notes | None
    tokenizer: Tokenizer | None
    form: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """Token in all forms. Other sites do not know it, so they cannot submit forms."""

    def page(self, template: str, *, status: int = 200, **values: Any) -> Response:
        """Return a page rendered from a template and values."""
        pieces = self._pieces(template, status=status, **values)
        return Response(b"".join(pieces), status, media_type=_HTML)

    def stream(self, template: str, *, status: int = 200, **values: Any) -> Response:
        """Return a page that is sent while it is rendered, as far as its values are known."""
        pieces = self._pieces(template, status=status, **values)
        return StreamingResponse(pieces, status, media_type=_HTML)

    def _pieces(self, template: str, **values: Any) -> Iterator[bytes]:
        pieces = templates().get_template(template).generate(shown=self.shown, **values)
        return (piece.encode("utf-8", "replace") for piece in pieces)

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
        return leaf, leaf.sample(self.ordinal(leaf, str(request.path_params["ordinal"])))

    def ordinal(self, leaf: ShownLeaf, text: str) -> int:
        """Return the number of a sample from an address or a form."""
        if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) < len(leaf)):
            raise HTTPException(404, f"there is no sample {text}, only 0 to {len(leaf) - 1}")
        return int(text)

    def location(self, request: Request, leaf: ShownLeaf) -> dict[str, Any]:
        """Return the values about a dataset and its address for templates."""
        numbers = request.path_params
        base = f"/s/{numbers['split']}/{numbers['leaf']}"
        split = self.shown.splits[numbers["split"]]
        # The breadcrumbs already name a dataset that is not part of a metadataset.
        is_alone = leaf.name == address_name(split.path)
        crumb = split.label if is_alone else f"{split.label}: {leaf.name}"
        return {"leaf": leaf, "split": split.label, "crumb": crumb, "base": base}

    def form_of(self, leaf: ShownLeaf) -> str:
        """Return the token of forms that exclude or flag samples; "" if that is not possible."""
        return "" if self.notes is None or leaf.leaf.join else self.form

    def notes_of(self, leaf: ShownLeaf) -> dict[tuple[str, str | None], SampleNote]:
        """Return the notes about the samples of a dataset, by shard and key."""
        return {} if self.notes is None or leaf.leaf.join else self.notes.of(leaf.leaf.path)


def _escaped(value: Any) -> Any:
    """Return text without control characters; markup and other values as they are."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return escape_text(value) if is_text else value


@cache
def templates() -> Environment:
    """Return the templates of all pages."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_escaped,
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


def card(leaf: ShownLeaf, sample: ShownSample, tokenizer: Tokenizer | None = None) -> Card:
    """Return the card of a sample in a gallery; `tokenizer` turns its tokens into text."""
    names = ", ".join(part.name for part in sample.parts)
    try:
        layout = lay_out(sample.parts, leaf.find_file)
        kinds = {part.number: part.kind for part in layout.parts}
        text = layout.answer()[:SNIPPET_LETTERS] or _words(sample, tokenizer)
    except EnergonError as error:
        return Card(None, "", str(error), names)
    count = Counter(kinds.values())
    badges = [f"{count['image']} images"] if count["image"] > 1 else []
    badges += [kind for kind in ("video", "audio") if count[kind]]
    first = layout.first_medium()
    if first is None:  # the best kind
        media = (n for n in kinds if kinds[n] in MEDIA_KINDS)
        first = min(media, key=lambda n: MEDIA_KINDS.index(kinds[n]), default=None)
    image = None
    if first is not None:
        image = f"{'wave' if kinds[first] == 'audio' else 'thumb'}/{first}"
    return Card(image, ", ".join(badges), text, names)


def _words(sample: ShownSample, tokenizer: Tokenizer | None) -> str:
    """Return the beginning of the text of a sample; without text, a summary of its values."""
    kinds = [(part, part.kind) for part in sample.parts]
    for part, kind in kinds:
        if kind == "text" and not part.name.lower().endswith(".gz") and part.file.size:
            return snippet(part.name, part.file)
    values = [part for part, kind in kinds if kind in ("value", "arrays")]
    texts = ((part.name, snippet(part.name, part.file, tokenizer)) for part in values)
    shown = islice(((name, text) for name, text in texts if text), MAX_SNIPPETS)
    return "\n".join(
        # A dict needs no name, and neither does the only part.
        text if len(values) == 1 or ": " in text else f"{name.rpartition('.')[0] or name}: {text}"
        for name, text in shown
    )


_NO_IMAGE = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4 3"/>'
SENT_BYTES = 1 << 20
MAX_FORM_BYTES = 64 << 10
MAX_CHECKED = 16
"""Up to this many images of a sample are decoded to see whether loaders can."""
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_LOCAL = re.compile(r"/(?![/\\])[\x21-\x7e]*\Z")

SHOWN_TYPES = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "image/jpeg"),
    **{name: f"image/{name}" for name in ("png", "apng", "gif", "webp", "avif", "bmp")},
    **dict.fromkeys(("mp4", "m4v", "mov"), "video/mp4"),
    "webm": "video/webm",
    "ogv": "video/ogg",
    "mkv": "video/x-matroska",
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
    "flac": "audio/flac",
    **dict.fromkeys(("aif", "aiff", "aifc"), "audio/aiff"),
    **dict.fromkeys(("m4a", "aac"), "audio/mp4"),
    **dict.fromkeys(("ogg", "oga", "opus"), "audio/ogg"),
}
"""The media types of parts. Everything else is a download: HTML and SVG could run scripts."""


class SamplePage:
    """Answers requests about one sample.

    Args:
        site: Renders pages.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.made = images.ImageCache()

    def show(self, request: Request) -> Response:
        """Return the page of a sample."""
        leaf, sample = self.site.sample(request)
        notes = self.site.notes
        layout = lay_out(sample.parts, leaf.find_file)
        views = [view_part(part.name, part.file, self.site.tokenizer) for part in layout.parts]
        for part, view in list(zip(layout.parts, views, strict=True))[:MAX_CHECKED]:
            if view.kind == "image" and not view.problem:
                # Browsers draw part of an image that is truncated. Loaders do not.
                try:
                    self._made("thumb", part, images.thumbnail)
                except EnergonError as error:
                    view.problem = str(error)
        return self.site.page(
            "sample.html",
            **self.site.location(request, leaf),
            sample=sample,
            views=views,
            layout=layout,
            boxes=boxes_of(sample.parts, leaf.field_map),
            shown_types=SHOWN_TYPES,
            total=len(leaf),
            note=self.site.notes_of(leaf).get((sample.where.shard, sample.where.key)),
            noted_in="" if notes is None else notes.file(leaf.leaf.path),
            form=self.site.form_of(leaf),
        )

    def _made(self, name: str, part: ShownPart, make: Callable[[BrowsedFile], bytes]) -> bytes:
        """Return an image made from a part, from the cache if it is there."""
        return self.made.get(f"{name} {entity_tag(part.file)}", lambda: make(part.file))

    async def note(self, request: Request) -> Response:
        """Exclude or flag the sample at the address, or those that a form lists."""
        length = request.headers.get("content-length", "")
        is_short = length.isdecimal() and len(length) < 16
        if not is_short or int(length) > MAX_FORM_BYTES:
            raise HTTPException(413, f"a form can have at most {MAX_FORM_BYTES} bytes")
        fields = parse_qsl((await request.body()).decode("utf-8", "replace"))
        return await run_in_threadpool(self._note, request, fields)

    def _note(self, request: Request, fields: Sequence[tuple[str, str]]) -> Response:
        leaf = self.site.leaf(request)
        notes = self.site.notes
        form = dict(fields)
        if not secrets.compare_digest(form.get("form", "").encode(), self.site.form.encode()):
            raise HTTPException(403, "the server has been restarted; reload the page")
        if notes is None or leaf.leaf.join:
            raise HTTPException(403, "start `energon view` with --quarantine to exclude samples")
        ordinal = request.path_params.get("ordinal")
        numbers = [value for name, value in fields if name == "ordinal"]
        numbers = numbers if ordinal is None else [str(ordinal)]
        dataset = leaf.leaf.path
        samples = [leaf.source.locate(self.site.ordinal(leaf, each)) for each in numbers]
        match form.get("what"):
            case "exclude" | "flag" as what:
                reason = form.get("reason", "").strip()
                notes.say(dataset, samples, excluded=what == "exclude", reason=reason)
            case "forget":
                notes.forget(dataset, samples)
            case _:
                raise HTTPException(400, "what: expected exclude, flag or forget")
        back = form.get("back", "")
        if not _LOCAL.match(back):  # a form leads nowhere but to pages of this server
            back = request.url.path.removesuffix("/note")
        return RedirectResponse(back, status_code=303)

    def raw(self, request: Request) -> Response:
        """Return the bytes of a part."""
        sample, part = self._part(request)
        return part_response(
            request,
            part.file,
            name=f"{sample.where.key.rpartition('/')[2]}.{part.name}",
            extension=part_extension(part.name, part.file),
            save="save" in request.query_params,
        )

    def cover(self, request: Request) -> Response:
        """Return the image on the card of the first sample, or an empty one."""
        leaf = self.site.leaf(request)
        with suppress(EnergonError, IndexError):
            sample = leaf.sample(0)
            name, _, number = (card(leaf, sample).image or "").partition("/")
            if number:
                return self._image(name, request, self._numbered(leaf, sample, int(number)))
        headers = {"Content-Security-Policy": PART_POLICY}
        return Response(_NO_IMAGE, 200, headers, "image/svg+xml")

    def image(self, name: str, request: Request) -> Response:
        """Return an image made from a part: a thumbnail or a waveform."""
        return self._image(name, request, self._part(request)[1])

    def _image(self, name: str, request: Request, part: ShownPart) -> Response:
        tag = entity_tag(part.file)
        headers = {"ETag": tag, "Content-Security-Policy": PART_POLICY}
        if is_fresh(request, tag):
            return Response(status_code=304, headers=headers)
        kind = part_kind(part_extension(part.name, part.file))
        maker = _MAKERS.get((name, kind))
        if maker is None:
            raise HTTPException(404, f"parts of the kind {kind!r} have no such image")
        make, media_type = maker
        try:
            content = self._made(name, part, make)
        except EnergonError as error:
            raise HTTPException(422, str(error)) from error
        return Response(content, 200, headers, media_type)

    def _part(self, request: Request) -> tuple[ShownSample, ShownPart]:
        """Return the sample and the part at the address of a request."""
        leaf, sample = self.site.sample(request)
        return sample, self._numbered(leaf, sample, request.path_params["part"])

    def _numbered(self, leaf: ShownLeaf, sample: ShownSample, number: int) -> ShownPart:
        parts = sample.parts
        if number >= len(parts):
            parts = lay_out(parts, leaf.find_file).parts
        if number >= len(parts):
            raise HTTPException(
                404, f"there is no part {number}, only {counted(len(parts), 'part')}"
            )
        return parts[number]


_MAKERS: Mapping[tuple[str, str], tuple[Callable[..., bytes], str]] = {
    ("thumb", "image"): (images.thumbnail, "image/jpeg"),
    ("thumb", "video"): (images.poster, "image/jpeg"),
    ("image", "image"): (images.as_png, "image/png"),
    ("wave", "audio"): (images.waveform, "image/svg+xml"),
}
"""The function that makes an image, and its media type, by its name and the kind of the part."""


def entity_tag(file: BrowsedFile) -> str:
    """Return an identifier of the content of a part, from its location where that is enough."""
    content = file.find()
    identity: Any = (content.path, file.offset, file.size, file.mtime_ns)
    if isinstance(content, MemoryFile):  # a value of a row: all rows have the same place
        identity = blake2b(content.data).hexdigest()
    return f'"{blake2b(repr(identity).encode(), digest_size=12).hexdigest()}"'


def is_fresh(request: Request, tag: str) -> bool:
    """Return whether the browser has the content with this tag."""
    return tag in re.split(r"\s*,\s*", request.headers.get("if-none-match", ""))


def part_response(
    request: Request, file: BrowsedFile, *, name: str, extension: str, save: bool
) -> Response:
    """Return a part, or the requested range of it.

    Args:
        request: The request.
        file: The content of the part.
        name: File name for downloads.
        extension: Determines the media type.
        save: Whether it is downloaded rather than shown.
    """
    tag = entity_tag(file)
    media_type = None if save else SHOWN_TYPES.get(extension)
    use = "attachment" if media_type is None else "inline"
    file_name = quote(name.encode("utf-8", "surrogateescape"), safe="")
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": tag,
        "Content-Security-Policy": PART_POLICY,
        "Content-Disposition": f"{use}; filename*=UTF-8''{file_name}",
    }
    if is_fresh(request, tag):
        return Response(status_code=304, headers=headers)
    start, stop, status = 0, file.size, 200
    requested = request.headers.get("range")
    if requested is not None and request.headers.get("if-range", tag) == tag:
        span = parse_range(requested, file.size)
        if span == (0, 0):
            headers["Content-Range"] = f"bytes */{file.size}"
            return Response(status_code=416, headers=headers)
        if span is not None:
            (start, stop), status = span, 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
    headers["Content-Length"] = str(stop - start)
    body = iter(()) if request.method == "HEAD" else _chunks(file, start, stop)
    return StreamingResponse(body, status, headers, media_type or "application/octet-stream")


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """Return the requested range: its first byte, and the one after its last.

    (0, 0) if it is outside the file. None if everything is sent, as for several ranges, which a
    server may ignore, and for an invalid header.

    Example:
        >>> [parse_range(f"bytes={text}", 10) for text in ("2-4", "8-", "-3", "10-", "4-2")]
        [(2, 5), (8, 10), (7, 10), (0, 0), None]
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None or match[0] == "bytes=-":
        return None
    first, last = (text[:20] for text in match.groups())
    if not first:
        low, high = max(0, size - int(last)), size
    else:
        low, high = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < low:
            return None
    return (low, high) if low < high else (0, 0)


def _chunks(file: BrowsedFile, start: int, stop: int) -> Iterator[bytes]:
    """Return an iterator over a range. Reads the first piece now, so that errors get a page."""
    source = file.find()
    edges = range(start, stop, SENT_BYTES)
    first = source.pread(file.offset + start, min(SENT_BYTES, stop - start)) if edges else b""

    def rest() -> Iterator[bytes]:
        yield first
        for low in edges[1:]:
            yield source.pread(file.offset + low, min(SENT_BYTES, stop - low))

    return rest()
