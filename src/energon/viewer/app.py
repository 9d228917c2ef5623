"""The pages of the browser, and their addresses.

| address | page |
|---|---|
| `/` | splits and their datasets |
| `/s/SPLIT/LEAF` | samples from `?from=ORDINAL` on, or with keys that begin with `?key=PREFIX` |
| `/s/SPLIT/LEAF?cards` | only the cards of samples, for scrolling |
| `/s/SPLIT/LEAF/shards` | its shards |
| `/s/SPLIT/LEAF/statistics` | plots of the properties of its samples |
| `/s/SPLIT/LEAF/ORDINAL` | a sample, part by part |
| `/s/SPLIT/LEAF/ORDINAL/note` | excludes or flags a sample |
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

from energon.errors import ConfigError, DatasetNotFoundError, EnergonError, needs_extra
from energon.inspect.where import Where
from energon.messages import describe_error
from energon.viewer.shown import Shown, ShownLeaf, ShownSample

with needs_extra("view", "the browser needs Starlette, uvicorn and Jinja"):
    import jinja2  # noqa: F401
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
    from starlette.types import Message

from energon.viewer.guard import Guard
from energon.viewer.notes import Notes
from energon.viewer.pages import HERE, SamplePage, Site, card, number_of, templates
from energon.viewer.parts import Tokenizer
from energon.viewer.run import ShownRun
from energon.viewer.run_pages import RunPages
from energon.viewer.statistics import statistics

PAGE_SAMPLES = 60
PAGE_SHARDS = 500
MAX_PAGE_SAMPLES = 240
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
        Route(leaf, pages.gallery),
        Route(f"{leaf}/shards", pages.shards),
        Route(f"{leaf}/statistics", pages.statistics),
        Route(at, sample.show),
        Route(f"{at}/note", sample.note, methods=["POST"]),
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
        return self.site.page("index.html", counts=counts)

    def gallery(self, request: Request) -> Response:
        leaf = self.site.leaf(request)
        key = request.query_params.get("key", "")
        where = request.query_params.get("where", "").strip()
        only_cards = "cards" in request.query_params
        start = 0 if key else number_of(request, "from")
        if not only_cards:
            start = min(start, max(0, len(leaf) - 1))
        samples: list[ShownSample] = []
        stop, more, problem = start, False, ""
        try:
            if key:
                ordinals = leaf.search(key, PAGE_SAMPLES + 1)
                samples = [leaf.sample(ordinal) for ordinal in ordinals[:PAGE_SAMPLES]]
                more = len(ordinals) > PAGE_SAMPLES
            elif where:
                samples, stop = leaf.matching(Where(where), start, PAGE_SAMPLES)
            else:
                count = min(number_of(request, "count", PAGE_SAMPLES), MAX_PAGE_SAMPLES)
                samples = leaf.page(start, count if only_cards else PAGE_SAMPLES)
                stop = start + len(samples)
        except ConfigError as error:  # the page stays, so that the filter can be corrected
            problem = str(error)
        return self.site.page(
            "gallery_cards.html" if only_cards else "gallery.html",
            status=422 if problem else 200,
            **self.site.place(request, leaf),
            cards=[(sample, card(leaf, sample, self.site.tokenizer)) for sample in samples],
            start=start,
            stop=stop,
            where=where,
            next_where=urlencode({"where": where, "from": stop}),
            step=PAGE_SAMPLES,
            total=len(leaf),
            key=key,
            more=more,
            # A filter that finds nothing may have misspelled the name of a part.
            names=_part_names(leaf) if where and not samples and not problem else [],
            problem=problem,
            notes=self.site.said(leaf),
        )

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
        seen, plots = statistics(leaf, values["base"])
        return self.site.page(
            "statistics.html",
            **values,
            seen=seen,
            plots=plots,
            total=len(leaf),
        )

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


def _part_names(leaf: ShownLeaf) -> list[str]:
    """Return which parts the first samples have."""
    return sorted({part.name for sample in leaf.page(0, PAGE_SAMPLES) for part in sample.parts})


def _count(leaf: ShownLeaf) -> int | str:
    try:
        return len(leaf)
    except EnergonError as error:
        return str(error)
