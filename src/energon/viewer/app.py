"""The pages: which there are, and what each shows.

| address | page |
|---|---|
| `/` | splits and their datasets |
| `/s/SPLIT/LEAF` | samples from `?from=ORDINAL` on, or those that `?key=PREFIX` finds |
| `/s/SPLIT/LEAF/shards` | its shards |
| `/s/SPLIT/LEAF/statistics` | plots of what its samples are like |
| `/s/SPLIT/LEAF/ORDINAL` | a sample, part by part |
| `/s/SPLIT/LEAF/ORDINAL/note` | takes what somebody says about a sample |
| `/run` | steps of a run, from `?step=NUMBER` on |
| `/run/batch` | the batch of a step and a rank, after the hooks |
| `…/raw/PART`, `…/image/PART`, `…/thumb/PART`, `…/wave/PART` | a part, and images of it |

Splits, datasets and parts are numbers here: their names may be anything.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from energon.errors import ConfigError, DatasetNotFoundError, EnergonError
from energon.extra import needs_extra
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

from energon.viewer import images
from energon.viewer.batches import EncodedRun, ShownField
from energon.viewer.guard import PART_POLICY, Guard
from energon.viewer.notes import Notes, Said
from energon.viewer.parts import extension_of, part_kind, snippet, view_part
from energon.viewer.plots import shares
from energon.viewer.ranges import entity_tag, is_fresh, part_response
from energon.viewer.run import MAX_SAMPLES, MAX_STEPS, RunSettings, ShownRun, plan_run
from energon.viewer.statistics import statistics

HERE = Path(__file__).parent
PAGE_SAMPLES = 60
PAGE_SHARDS = 500
MAX_FORM_BYTES = 64 << 10
MAX_PLANNED_RUNS = 8
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
    encoded: EncodedRun | None = None,
) -> Guard:
    """Return the application that shows datasets, for any ASGI server.

    Args:
        shown: The datasets.
        server_names: Names of the server beside those of loopback.
        token: What browsers have to show; None if this machine alone can connect.
        allow: What data may do, see `get_train_dataset`.
        notes: Where it is written what people say about samples; None lets them say nothing.
        saved: The run whose steps are shown; None asks for the settings of one.
        encoded: The same run with its batches, as a task encoder makes them; None shows none.
    """
    pages = _Pages(shown, allow, notes, saved, encoded)
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


class _Pages:
    def __init__(
        self,
        shown: Shown,
        allow: Collection[str],
        notes: Notes | None,
        saved: ShownRun | None,
        encoded: EncodedRun | None,
    ) -> None:
        self.shown = shown
        self.allow = allow
        self.notes = notes
        self.saved = saved
        self.encoded = encoded
        self.plan_run = lru_cache(MAX_PLANNED_RUNS)(plan_run)
        # A page of somebody else does not know it, so it cannot send forms in the user's name.
        self.form = secrets.token_urlsafe(16)
        self.made = images.MadeImages()
        self.templates = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_without_control_characters,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.filters.update(bytes=format_bytes, count="{:,}".format)

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
        stop = None
        if key:
            found = leaf.search(key, PAGE_SAMPLES + 1)
            samples = [leaf.sample(ordinal) for ordinal in found[:PAGE_SAMPLES]]
            more = len(found) > PAGE_SAMPLES
            start = 0
        else:
            start = min(max(0, _number(request, "from")), max(0, len(leaf) - 1))
            more = False
            if where:
                samples, stop = leaf.matching(Where(where), start, PAGE_SAMPLES)
            else:
                samples = leaf.page(start, PAGE_SAMPLES)
        return self._page(
            "gallery.html",
            **self._place(request, leaf),
            cards=[(sample, *_card(sample)) for sample in samples],
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
        seen, plots = statistics(leaf)
        return self._page(
            "statistics.html",
            **self._place(request, leaf),
            seen=seen,
            plots=plots,
            total=len(leaf),
        )

    def sample(self, request: Request) -> Response:
        leaf, sample = self._sample(request)
        return self._page(
            "sample.html",
            **self._place(request, leaf),
            sample=sample,
            views=[view_part(part.name, part.file, self.allow) for part in sample.parts],
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
        return RedirectResponse(request.url.path.removesuffix("/note"), status_code=303)

    def _notes(self, leaf: ShownLeaf) -> dict[tuple[str, str | None], Said]:
        return {} if self.notes is None or leaf.leaf.join else self.notes.of(leaf.leaf.path)

    def run(self, request: Request) -> Response:
        first, steps = _number(request, "step"), _number(request, "steps", 1)
        steps = max(1, min(steps, MAX_STEPS))
        names = [split.name for split in self.shown.splits]
        split = "train" if "train" in names else (names or [""])[0]
        fields = {"split": request.query_params.get("split", split)}
        given = {name: _number(request, name, n) for name, n in vars(RunSettings()).items()}
        values: dict[str, Any] = {
            "first": first,
            "steps": steps,
            "saved": self.saved,
            "encoder": self.encoded is not None,
            "fields": {**fields, **given},
            "link": lambda step: "?" + urlencode({**dict(request.query_params), "step": step}),
            "run": None,
            "found": [],
            "plot": "",
            "problem": "",
        }
        try:
            if self.saved is None and fields["split"] not in names:
                raise ConfigError(f"there is no split {fields['split']!r}, only {', '.join(names)}")
            run = self.saved or self.plan_run(
                self.shown.path, fields["split"], names.index(fields["split"]), RunSettings(**given)
            )
            values |= {
                "run": run,
                "found": [
                    (step, self._seen(run, seen)) for step, seen in run.samples(first, steps)
                ],
                "plot": _shares(run.about["shares"]),
            }
        except EnergonError as error:
            values["problem"] = str(error)
        return self._page("run.html", **values)

    def batch(self, request: Request) -> Response:
        if self.encoded is None:
            raise HTTPException(404, "start `energon view` with --state and --task-encoder")
        step, rank = _number(request, "step"), _number(request, "rank")
        parts: Sequence[ShownField] = ()
        problem = ""
        try:
            parts = self.encoded.batch(step, rank)
        except Exception as error:  # hooks are programs of the user
            problem = f"{type(error).__name__}: {error}"
        return self._page(
            "batch.html",
            parts=parts,
            problem=problem,
            step=step,
            rank=rank,
            encoder=self.encoded.encoder.__qualname__,
        )

    def _seen(
        self, run: ShownRun, seen: Sequence[tuple[Sighting, int]]
    ) -> list[tuple[Sighting, int, int, int | None, str]]:
        """Return samples of a step with what a gallery shows of them; not more than it can."""
        return [
            (
                each,
                leaf,
                each.ordinal,
                *_card(self.shown.leaf(run.split, leaf).sample(each.ordinal)),
            )
            for each, leaf in seen[:MAX_SAMPLES]
        ]

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


def _card(sample: ShownSample) -> tuple[int | None, str]:
    """Return which part of a sample to show a thumbnail of, and the beginning of its text."""
    kinds = [(part, part_kind(extension_of(part.name))) for part in sample.parts]
    pictures = [part.number for part, kind in kinds if kind in ("image", "video")]
    texts = [part for part, kind in kinds if kind in ("text", "value")]
    plain = [part for part in texts if not part.name.lower().endswith((".gz", "mp", "msg", "cbor"))]
    try:
        text = snippet(plain[0].file) if plain else ""
    except EnergonError as error:
        text = str(error)
    return (pictures[0] if pictures else None), text


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
