"""The pages of the browser, and their addresses.

| address | page |
|---|---|
| `/` | splits and their datasets |
| `/s/SPLIT/LEAF` | samples from `?from=ORDINAL` on |
| `…?key=PREFIX`, `…?where=CONDITIONS`, `…?text=WORDS` | those that are found |
| `…?view=table&sort=COLUMN` | samples as a table; `sort=-COLUMN` begins with the last |
| `/s/SPLIT/LEAF?cards` | only the cards of samples, for scrolling |
| `/s/SPLIT/LEAF/cover` | the image on the card of its first sample |
| `/s/SPLIT/LEAF/shards` | its shards |
| `/s/SPLIT/LEAF/statistics` | plots of the properties of its samples |
| `/s/SPLIT/LEAF/ORDINAL` | a sample, part by part |
| `/s/SPLIT/LEAF/ORDINAL/note`, `/s/SPLIT/LEAF/note` | excludes or flags a sample, or several |
| `/run` | steps of a run, from `?step=NUMBER` on |
| `/run/batch` | the batch of a step and a rank, after the hooks |
| `…/raw/PART`, `…/image/PART`, `…/thumb/PART`, `…/wave/PART` | a part, and images made from it |

Splits, datasets and parts are numbered, because their names may be anything.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlencode

from energon.errors import DatasetNotFoundError, EnergonError, needs_extra
from energon.messages import describe_error
from energon.viewer.shown import Shown, ShownLeaf

with needs_extra("view", "the browser needs Starlette, uvicorn and Jinja"):
    import jinja2  # noqa: F401
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
    from starlette.types import Message

from energon.viewer.gallery import GalleryPage
from energon.viewer.guard import Guard
from energon.viewer.notes import Notes
from energon.viewer.pages import HERE, SamplePage, Site, number_of, templates
from energon.viewer.parts import Tokenizer
from energon.viewer.run import ShownRun
from energon.viewer.run_pages import RunPages
from energon.viewer.statistics import statistics

PAGE_SHARDS = 500
_DATASET = re.compile(r"/s/\d+/\d+")
_TITLES = {
    400: "Invalid address",
    403: "Not allowed",
    404: "Page not found",
    405: "Method not allowed",
    422: "The data cannot be read",
    500: "Something went wrong",
}
MAX_COUNTED_LEAVES = 50
"""The first page opens up to this many datasets to show how many samples they have."""


def make_app(
    shown: Shown,
    *,
    server_names: Collection[str] = (),
    token: str | None = None,
    allow: Collection[str] = (),
    notes: Notes | None = None,
    saved: ShownRun | None = None,
    encoder: type[Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Guard:
    """Return the application that shows datasets, for any ASGI server.

    Args:
        shown: The datasets.
        server_names: Names of the server in addition to those of loopback.
        token: What browsers have to present; None if only this machine can connect.
        allow: What data may do, see `get_train_dataset`.
        notes: Where excluded and flagged samples are listed; None if samples cannot be marked.
        saved: The run whose steps are shown; None shows a form for its settings.
        encoder: Class of the task encoder that makes the batches of runs; None shows no batches.
        tokenizer: Turns tokens into text; None shows their numbers.
    """
    site = Site(shown, allow, notes, tokenizer)
    pages, sample, runs = _Pages(site), SamplePage(site), RunPages(site, saved, encoder)
    leaf = "/s/{split:int}/{leaf:int}"
    at = f"{leaf}/{{ordinal:int}}"
    routes = [
        Route("/", pages.index),
        Route(leaf, GalleryPage(site).show),
        Route(f"{leaf}/cover", sample.cover),
        Route(f"{leaf}/shards", pages.shards),
        Route(f"{leaf}/statistics", pages.statistics),
        Route(at, sample.show),
        *(Route(f"{path}/note", sample.note, methods=["POST"]) for path in (leaf, at)),
        Route("/run", runs.steps),
        Route("/run/batch", runs.batch),
        Route(f"{at}/raw/{{part:int}}", sample.raw),
        *(
            Route(f"{at}/{name}/{{part:int}}", partial(sample.image, name))
            for name in ("image", "thumb", "wave")
        ),
        Mount("/static", StaticFiles(directory=HERE / "static")),
    ]
    # Damaged data do not make a traceback in the log: the server is not at fault.
    expected = (HTTPException, EnergonError)
    app = Starlette(
        routes=routes, exception_handlers=dict.fromkeys((*expected, Exception), pages.error)
    )
    return Guard(app, server_names, token)


def warm_up(app: Guard) -> None:
    """Load what the first requests would wait for: modules and templates, but no data."""
    with suppress(ImportError):
        import simplejpeg  # noqa: F401
        from PIL import Image

        Image.preinit()
    for name in templates().list_templates(["html"]):
        templates().get_template(name)

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        pass

    # A request for a page that does not exist starts the threads that render pages.
    scope = {"type": "http", "method": "GET", "path": "/-", "query_string": b"", "headers": []}
    asyncio.run(app.app(scope, receive, send))  # type: ignore[arg-type]


class _Pages:
    """The pages of datasets."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def index(self, request: Request) -> Response:
        number = sum(len(split.leaves) for split in self.site.shown.splits)
        counts: dict[tuple[int, int], int | str] = {}
        for s, split in enumerate(self.site.shown.splits):
            for n, leaf in enumerate(split.leaves):
                counts[s, n] = _count(leaf) if number <= MAX_COUNTED_LEAVES else ""
        totals = [
            sum(count for count in of if isinstance(count, int))
            if all(isinstance(count, int) for count in of)
            else None
            for s, split in enumerate(self.site.shown.splits)
            for of in [[counts[s, n] for n in range(len(split.leaves))]]
        ]
        few = number <= MAX_COUNTED_LEAVES
        return self.site.page("index.html", counts=counts, totals=totals, shows_covers=few)

    def shards(self, request: Request) -> Response:
        leaf = self.site.leaf(request)
        start = number_of(request, "from")
        name = request.query_params.get("name", "").strip()
        shards = [shard for shard in leaf.shards if name in shard.name]
        return self.site.page(
            "shards.html",
            **self.site.place(request, leaf),
            shards=shards[start : start + PAGE_SHARDS],
            start=start,
            step=PAGE_SHARDS,
            found=len(shards),
            total=len(leaf.shards),
            name=name,
            link=lambda start: "?" + urlencode({"name": name, "from": start}),
        )

    def statistics(self, request: Request) -> Response:
        leaf = self.site.leaf(request)
        values = self.site.place(request, leaf)
        return self.site.page("statistics.html", **values, plots=statistics(leaf, values["base"]))

    def error(self, request: Request, error: Exception) -> Response:
        title = ""
        if isinstance(error, HTTPException):
            status, text = error.status_code, str(error.detail)
            if text == "Not Found":  # no route fits
                text = f"there is no page at {request.url.path}"
        elif isinstance(error, DatasetNotFoundError):
            status, text, title = 404, str(error), "The dataset cannot be opened"
        elif isinstance(error, EnergonError):
            status, text = 422, str(error)
        else:
            status, text = 500, describe_error(error)
        match = None if title else _DATASET.match(request.url.path)
        here = request.url.path + ("?" if request.url.query else "")
        return self.site.page(
            "error.html",
            status=status,
            title=title or _TITLES.get(status, "This page cannot be shown"),
            text=text,
            up=match[0] if match and here != match[0] else "/",
        )


def _count(leaf: ShownLeaf) -> int | str:
    try:
        return len(leaf)
    except EnergonError as error:
        return str(error)
