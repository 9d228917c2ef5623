"""The pages of a run: the samples of its steps, and its batches after the hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from energon.errors import ConfigError, EnergonError
from energon.inspect.encoded_run import EncodedRun
from energon.inspect.planned_run import Sighting
from energon.inspect.saved_run import ReadFrom
from energon.messages import describe_error
from energon.viewer.batches import ShownBatch, ShownField, show_batch
from energon.viewer.notes import SampleNote
from energon.viewer.pages import Card, Site, card, number_of
from energon.viewer.plots import shares
from energon.viewer.run import MAX_RUN_SAMPLES, MAX_STEPS, RunSettings, ShownRun, plan_run

MAX_PLANNED_RUNS = 8
MAX_PAIRS = 64
MAX_PAIRED_FIELDS = 6


class SeenCard(NamedTuple):
    """A sample of a step as its card shows it."""

    seen: Sighting
    at: str
    """Address of its page."""
    look: Card
    said: SampleNote | None
    form: str
    """Token of the form to exclude or flag it; "" if that is not possible."""


class RunPages:
    """Answers requests about runs.

    Args:
        site: Renders pages.
        saved: The run whose steps are shown; None shows a form for its settings.
        encoder: Class of the task encoder that makes the batches of runs; None shows no batches.
    """

    def __init__(self, site: Site, saved: ShownRun | None, encoder: type[Any] | None) -> None:
        self.site = site
        self.saved = saved
        self.encoder = encoder
        self.encoded_run = lru_cache(MAX_PLANNED_RUNS)(self._encoded_run)
        self.plan_run = lru_cache(MAX_PLANNED_RUNS)(plan_run)

    def steps(self, request: Request) -> Response:
        """Return the page of some steps."""
        here = 0 if self.saved is None else self.saved.step or 0
        first, last = number_of(request, "step", here), number_of(request, "last")
        asked = number_of(request, "steps", max(1, last - first + 1))
        steps = max(1, min(asked, MAX_STEPS))
        params = request.query_params
        values: dict[str, Any] = {
            "first": first,
            "steps": steps,
            "is_cut": asked > steps,
            "most": MAX_RUN_SAMPLES // steps,
            "saved": self.saved,
            "encoder": self.encoder is not None,
            "fields": self._fields(request),
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
                    (step, self._seen(run, seen))
                    for step, seen in run.samples(first, steps, most=MAX_RUN_SAMPLES // steps)
                ],
                "plot": _shares(run.about),
            }
        except EnergonError as error:
            values["problem"] = str(error)
        return self.site.page("run.html", **values)

    def batch(self, request: Request) -> Response:
        """Return the page of the batch of a step and a rank."""
        if self.encoder is None:
            raise HTTPException(404, "start `energon view` with --task-encoder")
        step, rank = number_of(request, "step"), number_of(request, "rank")
        shown = ShownBatch([], Markup())
        pairs: list[dict[str, Any]] = []
        problem = ""
        try:
            run = self._run(request)
            shown = show_batch(self.encoded_run(run).batch(step, rank), self.site.tokenizer)
            ((_, seen),) = run.samples(step, 1, rank=rank, most=MAX_RUN_SAMPLES)
            before = self._seen(run, seen)
            pairs = _pairs(before, shown.fields)
        except Exception as error:  # hooks are programs of the user
            problem = describe_error(error)
        params = request.query_params
        return self.site.page(
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

    def _run(self, request: Request) -> ShownRun:
        """Return the saved run, or the one that a form describes."""
        if self.saved is not None:
            return self.saved
        fields = self._fields(request)
        labels = [split.label for split in self.site.shown.splits]
        label = str(fields.pop("split"))
        if label not in labels:
            raise ConfigError(f"there is no split {label!r}, only {', '.join(labels)}")
        number = labels.index(label)
        split = self.site.shown.splits[number]
        return self.plan_run(split.path, split.name, number, RunSettings(**fields))

    def _fields(self, request: Request) -> dict[str, Any]:
        splits = self.site.shown.splits
        first = next((split.label for split in splits if split.name == "train"), "")
        given = {name: number_of(request, name, n) for name, n in vars(RunSettings()).items()}
        return {
            "split": request.query_params.get(
                "split", first or (splits[0].label if splits else "")
            ),
            **given,
        }

    def _encoded_run(self, run: ShownRun) -> EncodedRun:
        assert self.encoder is not None
        split = self.site.shown.splits[run.split]
        return EncodedRun(
            run.read_from or ReadFrom(split.path, split.name),
            run.run,
            self.encoder,
            run.batch_size,
            run.packing_buffer_size,
            run.positions,
            self.site.allow,
        )

    def _seen(self, run: ShownRun, seen: Sequence[tuple[Sighting, int]]) -> list[SeenCard]:
        """Return the cards of samples of a step."""
        cards = []
        shown = self.site.shown
        notes = {leaf: self.site.said(shown.leaf(run.split, leaf)) for _, leaf in seen}
        for each, number in seen:
            leaf = shown.leaf(run.split, number)
            sample = leaf.sample(each.ordinal)
            said = notes[number].get((sample.where.shard, sample.where.key))
            form = "" if self.site.notes is None or leaf.leaf.join else self.site.form
            at = f"/s/{run.split}/{number}/{each.ordinal}"
            cards.append(SeenCard(each, at, card(sample, self.site.tokenizer), said, form))
        return cards


def _pairs(before: Sequence[SeenCard], fields: Sequence[ShownField]) -> list[dict[str, Any]]:
    """Return each sample of a batch before and after the hooks; [] if they cannot be matched."""
    per_sample = [
        field
        for field in fields
        if not field.name.startswith("__") and len(before) in (len(field.items), len(field.images))
    ]
    if not per_sample:
        return []
    return [
        {
            "key": each.seen.key,
            "at": each.at,
            "look": each.look,
            "after": [
                (
                    field.name,
                    field.images[n] if n < len(field.images) else "",
                    field.items[n] if n < len(field.items) else "",
                )
                for field in per_sample[:MAX_PAIRED_FIELDS]
            ],
        }
        for n, each in enumerate(before[:MAX_PAIRS])
    ]


def _at_step(params: Mapping[str, str], step: int, last: int) -> dict[str, Any]:
    kept = {name: value for name, value in params.items() if name not in ("last", "steps", "rank")}
    return {**kept, "step": step, **({"last": last} if last > step else {})}


def _batch_link(
    params: Mapping[str, str], step: int, rank: int | None, path: str = "/run/batch"
) -> str:
    values = _at_step(params, step, step)
    return f"{path}?{urlencode(values if rank is None else {**values, 'rank': rank})}"


def _shares(about: Mapping[str, Any]) -> Markup:
    marks = [f"batch {mark:,}" for mark in about["marks"]]
    series = {leaf["name"]: leaf["shares"] for leaf in about["leaves"]}
    return shares(series, marks, title="Shares of the datasets over the run")
