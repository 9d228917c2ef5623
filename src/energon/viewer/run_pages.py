"""The pages of a run: the samples of its steps, and its batches field by field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from energon.errors import ConfigError, EnergonError
from energon.inspect.encoded_run import EncodedRun
from energon.inspect.planned_run import Sighting
from energon.inspect.saved_run import ReadFrom
from energon.messages import describe_error
from energon.samples.display import as_array, image_url, images_in
from energon.viewer.images import PAGE_THUMBNAIL_PIXELS
from energon.viewer.notes import SampleNote
from energon.viewer.pages import Card, Site, card, number_of
from energon.viewer.parts import (
    ShownArray,
    Tokenizer,
    said_tokens,
    show_array,
    shown_value,
    tokenizer_of,
    value_tree,
)
from energon.viewer.run import (
    MAX_RUN_SAMPLES,
    MAX_STEPS,
    RankCosts,
    RunSettings,
    ShownRun,
    plan_run,
)
from energon.viewer.statistics import Bar, packed, ranking, shares

MAX_BATCH_IMAGES = 64
MIN_IMAGE_PIXELS = 4
"""Arrays with fewer rows or columns are no images."""


class ShownField(NamedTuple):
    """A field of a batch."""

    name: str
    array: ShownArray | None
    """If it is an array or tensor."""
    images: list[str]
    """If the array can be images: the `data:` addresses of the first ones."""
    html: Markup
    """The value, if it is not an array."""
    items: list[str]
    """A summary of this field for each sample of the batch; [] if they cannot be told apart."""


def _fields(batch: Any) -> dict[str, Any]:
    """Return the fields of a batch; the keys of its samples are shown as links."""
    named: Mapping[Any, Any] = {type(batch).__name__: batch}
    if is_dataclass(batch):
        named = {each.name: getattr(batch, each.name) for each in fields(batch)}
    elif isinstance(batch, Mapping):
        named = batch
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        named = dict(enumerate(batch))
    hidden = ("__restore_key__", "__key__", "__sources__")
    return {str(n): value for n, value in named.items() if n not in hidden and value is not None}


def _show(name: str, value: Any, tokenizer: Tokenizer | None) -> ShownField:
    array = as_array(value)
    rows: Iterable[Any] = value if isinstance(value, list | tuple) else []
    if array is not None and array.ndim:
        rows = array
    items = [said_tokens(name, each, tokenizer) or shown_value(each) for each in rows]
    if array is None:
        return ShownField(name, None, [], value_tree(value, tokenizer, name), items)
    shown = show_array(name, array, tokenizer_of(name, tokenizer))
    return ShownField(name, shown, _images(array), Markup(), items)


def draw_packing(value: Any) -> Markup:
    """Return the packed sequences in a batch as bars; nothing if it has none.

    The result of `pack_sequences` states how much is padding. In other batches with `cu_seqlens`
    and tokens, padding is everything after the last sequence, or a last sequence in which all
    tokens are equal.
    """
    packs = list(islice(_packs(value, 0), MAX_BATCH_IMAGES))
    return packed(packs) if packs else Markup()


def _packs(value: Any, level: int) -> Iterator[tuple[list[int], int]]:
    if (
        level > 4
        or isinstance(value, str | bytes)
        or not (is_dataclass(value) or isinstance(value, Mapping | Sequence))
    ):
        return
    named = _fields(value)
    starts = next((v for n, v in named.items() if "cu_seqlens" in n.lower()), None)
    if starts is None:
        for each in named.values():
            yield from _packs(each, level + 1)
        return
    tokens = next(
        (v for n, v in named.items() if n.lower() in ("tokens", "input_ids", "values", "text")),
        None,
    )
    count = named.get("num_values")
    edges_of_all = as_array(starts)
    several = edges_of_all is None or edges_of_all.ndim == 2
    for number, each in enumerate(starts if several else [starts]):
        edges = np.asarray(as_array(each))
        lengths = [int(n) for n in np.diff(edges) if n > 0]
        own = tokens[number] if several and tokens is not None else tokens
        values = None if own is None else np.asarray(as_array(own)).reshape(-1)
        yield _without_padding(lengths, values, count if isinstance(count, int) else None)


def _without_padding(
    lengths: list[int], values: NDArray[Any] | None, count: int | None
) -> tuple[list[int], int]:
    """Return the lengths of sequences without padding, and the length of the padding."""
    total = sum(lengths)
    if count is not None and count < total:
        return lengths[:-1], total - count
    if values is None:
        return lengths, 0
    if len(values) > total:
        return lengths, len(values) - total
    if lengths and lengths[-1] > 1 and len(values) == total:
        last = values[-lengths[-1] :]
        if (last == last[0]).all():
            return lengths[:-1], lengths[-1]
    return lengths, 0


def _images(array: NDArray[Any]) -> list[str]:
    """Return the images in an array of bytes, or of floats around 0 to 1, as addresses."""
    if array.ndim != 4 or sorted(array.shape[1:])[1] < MIN_IMAGE_PIXELS:
        return []
    if not {1, 3} & {array.shape[1], array.shape[3]}:  # such as latents, of four channels
        return []
    array = array[:MAX_BATCH_IMAGES]
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.float32)
    images = images_in(array)
    return [image_url(pixels, PAGE_THUMBNAIL_PIXELS) for pixels in images]


MAX_PLANNED_RUNS = 8
MAX_PAIRS = 64
MAX_PAIRED_FIELDS = 6
MAX_COST_BARS = 64


class SeenCard(NamedTuple):
    """A sample of a step as its card shows it."""

    seen: Sighting
    at: str
    """Address of its page."""
    look: Card
    note: SampleNote | None
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
        self.saved_run = saved
        self.encoder = encoder
        self.encoded_run = lru_cache(MAX_PLANNED_RUNS)(self._encoded_run)
        self.plan_run = lru_cache(MAX_PLANNED_RUNS)(plan_run)

    def steps(self, request: Request) -> Response:
        """Return the page of some steps."""
        saved = None if self.saved_run is None else self.saved_run.saved
        here = 0 if saved is None else saved.step
        first, last = number_of(request, "step", here), number_of(request, "last")
        asked = number_of(request, "steps", max(1, last - first + 1))
        steps = max(1, min(asked, MAX_STEPS))
        params = request.query_params
        values: dict[str, Any] = {
            "first": first,
            "steps": steps,
            "is_cut": asked > steps,
            "most": MAX_RUN_SAMPLES // steps,
            "saved": self.saved_run,
            "encoder": self.encoder is not None,
            "fields": self._fields(request),
            "link": lambda step: "?" + urlencode(_at_step(params, step, step + steps - 1)),
            "batch_link": lambda step, rank: _batch_link(params, step, rank),
            "here": f"/run?{urlencode(params)}",
            "run": None,
            "found": [],
            "plot": "",
            "problem": "",
        }
        try:
            run = self._run(request)
            values |= {
                "run": run,
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
        encoder = self._needed_encoder()
        params = request.query_params
        step, rank = number_of(request, "step"), number_of(request, "rank")
        shown: list[ShownField] = []
        packing = Markup()
        before: list[SeenCard] = []
        pairs: list[dict[str, Any]] = []
        costs: RankCosts | None = None
        problem = ""
        try:
            run = self._run(request)
            encoded = self.encoded_run(run)
            batch = encoded.batch(step, rank)
            named = _fields(batch).items()
            shown = [_show(name, value, self.site.tokenizer) for name, value in named]
            packing = draw_packing(batch)
            sightings: list[Sighting] = []
            try:
                sightings += islice(encoded.sightings(batch, step, rank), MAX_RUN_SAMPLES)
                seen = run.shown(sightings)
            except ConfigError:  # the batch carries no keys: what the plan says
                ((_, seen),) = run.samples(step, 1, rank=rank, most=MAX_RUN_SAMPLES)
            before = self._seen(run, seen)
            pairs = _pairs(before, shown)
            costs = run.rank_costs(step, rank=rank, samples=sightings)
        except Exception as error:  # hooks are programs of the user
            problem = describe_error(error)
        return self.site.page(
            "batch.html",
            parts=shown,
            packing=packing,
            seen=before,
            pairs=pairs,
            costs=costs,
            cost_plot=_cost_plot(costs, lambda rank: _batch_link(params, step, rank)),
            problem=problem,
            step=step,
            rank=rank,
            link=lambda path, step, rank: _batch_link(params, step, rank, path),
            encoder=encoder.__qualname__,
        )

    def _run(self, request: Request) -> ShownRun:
        """Return the saved run, or the one that a form describes."""
        if self.saved_run is not None:
            return self.saved_run
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
        default = min(splits, key=lambda split: split.name != "train")
        label = request.query_params.get("split", default.label)
        numbers = {name: number_of(request, name, n) for name, n in vars(RunSettings()).items()}
        return {"split": label, **numbers}

    def _needed_encoder(self) -> type[Any]:
        if self.encoder is None:
            raise HTTPException(404, "start `energon view` with --task-encoder")
        return self.encoder

    def _encoded_run(self, run: ShownRun) -> EncodedRun:
        encoder = self._needed_encoder()
        if run.saved is not None:
            return EncodedRun.of(run.saved, encoder)
        split = self.site.shown.splits[run.split]
        read_from = ReadFrom(split.path, split.name)
        return EncodedRun(read_from, run.run, encoder, run.settings)

    def _seen(self, run: ShownRun, seen: Sequence[tuple[Sighting, int]]) -> list[SeenCard]:
        """Return the cards of samples of a step."""
        cards = []
        shown = self.site.shown
        notes = {leaf: self.site.notes_of(shown.leaf(run.split, leaf)) for _, leaf in seen}
        for each, number in seen:
            leaf = shown.leaf(run.split, number)
            sample = leaf.sample(each.ordinal)
            note = notes[number].get((sample.where.shard, sample.where.key))
            form = self.site.form_of(leaf)
            at = f"/s/{run.split}/{number}/{each.ordinal}"
            cards.append(SeenCard(each, at, card(leaf, sample, self.site.tokenizer), note, form))
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
            "leaf": each.seen.leaf,
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


def _cost_plot(costs: RankCosts | None, link: Callable[[int], str]) -> Markup:
    """Return the costs of ranks as bars that lead to their batches."""
    if costs is None:
        return Markup()
    bars = [
        Bar(f"rank {rank}", int(cost) if cost == int(cost) else round(cost, 2), link(rank))
        for rank, cost in enumerate(costs.costs[:MAX_COST_BARS])
    ]
    return ranking(bars, title=f"{costs.name} of each rank", unit=costs.name)


def _shares(reads: Mapping[str, Any]) -> Markup:
    marks = [f"batch {mark:,}" for mark in reads["marks"]]
    series = {leaf["name"]: leaf["shares"] for leaf in reads["leaves"]}
    return shares(series, marks, title="Shares of the datasets over the run")
