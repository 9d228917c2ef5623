"""The pages: which there are, and what each shows.

| address | page |
|---|---|
| `/` | splits and their datasets |
| `/s/SPLIT/LEAF` | samples from `?from=ORDINAL` on, or those that `?key=PREFIX` finds |
| `/s/SPLIT/LEAF?cards` | the same as a piece of a page, for scrolling |
| `/s/SPLIT/LEAF/shards` | its shards |
| `/s/SPLIT/LEAF/statistics` | plots of what its samples are like |
| `/s/SPLIT/LEAF/ORDINAL` | a sample, part by part |
| `/s/SPLIT/LEAF/ORDINAL/note` | takes what someone says about a sample |
| `/run` | steps of a run, from `?step=NUMBER` on |
| `/run/batch` | the batch of a step and a rank, after the hooks |
| `…/raw/PART`, `…/image/PART`, `…/thumb/PART`, `…/wave/PART` | a part, and images of it |

Splits, datasets and parts are numbers here: their names may be anything.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from energon.errors import ConfigError, DatasetNotFoundError, EnergonError
from energon.extra import needs_extra
from energon.inspect.part_facts import PartKind, extension_of, part_kind
from energon.inspect.planned_run import Sighting
from energon.inspect.where import Where
from energon.messages import escape_text
from energon.viewer.shown import Shown, ShownLeaf, ShownPart, ShownSample

with needs_extra("view", "the browser needs Starlette, uvicorn and Jinja"):
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import RedirectResponse, Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
    from starlette.types import Message

from energon.viewer import images
from energon.viewer.batches import EncodedRun, ShownBatch, ShownField
from energon.viewer.guard import PART_POLICY, Guard
from energon.viewer.notes import Notes, Said
from energon.viewer.parts import Tokenizer, snippet, view_part
from energon.viewer.plots import shares
from energon.viewer.ranges import SHOWN_TYPES, entity_tag, is_fresh, part_response
from energon.viewer.reading_order import pictures_of
from energon.viewer.run import MAX_SAMPLES, MAX_STEPS, RunSettings, ShownRun, plan_run
from energon.viewer.statistics import statistics

HERE = Path(__file__).parent
PAGE_SAMPLES = 60
PAGE_SHARDS = 500
MAX_FORM_BYTES = 64 << 10
MAX_PLANNED_RUNS = 8
MAX_PAGE_SAMPLES = 240
MAX_PAIRS = 64
MAX_PAIRED_FIELDS = 6
_LOCAL = re.compile(r"/(?![/\\])[\x21-\x7e]*\Z")
MAX_COUNTED_LEAVES = 50
"""So many datasets are opened for the first page, to say how many samples they have."""


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
        server_names: Names of the server beside those of loopback.
        token: What browsers have to show; None if this machine alone can connect.
        allow: What data may do, see `get_train_dataset`.
        notes: Where it is written what people say about samples; None lets them say nothing.
        saved: The run whose steps are shown; None asks for the settings of one.
        encoder: Class of the task encoder that makes the batches of runs; None shows none.
        tokenizer: Makes text of tokens; None shows numbers.
    """
    pages = _Pages(shown, allow, notes, saved, encoder, tokenizer)
    leaf = "/s/{split:int}/{leaf:int}"
    sample = f"{leaf}/{{ordinal:int}}"
    routes = [
        Route("/", pages.index),
        Route(leaf, pages.gallery),
        Route(f"{leaf}/shards", pages.shards),
        Route(f"{leaf}/statistics", pages.statistics),
        Route(sample, pages.sample),
        Route(f"{sample}/note", pages.note, methods=["POST"]),
        Route("/run", pages.run),
        Route("/run/batch", pages.batch),
        Route(f"{sample}/raw/{{part:int}}", pages.raw),
        *(
            Route(f"{sample}/{name}/{{part:int}}", partial(pages.image, name))
            for name in ("image", "thumb", "wave")
        ),
        Mount("/static", StaticFiles(directory=HERE / "static")),
    ]
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: pages.error, Exception: pages.error}
    )
    return Guard(app, server_names, token)


def warm_up(app: Guard) -> None:
    """Load what the first requests would wait for: modules and templates, but no data."""
    with suppress(ImportError):
        import simplejpeg  # noqa: F401
        from PIL import Image

        Image.preinit()
    for name in _templates().list_templates(["html"]):
        _templates().get_template(name)

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        pass

    # A page that does not exist, for the threads that make pages.
    scope = {"type": "http", "method": "GET", "path": "/-", "query_string": b"", "headers": []}
    asyncio.run(app.app(scope, receive, send))  # type: ignore[arg-type]


@cache
def _templates() -> Environment:
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


class _Pages:
    def __init__(
        self,
        shown: Shown,
        allow: Collection[str],
        notes: Notes | None,
        saved: ShownRun | None,
        encoder: type[Any] | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.shown = shown
        self.allow = allow
        self.notes = notes
        self.saved = saved
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.encoded_run = lru_cache(MAX_PLANNED_RUNS)(self._encoded_run)
        self.plan_run = lru_cache(MAX_PLANNED_RUNS)(plan_run)
        # A page of someone else does not know it, so it cannot send forms in the user's name.
        self.form = secrets.token_urlsafe(16)
        self.made = images.MadeImages()
        self.templates = _templates()

    def index(self, request: Request) -> Response:
        number = sum(len(split.leaves) for split in self.shown.splits)
        counts: dict[tuple[int, int], int | str] = {}
        for s, split in enumerate(self.shown.splits):
            for n, leaf in enumerate(split.leaves):
                counts[s, n] = _count(leaf) if number <= MAX_COUNTED_LEAVES else ""
        return self._page("index.html", counts=counts)

    def gallery(self, request: Request) -> Response:
        leaf = self._leaf(request)
        key = request.query_params.get("key", "")
        where = request.query_params.get("where", "").strip()
        only_cards = "cards" in request.query_params
        stop = None
        if key:
            found = leaf.search(key, PAGE_SAMPLES + 1)
            samples = [leaf.sample(ordinal) for ordinal in found[:PAGE_SAMPLES]]
            more = len(found) > PAGE_SAMPLES
            start = 0
        else:
            start = max(0, _number(request, "from"))
            if not only_cards:
                start = min(start, max(0, len(leaf) - 1))
            more = False
            if where:
                samples, stop = leaf.matching(Where(where), start, PAGE_SAMPLES)
            else:
                count = min(_number(request, "count", PAGE_SAMPLES), MAX_PAGE_SAMPLES)
                samples = leaf.page(start, count if only_cards else PAGE_SAMPLES)
        return self._page(
            "gallery_cards.html" if only_cards else "gallery.html",
            **self._place(request, leaf),
            cards=[(sample, _card(sample)) for sample in samples],
            start=start,
            stop=start + len(samples) if stop is None else stop,
            where=where,
            next_where=urlencode({"where": where, "from": stop}),
            step=PAGE_SAMPLES,
            total=len(leaf),
            key=key,
            more=more,
            notes=self._notes(leaf),
        )

    def shards(self, request: Request) -> Response:
        leaf = self._leaf(request)
        start = max(0, _number(request, "from"))
        return self._page(
            "shards.html",
            **self._place(request, leaf),
            shards=leaf.shards[start : start + PAGE_SHARDS],
            start=start,
            step=PAGE_SHARDS,
            total=len(leaf.shards),
        )

    def statistics(self, request: Request) -> Response:
        leaf = self._leaf(request)
        place = self._place(request, leaf)
        seen, plots = statistics(leaf, place["base"])
        return self._page(
            "statistics.html",
            **place,
            seen=seen,
            plots=plots,
            total=len(leaf),
        )

    def sample(self, request: Request) -> Response:
        leaf, sample = self._sample(request)
        pictures = pictures_of([part.name for part in sample.parts])
        return self._page(
            "sample.html",
            **self._place(request, leaf),
            sample=sample,
            views=[
                view_part(
                    part.name,
                    part.file,
                    self.allow,
                    pictures=pictures,
                    tokenizer=self.tokenizer,
                )
                for part in sample.parts
            ],
            shown_types=SHOWN_TYPES,
            total=len(leaf),
            said=self._notes(leaf).get((sample.where.shard, sample.where.key)),
            may_note=self.notes is not None and not leaf.leaf.join,
            noted_in="" if self.notes is None else self.notes.file(leaf.leaf.path),
            form=self.form,
        )

    async def note(self, request: Request) -> Response:
        if _length(request) > MAX_FORM_BYTES:
            raise HTTPException(413, f"a form has up to {MAX_FORM_BYTES} bytes")
        fields = dict(parse_qsl((await request.body()).decode("utf-8", "replace")))
        return await run_in_threadpool(self._note, request, fields)

    def _note(self, request: Request, fields: Mapping[str, str]) -> Response:
        leaf, sample = self._sample(request)
        if not secrets.compare_digest(fields.get("form", "").encode(), self.form.encode()):
            raise HTTPException(403, "the form is not of this server; load the page again")
        if self.notes is None or leaf.leaf.join:
            raise HTTPException(403, "start `energon view` with --quarantine to exclude samples")
        dataset, where = leaf.leaf.path, sample.where
        match fields.get("what"):
            case "exclude" | "flag" as what:
                reason = fields.get("reason", "").strip()
                self.notes.say(dataset, where, excluded=what == "exclude", reason=reason)
            case "forget":
                self.notes.forget(dataset, where)
            case _:
                raise HTTPException(400, "what: expected exclude, flag or forget")
        back = fields.get("back", "")
        if not _LOCAL.match(back):  # a form leads nowhere but to pages of this server
            back = request.url.path.removesuffix("/note")
        return RedirectResponse(back, status_code=303)

    def _notes(self, leaf: ShownLeaf) -> dict[tuple[str, str | None], Said]:
        return {} if self.notes is None or leaf.leaf.join else self.notes.of(leaf.leaf.path)

    def run(self, request: Request) -> Response:
        first, last = _number(request, "step"), _number(request, "last")
        steps = _number(request, "steps", max(1, last - first + 1))
        steps = max(1, min(steps, MAX_STEPS))
        params = request.query_params
        values: dict[str, Any] = {
            "first": first,
            "steps": steps,
            "saved": self.saved,
            "encoder": self.encoder is not None,
            "fields": self._run_fields(request),
            "link": lambda step: "?" + urlencode(_at_step(params, step, step + steps - 1)),
            "batch_link": lambda step, rank: _batch_link(params, step, rank),
            "here": f"/run?{urlencode(params)}",
            "position": (),
            "run": None,
            "found": [],
            "plot": "",
            "problem": "",
        }
        try:
            run = self._run(request)
            values |= {
                "run": run,
                "position": run.position,
                "found": [
                    (step, self._seen(run, seen)) for step, seen in run.samples(first, steps)
                ],
                "plot": _shares(run.about["shares"]),
            }
        except EnergonError as error:
            values["problem"] = str(error)
        return self._page("run.html", **values)

    def _run(self, request: Request) -> ShownRun:
        """Return the saved run, or the one that a form describes."""
        if self.saved is not None:
            return self.saved
        names = [split.name for split in self.shown.splits]
        fields = self._run_fields(request)
        split = str(fields.pop("split"))
        if split not in names:
            raise ConfigError(f"there is no split {split!r}, only {', '.join(names)}")
        return self.plan_run(self.shown.path, split, names.index(split), RunSettings(**fields))

    def _run_fields(self, request: Request) -> dict[str, Any]:
        names = [split.name for split in self.shown.splits]
        split = "train" if "train" in names else (names or [""])[0]
        given = {name: _number(request, name, n) for name, n in vars(RunSettings()).items()}
        return {"split": request.query_params.get("split", split), **given}

    def _encoded_run(self, run: ShownRun) -> EncodedRun:
        assert self.encoder is not None
        split = self.shown.splits[run.split].name
        return EncodedRun(self.shown.path, split, run, self.encoder, self.allow, self.tokenizer)

    def batch(self, request: Request) -> Response:
        if self.encoder is None:
            raise HTTPException(404, "start `energon view` with --task-encoder")
        step, rank = _number(request, "step"), _number(request, "rank")
        shown = ShownBatch([], Markup())
        pairs: list[dict[str, Any]] = []
        problem = ""
        try:
            run = self._run(request)
            shown = self.encoded_run(run).batch(step, rank)
            ((_, seen),) = run.samples(step, 1)
            before = self._seen(run, [each for each in seen if each[0].moment.rank == rank])
            pairs = _pairs(before, shown.fields)
        except Exception as error:  # hooks are programs of the user
            problem = f"{type(error).__name__}: {error}"
        params = request.query_params
        return self._page(
            "batch.html",
            parts=shown.fields,
            packing=shown.packing,
            pairs=pairs,
            problem=problem,
            step=step,
            rank=rank,
            link=lambda path, step, rank: _batch_link(params, step, rank, path),
            encoder=self.encoder.__qualname__,
        )

    def _seen(
        self, run: ShownRun, seen: Sequence[tuple[Sighting, int]]
    ) -> list[tuple[Sighting, int, str, Card, Said | None, str]]:
        """Return samples of a step with what a gallery shows of them; not more than it can."""
        cards = []
        notes = {leaf: self._notes(self.shown.leaf(run.split, leaf)) for _, leaf in seen}
        for each, number in seen[:MAX_SAMPLES]:
            leaf = self.shown.leaf(run.split, number)
            sample = leaf.sample(each.ordinal)
            said = notes[number].get((sample.where.shard, sample.where.key))
            form = "" if self.notes is None or leaf.leaf.join else self.form
            at = f"/s/{run.split}/{number}/{each.ordinal}"
            cards.append((each, number, at, _card(sample), said, form))
        return cards

    def raw(self, request: Request) -> Response:
        _, sample = self._sample(request)
        part = self._part(request, sample)
        return part_response(
            request,
            part.file,
            name=f"{sample.where.key.rpartition('/')[2]}.{part.name}",
            extension=extension_of(part.name, part.file),
            save="save" in request.query_params,
        )

    def image(self, name: str, request: Request) -> Response:
        _, sample = self._sample(request)
        part = self._part(request, sample)
        tag = entity_tag(part.file)
        headers = {"ETag": tag, "Content-Security-Policy": PART_POLICY}
        if is_fresh(request, tag):
            return Response(status_code=304, headers=headers)
        kind = part_kind(extension_of(part.name, part.file))
        maker = _MAKERS.get((name, kind))
        if maker is None:
            raise HTTPException(404, f"there is no such image of a part of the kind {kind!r}")
        make, media_type = maker
        try:
            content = self.made.get(f"{name} {tag}", lambda: make(part.file))
        except EnergonError as error:
            raise HTTPException(422, str(error)) from error
        return Response(content, 200, headers, media_type)

    def error(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            status, text = error.status_code, str(error.detail)
        elif isinstance(error, EnergonError):
            status, text = 404 if isinstance(error, DatasetNotFoundError) else 422, str(error)
        else:
            status, text = 500, f"{type(error).__name__}: {error}"
        return self._page("error.html", status=status, text=text)

    def _leaf(self, request: Request) -> ShownLeaf:
        numbers = request.path_params
        try:
            return self.shown.leaf(numbers["split"], numbers["leaf"])
        except IndexError as error:
            raise HTTPException(404, "there is no such dataset") from error

    def _sample(self, request: Request) -> tuple[ShownLeaf, ShownSample]:
        leaf = self._leaf(request)
        ordinal = request.path_params["ordinal"]
        if ordinal >= len(leaf):
            raise HTTPException(404, f"there is no sample {ordinal}, only 0 to {len(leaf) - 1}")
        return leaf, leaf.sample(ordinal)

    def _part(self, request: Request, sample: ShownSample) -> ShownPart:
        number: int = request.path_params["part"]
        if number >= len(sample.parts):
            raise HTTPException(404, f"there is no part {number}, only {len(sample.parts)} parts")
        return sample.parts[number]

    def _place(self, request: Request, leaf: ShownLeaf) -> dict[str, Any]:
        numbers = request.path_params
        base = f"/s/{numbers['split']}/{numbers['leaf']}"
        return {"leaf": leaf, "split": self.shown.splits[numbers["split"]].name, "base": base}

    def _page(self, template: str, *, status: int = 200, **values: Any) -> Response:
        page = self.templates.get_template(template)
        text = page.render(shown=self.shown, status=status, **values)
        content = text.encode("utf-8", "replace")
        return Response(content, status, media_type="text/html; charset=utf-8")


_MAKERS: Mapping[tuple[str, str], tuple[Callable[..., bytes], str]] = {
    ("thumb", "image"): (images.thumbnail, "image/jpeg"),
    ("thumb", "video"): (images.poster, "image/jpeg"),
    ("image", "image"): (images.as_png, "image/png"),
    ("wave", "audio"): (images.waveform, "image/svg+xml"),
}
"""By the name of an image and the kind of a part: what makes it, and what it is."""


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


def _card(sample: ShownSample) -> Card:
    """Return what a gallery shows of a sample."""
    kinds = [(part, part_kind(extension_of(part.name))) for part in sample.parts]
    found = [(part.number, kind) for part, kind in kinds if kind in _PICTURES]
    texts = [part for part, kind in kinds if kind in ("text", "value")]
    plain = [part for part in texts if not part.name.lower().endswith((".gz", "mp", "msg", "cbor"))]
    try:
        first = plain[0] if plain else None
        is_json = first is not None and first.name.lower().endswith(("json", "jsn"))
        text = snippet(first.file, is_json=is_json) if first else ""
    except EnergonError as error:
        text = str(error)
    count = Counter(kind for _, kind in found)
    badges = [f"{count['image']} images"] if count["image"] > 1 else []
    badges += [kind for kind in ("video", "audio") if count[kind]]
    found.sort(key=lambda each: list(_PICTURES).index(each[1]))
    picture = f"{_PICTURES[found[0][1]]}/{found[0][0]}" if found else None
    return Card(picture, ", ".join(badges), text, ", ".join(part.name for part in sample.parts))


_PICTURES: dict[PartKind, str] = {"image": "thumb", "video": "thumb", "audio": "wave"}
"""What stands for a part in a gallery, best first."""


def _pairs(
    before: Sequence[tuple[Sighting, int, str, Card, Said | None, str]],
    fields: Sequence[ShownField],
) -> list[dict[str, Any]]:
    """Return each sample of a batch beside what became of it; [] if it is not clear what did."""
    per_sample = [
        field
        for field in fields
        if not field.name.startswith("__")
        and len(before) in (len(field.items), len(field.pictures))
    ]
    if not per_sample:
        return []
    return [
        {
            "key": seen.key,
            "at": at,
            "look": look,
            "after": [
                (
                    field.name,
                    field.pictures[n] if n < len(field.pictures) else "",
                    field.items[n] if n < len(field.items) else "",
                )
                for field in per_sample[:MAX_PAIRED_FIELDS]
            ],
        }
        for n, (seen, _, at, look, _, _) in enumerate(before[:MAX_PAIRS])
    ]


def _at_step(params: Mapping[str, str], step: int, last: int) -> dict[str, Any]:
    kept = {name: value for name, value in params.items() if name not in ("last", "steps", "rank")}
    return {**kept, "step": step, **({"last": last} if last > step else {})}


def _batch_link(
    params: Mapping[str, str], step: int, rank: int | None, path: str = "/run/batch"
) -> str:
    values = _at_step(params, step, step)
    return f"{path}?{urlencode(values if rank is None else {**values, 'rank': rank})}"


def _count(leaf: ShownLeaf) -> int | str:
    try:
        return len(leaf)
    except EnergonError as error:
        return str(error)


def _shares(about: Mapping[str, Any]) -> Markup:
    marks = [f"batch {mark:,}" for mark in about["batches"]]
    series = {name: values for name, values in about.items() if name != "batches"}
    return shares(series, marks, title="Shares of the datasets over the run")


def _length(request: Request) -> float:
    """Return how many bytes a request says that it has; one that does not say may be endless."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isdecimal() and len(text) < 16 else float("inf")


def _number(request: Request, name: str, default: int = 0) -> int:
    text = request.query_params.get(name, "").replace(",", "").strip() or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise HTTPException(400, f"{name}={text!r}: expected a whole number from 0 up")
    return int(text)


def _without_control_characters(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return escape_text(value)
    return value
