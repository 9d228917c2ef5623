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
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np

from energon.arrays import Ints
from energon.errors import ConfigError, DatasetNotFoundError, EnergonError, needs_extra
from energon.inspect.where import Where
from energon.messages import describe_error

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
from energon.viewer.pages import HERE, Card, SamplePage, Site, card, number_of, templates
from energon.viewer.parts import Tokenizer
from energon.viewer.run import ShownRun
from energon.viewer.run_pages import RunPages
from energon.viewer.shown import Search, Shown, ShownLeaf, ShownSample
from energon.viewer.statistics import (
    Text,
    is_numeric,
    measure_of,
    properties,
    statistics,
    value_in_words,
)

PAGE_SAMPLES = 60
MAX_PAGE_SAMPLES = 240
KEPT_ORDERS = 4
"""The orders of this many measures are kept, with a number of 8 bytes for each sample."""
MAX_COLUMNS = 24
EXAMPLES = 3
_QUOTED = re.compile(r"""[\s'"\\]""")
MAX_EXAMPLE_LETTERS = 32


class Asked(NamedTuple):
    """The samples that a request asks for, and how they are shown."""

    start: int
    key: str
    where: str
    text: str
    sort: str
    """The column by which a table is sorted, behind "-" if it descends; "" for none."""
    is_table: bool

    @classmethod
    def of(cls, request: Request) -> Asked:
        """Return the values of the parameters of a request."""
        given = request.query_params
        key, where, text = (given.get(name, "").strip() for name in ("key", "where", "text"))
        start = 0 if key else number_of(request, "from")
        return cls(start, key, where, text, given.get("sort", ""), given.get("view") == "table")

    @property
    def conditions(self) -> str:
        """The conditions, with that on texts."""
        terms = [self.where, shlex.quote(f"text:{self.text}") if self.text else ""]
        return " ".join(filter(None, terms))

    def link(self, start: int = 0, **changes: Any) -> str:
        """Return the parameters of this page with another first sample, and other changes."""
        asked = self._replace(start=start, **changes)
        given = {
            "view": "table" if asked.is_table else "",
            **{"key": asked.key, "where": asked.where, "text": asked.text, "sort": asked.sort},
            "from": asked.start or "",
        }
        query = urlencode({name: value for name, value in given.items() if value})
        return f"?{query}" if query else ""


class GalleryPage:
    """Answers requests for the samples of a dataset.

    Args:
        site: Renders pages.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.order = lru_cache(KEPT_ORDERS)(_order)

    def show(self, request: Request) -> Response:
        """Return the page. The samples found by a search are sent as they are found."""
        leaf = self.site.leaf(request)
        if "cards" in request.query_params:
            return self._more_cards(request, leaf)
        asked = Asked.of(request)
        problem = ""
        try:
            chosen = self._chosen(leaf, asked)
        except ConfigError as error:  # the page stays, so that the conditions can be corrected
            chosen, problem = {"cards": []}, str(error)
        shown = list(chosen["cards"])[:1] if "stop" in chosen else []
        conditions = _conditions(leaf, shown[0][0] if shown else None)
        values = {
            **self.site.location(request, leaf),
            **{"asked": asked, "total": len(leaf), "ordered": len(leaf), "step": PAGE_SAMPLES},
            **{"start": asked.start, "stop": asked.start, "more": False},
            **{"table": None, "search": None, "problem": problem},
            **{"conditions": conditions, "example": example_of(conditions)},
            **{"notes": self.site.notes_of(leaf), "form": self.site.form_of(leaf)},
            **chosen,
        }
        is_search = values["search"] is not None and not asked.is_table
        answer = self.site.stream if is_search else self.site.page
        return answer("gallery.html", status=422 if problem else 200, **values)

    def _more_cards(self, request: Request, leaf: ShownLeaf) -> Response:
        """Return only the cards of some samples, for scrolling."""
        count = min(number_of(request, "count", PAGE_SAMPLES), MAX_PAGE_SAMPLES)
        samples = leaf.page(number_of(request, "from"), count)
        return self.site.page(
            "gallery_cards.html",
            **self.site.location(request, leaf),
            cards=self._cards(leaf, samples),
            notes=self.site.notes_of(leaf),
            form=self.site.form_of(leaf),
        )

    def _chosen(self, leaf: ShownLeaf, asked: Asked) -> dict[str, Any]:
        """Return the samples that a request asks for, as values for the template."""
        start = min(asked.start, max(0, len(leaf) - 1))
        values: dict[str, Any] = {}
        column, descending = asked.sort.removeprefix("-"), asked.sort.startswith("-")
        if asked.key:
            ordinals = leaf.search(asked.key, PAGE_SAMPLES + 1)
            samples = leaf.samples(ordinals[:PAGE_SAMPLES])
            values["more"] = len(ordinals) > PAGE_SAMPLES
        elif asked.conditions:
            search = Search(leaf, Where(asked.conditions), start, PAGE_SAMPLES)
            values |= {"search": search, "start": start}
            if not asked.is_table:
                return {**values, "cards": self._cards(leaf, _started(search))}
            samples = [each for each in search if each is not None]
        elif asked.is_table and column in leaf.measures:
            order = self.order(leaf, column)[:: -1 if descending else 1]
            start, column = min(start, len(order) - 1), ""
            samples = leaf.samples(order[start : start + PAGE_SAMPLES].tolist())
            values["ordered"] = len(order)
        else:
            samples = leaf.page(start, PAGE_SAMPLES)
        cards = [each for each in self._cards(leaf, samples) if each is not None]
        if asked.is_table:
            table = make_table(leaf, [(sample, look.text) for sample, look in cards])
            values["table"] = table.sorted_by(column, descending=descending) if column else table
            values["looks"] = {sample.ordinal: look for sample, look in cards}
        return {"cards": cards, "start": start, "stop": start + len(samples), **values}

    def _cards(
        self, leaf: ShownLeaf, samples: Iterable[ShownSample | None]
    ) -> Iterator[tuple[ShownSample, Card] | None]:
        for sample in samples:
            yield sample and (sample, card(leaf, sample, self.site.tokenizer))


def _started(search: Search) -> Iterator[ShownSample | None]:
    """Return the samples of a search, the first of which has been searched for.

    So conditions that make no sense are refused at once, as a rule. When a part of the page has
    been sent, an error becomes the last thing on it.
    """
    samples = iter(search)
    first = next(samples, None)

    def rest() -> Iterator[ShownSample | None]:
        yield first
        try:
            yield from samples
        except EnergonError as error:
            search.problem = str(error)

    return rest()


def _order(leaf: ShownLeaf, name: str) -> Ints:
    """Return the samples in the order of a measure."""
    return np.argsort(leaf.measure_all(name), kind="stable")


def _conditions(leaf: ShownLeaf, sample: ShownSample | None) -> dict[str, str]:
    """Return the properties that conditions can use, each with a condition that a sample meets.

    Args:
        leaf: The dataset.
        sample: A sample of the page, which is read anyway; None for the first of the dataset.
    """
    conditions: dict[str, str] = {}
    with suppress(EnergonError, IndexError):
        for each, value in properties(sample or leaf.sample(0)):
            text = value.beginning if isinstance(value, Text) else str(value)
            if each.condition:
                term = f"{each.condition}{'>=' if is_numeric(value) else '='}{text}"
                conditions[each.condition] = shlex.quote(term) if _QUOTED.search(term) else term
    return conditions


def example_of(conditions: dict[str, str]) -> str:
    """Return some short conditions as an example, those on sizes only if there are no others.

    Example:
        >>> example_of({"jpg.size": "jpg.size>=900", "jpg.width": "jpg.width>=64"})
        'jpg.width>=64 jpg.size>=900'
    """
    short = [each for each in conditions.values() if len(each) <= MAX_EXAMPLE_LETTERS]
    return " ".join(sorted(short, key=lambda each: ".size>" in each)[:EXAMPLES])


class Cell(NamedTuple):
    """A value in a table."""

    text: str
    value: float | str | None
    """By which it is sorted; None for one that is missing, which comes last."""

    @classmethod
    def of(cls, value: Any) -> Cell:
        """Return a value as a cell; texts that are numbers are sorted as such."""
        if value is None:
            return cls("", None)
        text = value_in_words(value)
        if isinstance(value, int | float):
            return cls(text, None if value != value else float(value))
        try:
            return cls(text, float(text))
        except ValueError:
            return cls(text, text.casefold())


class SampleTable(NamedTuple):
    """Samples and their values."""

    measures: list[str]
    """The names of the columns that sort all samples."""
    values: list[str]
    """The names of the columns that sort the samples of a page."""
    rows: list[tuple[ShownSample, Mapping[str, Cell]]]

    def sorted_by(self, name: str, *, descending: bool) -> SampleTable:
        """Return the table with its rows sorted by a column; missing values are last."""
        cells = [(row, row[1].get(name, Cell("", None)).value) for row in self.rows]
        present = [(row, value) for row, value in cells if value is not None]
        # Numbers come before texts, which they cannot be compared with.
        present.sort(key=lambda each: (isinstance(each[1], str), each[1]), reverse=descending)
        missing = [row for row, value in cells if value is None]
        return self._replace(rows=[*(row for row, _ in present), *missing])


def make_table(leaf: ShownLeaf, samples: Sequence[tuple[ShownSample, str]]) -> SampleTable:
    """Return samples, each with its text, as a table."""
    ordinals = np.array([sample.ordinal for sample, _ in samples], np.int64)
    measured: dict[str, list[float]] = {}
    for name in leaf.measures[:MAX_COLUMNS]:
        try:
            measured[name] = leaf.measure(name, ordinals).tolist() if samples else []
        except EnergonError:  # a row has no value, or the measure was made for older data
            measured[name] = [float("nan")] * len(samples)
    seen: Counter[str] = Counter()
    rows: list[tuple[ShownSample, Mapping[str, Cell]]] = []
    for number, (sample, text) in enumerate(samples):
        values = {each: value for each, value in properties(sample) if each.condition}
        seen.update(each.title for each in values if measure_of(each) not in measured)
        cells = {each.title: Cell.of(value) for each, value in values.items()}
        cells |= {name: Cell.of(of[number]) for name, of in measured.items()}
        rows.append((sample, {**cells, "key": Cell.of(sample.where.key), "text": Cell.of(text)}))
    names = sorted(name for name, _ in seen.most_common(MAX_COLUMNS))
    return SampleTable(list(measured), ["key", "text", *names], rows)


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
        notes: Where excluded and flagged samples are listed; None if samples cannot be marked.
        saved: The run whose steps are shown; None shows a form for its settings.
        encoder: Class of the task encoder that makes the batches of runs; None shows no batches.
        tokenizer: Turns tokens into text; None shows their numbers.
    """
    site = Site(shown, notes, tokenizer)
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
        splits = self.site.shown.splits
        few = sum(len(split.leaves) for split in splits) <= MAX_COUNTED_LEAVES
        counts: dict[tuple[int, int], int | str] = {}
        totals: list[int | None] = []
        for s, split in enumerate(splits):
            of_split = [_count(leaf) if few else "" for leaf in split.leaves]
            counts |= {(s, n): count for n, count in enumerate(of_split)}
            numbers = [count for count in of_split if isinstance(count, int)]
            totals.append(sum(numbers) if len(numbers) == len(of_split) else None)
        return self.site.page("index.html", counts=counts, totals=totals, shows_covers=few)

    def shards(self, request: Request) -> Response:
        leaf = self.site.leaf(request)
        start = number_of(request, "from")
        name = request.query_params.get("name", "").strip()
        shards = [shard for shard in leaf.shards if name in shard.name]
        return self.site.page(
            "shards.html",
            **self.site.location(request, leaf),
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
        values = self.site.location(request, leaf)
        return self.site.page("statistics.html", **values, plots=statistics(leaf, values["base"]))

    def error(self, request: Request, error: Exception) -> Response:
        is_lost = isinstance(error, DatasetNotFoundError)
        if isinstance(error, HTTPException):
            status, text = error.status_code, str(error.detail)
            if text == "Not Found":  # no route fits
                text = f"there is no page at {request.url.path}"
        elif isinstance(error, EnergonError):
            status, text = 404 if is_lost else 422, str(error)
        else:
            status, text = 500, describe_error(error)
        title = _TITLES.get(status, "This page cannot be shown")
        match = None if is_lost else _DATASET.match(request.url.path)
        here = request.url.path + ("?" if request.url.query else "")
        return self.site.page(
            "error.html",
            status=status,
            title="The dataset cannot be opened" if is_lost else title,
            text=text,
            up=match[0] if match and here != match[0] else "/",
        )


def _count(leaf: ShownLeaf) -> int | str:
    try:
        return len(leaf)
    except EnergonError as error:
        return str(error)
