"""Parts as answers to HTTP requests: straight out of the shard, the bytes that were asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from energon.sources.browse.tree import BrowsedFile
from energon.viewer.guard import PART_POLICY

CHUNK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")

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
    **dict.fromkeys(("m4a", "aac"), "audio/mp4"),
    **dict.fromkeys(("ogg", "oga", "opus"), "audio/ogg"),
}
"""What browsers are told that parts are. All else is bytes to be saved: HTML and SVG could run."""


def entity_tag(file: BrowsedFile) -> str:
    """Return what names the content of a part, as far as it is known without reading it."""
    about = (file.find().path, file.offset, file.size, file.mtime_ns)
    return f'"{blake2b(repr(about).encode(), digest_size=12).hexdigest()}"'


def is_fresh(request: Request, tag: str) -> bool:
    """Return whether the browser has what a tag names."""
    return tag in re.split(r"\s*,\s*", request.headers.get("if-none-match", ""))


def part_response(
    request: Request, file: BrowsedFile, *, name: str, extension: str, save: bool
) -> Response:
    """Return a part, or the range of it that the request names.

    Args:
        request: Asks for it.
        file: Where it lies.
        name: As what it is saved.
        extension: Says what it is.
        save: Whether it is to be saved, not shown.
    """
    tag = entity_tag(file)
    kind = None if save else SHOWN_TYPES.get(extension)
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": tag,
        "Content-Security-Policy": PART_POLICY,
        "Content-Disposition": _disposition(name, shown=kind is not None),
    }
    if is_fresh(request, tag):
        return Response(status_code=304, headers=headers)
    start, stop, status = 0, file.size, 200
    wanted = request.headers.get("range")
    if wanted is not None and request.headers.get("if-range", tag) == tag:
        found = parse_range(wanted, file.size)
        if found == (0, 0):
            headers["Content-Range"] = f"bytes */{file.size}"
            return Response(status_code=416, headers=headers)
        if found is not None:
            (start, stop), status = found, 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
    headers["Content-Length"] = str(stop - start)
    body: Iterator[bytes] = iter(())
    if request.method != "HEAD":
        body = _chunks(file, start, stop)
    media_type = kind or "application/octet-stream"
    return StreamingResponse(body, status, headers, media_type)


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """Return the first byte that is asked for, and the one behind the last.

    (0, 0) if there is no such byte, None if all is to be sent: for several ranges, which nobody
    has to answer, and for what makes no sense.

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
    """Return what yields a range. The first piece is read at once, so that errors have a page."""
    source = file.find()
    edges = range(start, stop, CHUNK_BYTES)
    first = source.pread(file.offset + start, min(CHUNK_BYTES, stop - start)) if edges else b""

    def rest() -> Iterator[bytes]:
        yield first
        for low in edges[1:]:
            yield source.pread(file.offset + low, min(CHUNK_BYTES, stop - low))

    return rest()


def _disposition(name: str, *, shown: bool) -> str:
    safe = quote(name.encode("utf-8", "surrogateescape"), safe="")
    return f"{'inline' if shown else 'attachment'}; filename*=UTF-8''{safe}"
