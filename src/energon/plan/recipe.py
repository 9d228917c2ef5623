"""Everything that determines the order of a run, except the number of lanes, and its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any, Literal, NamedTuple

from energon.errors import ConfigError, EmptyDatasetError, StateError
from energon.plan.balance import BalancedOrder
from energon.plan.blends.blend import BlendPlan
from energon.plan.blends.curve import Clock
from energon.plan.blends.mix import Mix
from energon.plan.dealt import Deal, DealtPlan
from energon.plan.leaves.leaf import MAX_ROWS, PlanLeaf
from energon.plan.leaves.leaf_order import Era
from energon.plan.line import NAME_JOINT, Line, LinePlan
from energon.plan.randomness import ORDER_VERSION
from energon.plan.rows import Plan, WindowPlan

MAX_NUMBER = 1 << 62
WHOLE = "all"
"""The name of the line of an epochized blend, or of validation, among draws."""


class _Continued(NamedTuple):
    """The part of a saved state that a run continues from."""

    streams: int | None
    parts: int
    eras: tuple[Mapping[str, Any], ...]
    pass_number: int

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> _Continued:
        """Return it from a fingerprint, checked."""
        streams, stripe, eras = (saved.get(name) for name in ("streams", "stripe", "eras"))
        pass_number, parts = saved.get("pass", 0), saved.get("parts", 1)
        numbers = [number for number in (streams, stripe, pass_number) if number is not None]
        divides = isinstance(parts, int) and isinstance(stripe, int) and parts > 0
        numbers.append(parts if parts == 1 or (divides and stripe % parts == 0) else -1)
        for era in eras or ():
            match era:
                case {"samples": samples, "draws": dict(draws), "streams": many}:
                    numbers += [samples, *draws.values(), many or None]
                case _:
                    numbers.append(None)
        if all(isinstance(number, int) and 0 <= number < MAX_NUMBER for number in numbers):
            return cls(streams or None, parts, tuple(eras or ()), pass_number or 0)
        raise StateError(
            f"the fingerprint of the state has {streams=}, {stripe=}, {parts=}, "
            f"pass={pass_number!r}, eras={eras!r:.100}, which no loader writes; the state is "
            "damaged or was edited"
        )


@dataclass(frozen=True)
class PlanRecipe:
    """The ingredients of a plan.

    Args:
        kind: "blend" draws from sources by weight; "epochized" permutes all samples as one
            line; "concat" lays the leaves end to end.
        leaves: The leaves with their sizes.
        seed: Seed of the run.
        repeat: Whether an epochized line starts again at its end.
        stripe: How many consecutive samples go to the same lane where a line keeps its order,
            and of a stream that several lanes share: those of a batch.
        shuffle_window: Rows of a stream that are permuted together after blending; 0 for none.
        sources: What a blend draws from, as numbers of leaves; None for each leaf on its own.
        mix: Shares of the sources of a blend; None for the weights of the leaves.
        unit: Consecutive rows of a lane that come from one source.
        batch_size: Rows of a whole batch, for schedules that count batches.
        past: The mixes of a run before it was restored with this one, as `mix_json` gave them;
            `then` names sources that continued elsewhere, each with the number of the draw.
        streams: How many streams the lanes share; None for as many as there are lanes.
        parts: How many lanes share each `stripe`, because the run continues with smaller batches;
            `stripe`, `unit` and `batch_size` are those of whole batches.
        eras: For each time the run continued with other lanes, where it was and how it was read
            until then: `samples` in all, `draws` by the name of the source, `streams`.
        pass_number: How many passes over data that are not repeated there were before.
        balance: How lanes exchange samples so that the costs of batches are equal; None if they
            do not.
    """

    kind: Literal["blend", "epochized", "concat"]
    leaves: tuple[PlanLeaf, ...]
    seed: int
    repeat: bool = True
    stripe: int = 1
    shuffle_window: int = 0
    sources: tuple[tuple[int, ...], ...] | None = None
    mix: Mix | None = None
    unit: int = 1
    batch_size: int = 1
    past: tuple[Mapping[str, Any], ...] = ()
    streams: int | None = None
    parts: int = 1
    eras: tuple[Mapping[str, Any], ...] = ()
    pass_number: int = 0
    balance: BalancedOrder | None = None

    @property
    def is_striped(self) -> bool:
        """Whether `stripe` affects the order."""
        kept = self.kind == "concat" or (self.kind == "epochized" and not self._shuffles)
        return kept or self.streams is not None or self.parts > 1

    @property
    def _shuffles(self) -> bool:
        """Whether any leaf is shuffled; if all keep their order, so does a line of them."""
        return any(leaf.shuffle_over_epochs is not None for leaf in self.leaves)

    @cached_property
    def lane_stripe(self) -> int:
        """Consecutive rows of a stream that go to the same lane: a batch, or a part of it."""
        return self.stripe // self.parts

    def deal(self, lanes: int) -> Deal:
        """Return which of `lanes` lanes share which stream.

        Raises:
            StateError: If the parts of a batch cannot be dealt to these lanes.
        """
        batches, rest = divmod(lanes, self.parts)
        if rest:
            raise StateError(
                f"the run continues with batches that are {self.parts} parts of larger ones, so "
                f"its number of lanes must be a multiple of {self.parts}, not {lanes}"
            )
        streams = gcd(batches, self.streams or batches)
        return Deal(lanes, streams, self.lane_stripe, self.parts)

    @property
    def blend_sources(self) -> tuple[tuple[int, ...], ...]:
        """The leaves of each source of a blend."""
        return self.sources or tuple((number,) for number in range(len(self.leaves)))

    @property
    def source_names(self) -> list[str]:
        """The names of the sources: the name of the leaf, or of all leaves."""
        return [self._line(source).order.uid for source in self.blend_sources]

    @property
    def counts_batches(self) -> bool:
        """Whether weights change after this many batches."""
        return self.kind == "blend" and "batches" in self.blend_mix.units

    def __call__(self, lanes: int) -> Plan:
        """Return the plan for `lanes` lanes, the same object each time."""
        if lanes not in self._plans:
            deal = self.deal(lanes)
            streams = self.of_streams(deal.streams)
            plan = streams if deal.streams == lanes else DealtPlan(streams, deal)
            self._plans[lanes] = plan if self.balance is None else self.balance.plan(plan)
        return self._plans[lanes]

    def of_streams(self, streams: int) -> BlendPlan | LinePlan | WindowPlan:
        """Return the plan for `streams` streams, or for as many lanes if each is a stream.

        Raises:
            ConfigError: If leaves share a uid, or there is no stream.
            EmptyDatasetError: If there are no leaves.
        """
        self._check_leaves(streams)
        eras = tuple(map(self._era, self.eras))
        plan = (
            self._blend(streams, eras) if self.kind == "blend" else self._line_plan(streams, eras)
        )
        return WindowPlan(plan, self.shuffle_window, self.seed) if self.shuffle_window > 1 else plan

    def _check_leaves(self, streams: int) -> None:
        if not self.leaves:
            raise EmptyDatasetError("a plan needs at least one leaf, got none")
        if streams < 1:
            raise ConfigError(f"a plan needs at least one lane, got {streams}")
        twice = [
            uid for uid, count in Counter(leaf.uid for leaf in self.leaves).items() if count > 1
        ]
        if twice:
            raise ConfigError(f"leaves share the uid {min(twice)!r}; their draws would be the same")

    def _line_plan(self, streams: int, eras: tuple[Era, ...]) -> LinePlan:
        """Return the plan of all leaves end to end: once and in order, or repeated and permuted."""
        if self.kind == "concat":
            once = tuple(PlanLeaf(leaf.uid, leaf.num_samples) for leaf in self.leaves)
            return LinePlan(once, streams, stripe=self.stripe, eras=eras)
        return LinePlan(
            self.leaves,
            streams,
            self.seed,
            repeat=self.repeat,
            shuffle=self._shuffles,
            stripe=self.stripe,
            eras=eras,
            pass_number=self.pass_number,
        )

    def _blend(self, streams: int, eras: tuple[Era, ...]) -> BlendPlan:
        """Return the plan that draws from sources by weight."""
        clock = Clock(streams, self.batch_size)
        if self.eras:
            first, last = self.eras[0], self.eras[-1]
            clock = clock._replace(start=last["samples"], first_lanes=first["streams"])
        return BlendPlan(
            self.leaves,
            self.blend_sources,
            tuple(self._mixes),
            streams,
            self.seed,
            unit=self.unit,
            batch_size=self.batch_size,
            gone=tuple(self._gone),
            eras=eras,
            clock=clock,
            moves=tuple(self._moves),
            pass_number=self.pass_number,
        )

    @cached_property
    def _plans(self) -> dict[int, Plan]:
        """The plans made so far, by their lanes."""
        return {}

    @cached_property
    def blend_mix(self) -> Mix:
        """Shares of the sources, in numbers."""
        if self.mix is None:
            return Mix.flat([leaf.weight for leaf in self.leaves])
        lengths = [self._line(source).length for source in self.blend_sources]
        for number, epochs in self.mix.limits.items():
            if epochs * lengths[number] > MAX_ROWS:
                raise ConfigError(
                    f"{self.source_names[number]}: max_epochs of {epochs:g} with "
                    f"{lengths[number]:,} samples each are more than the {MAX_ROWS:,} that can be "
                    "counted; leave out max_epochs to draw without an end"
                )
        return self.mix.settle(lengths)

    def after(self, passes: int) -> PlanRecipe:
        """Return the recipe of the data after some more passes over it."""
        if not passes:
            return self
        return replace(self, eras=(), pass_number=self.pass_number + passes)

    @property
    def passes_until_now(self) -> Iterator[PlanRecipe]:
        """The recipes of this pass and of those before it, latest first; none if there was one."""
        if self.pass_number:
            yield self
            for number in reversed(range(self.pass_number)):
                yield replace(self, eras=(), pass_number=number)

    def mix_json(self) -> dict[str, Any] | None:
        """Return the mix as plain data; None if this is not a blend."""
        if self.kind != "blend":
            return None
        return self.blend_mix.to_json(dict(enumerate(self.source_names)))

    def continuing(self, saved: Mapping[str, Any]) -> PlanRecipe:
        """Return the recipe of a run that was saved with some fingerprint and continues with this.

        How its lanes share samples is taken over; another mix begins where the run was saved.

        Args:
            saved: What `to_json` returned, and the `batch_size`.

        Raises:
            StateError: If it is no longer known which samples were drawn, or `saved` is damaged.
        """
        continued = _Continued.from_json(saved)
        # The lanes of a stream share its rows in the same stripes as before, whatever makes a
        # batch now.
        is_shared = continued.streams or continued.parts > 1
        stripe = (is_shared and saved.get("stripe")) or self.stripe
        batch_size = self.batch_size * continued.parts
        balance = None if self.balance is None else self.balance.continuing(saved)
        recipe = replace(
            self, stripe=stripe, batch_size=batch_size, balance=balance, **continued._asdict()
        )
        mix, past = saved.get("mix"), saved.get("mix_before", ())
        if self.kind != "blend" or mix is None:
            return recipe
        past = (*past,) if mix == self.mix_json() else (*past, mix)
        recipe = replace(recipe, past=past, unit=saved.get("unit", 1))
        self._check_blend(saved, recipe)
        return recipe

    def _check_blend(self, saved: Mapping[str, Any], continued: PlanRecipe) -> None:
        """Raise StateError if it is not known what a run has drawn that continues with this."""
        if own_unit(saved) != self.unit:
            raise StateError(
                f"the run has drawn {continued.unit} samples in a row from one dataset, now it is "
                f"{self.unit}, so it is not known which samples its epochs still lack. Keep the "
                "unit of the blend and, for whole batches, batch_size"
            )
        batch_size, mixes = saved.get("batch_size") or 1, continued._mixes
        if batch_size != self.batch_size and any("batches" in each.units for each in mixes):
            raise StateError(
                f"weights are scheduled in batches, of which the run had {batch_size} samples "
                f"each, and now {self.batch_size}; what was drawn by then is no longer known. "
                "Keep batch_size, or schedule weights in samples (schedule_unit: samples)"
            )
        for number, name in enumerate(continued._gone):
            if self.balance is not None:
                raise StateError(
                    f"cannot remove {name}, by whose costs the run was balanced, from the blend; "
                    "keep it with weight 0"
                )
            if any(-1 - number in each.limits for each in mixes):
                raise StateError(
                    f"cannot remove {name}, which had max_epochs, from the blend; keep it with "
                    "weight 0"
                )

    def to_json(self) -> dict[str, Any]:
        """Return all but the leaves as plain data, for the fingerprint of states."""
        return {
            "order_version": ORDER_VERSION,
            "kind": self.kind,
            "seed": self.seed,
            "repeat": self.repeat,
            "shuffle_window": self.shuffle_window,
            **({"streams": self.streams} if self.streams is not None else {}),
            **({"parts": self.parts} if self.parts > 1 else {}),
            **({"eras": list(self.eras)} if self.eras else {}),
            **({"pass": self.pass_number} if self.pass_number else {}),
            **({"stripe": self.stripe} if self.is_striped else {}),
            **({"mix": self.mix_json(), "unit": self.unit} if self.kind == "blend" else {}),
            **({"mix_before": list(self.past)} if self.past else {}),
            **(self.balance.to_json() if self.balance is not None else {}),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> PlanRecipe:
        """Return the recipe of the order of a run from its fingerprint.

        Args:
            saved: What `to_json` returned, with the `leaves` and the `batch_size`.

        Raises:
            StateError: If it is no such fingerprint.
        """
        try:
            continued = _Continued.from_json(saved)
            leaves = [
                PlanLeaf.from_json(uid, leaf_json) for uid, leaf_json in saved["leaves"].items()
            ]
            past = tuple(saved.get("mix_before", ()))
            mixes = [*past, *([saved["mix"]] if "mix" in saved else [])]
            uids = [leaf.uid for leaf in leaves]
            sources = {
                name: _leaves_named(name, uids) for mix in mixes for name in Mix.names_in(mix)
            }
            # What was taken out continues where it was, should it come back.
            gone = [name for name, members in sources.items() if members is None]
            numbers = {uid: number for number, uid in enumerate([*uids, *gone])}
            recipe = cls(
                kind=saved["kind"],
                leaves=(*leaves, *(PlanLeaf(name, 1) for name in gone)),
                seed=saved["seed"],
                repeat=saved["repeat"],
                stripe=saved.get("stripe") or saved["batch_size"] or 1,
                shuffle_window=saved["shuffle_window"],
                sources=tuple(
                    tuple(numbers[uid] for uid in members or [name])
                    for name, members in sources.items()
                )
                or None,
                unit=saved.get("unit", 1),
                batch_size=(saved["batch_size"] or 1) * continued.parts,
                past=past,
                **continued._asdict(),
            )
            if "mix" not in saved:
                return recipe
            order = {name: number for number, name in enumerate(recipe.source_names)}
            return replace(recipe, mix=Mix.from_json(saved["mix"], order))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                "the state is not that of a pipeline of get_train_dataset or get_val_dataset, "
                f"or it was edited ({error!r})"
            ) from error

    @property
    def _mixes(self) -> list[Mix]:
        """All mixes of the run so far; removed sources are below 0."""
        numbers = {name: number for number, name in enumerate(self.source_names)}
        numbers |= {name: -1 - number for number, name in enumerate(self._gone)}
        return [*(Mix.from_json(mix, numbers) for mix in self.past), self.blend_mix]

    @property
    def _moves(self) -> list[dict[int, int]]:
        """The draws with which sources continued after each earlier mix."""
        numbers = {name: number for number, name in enumerate(self.source_names)}
        return [
            {numbers[name]: draw for name, draw in _then(mix).items() if name in numbers}
            for mix in self.past
        ]

    @property
    def _gone(self) -> list[str]:
        """The names of sources that only earlier mixes had."""
        names = {name: None for mix in self.past for name in Mix.names_in(mix)}
        return [name for name in names if name not in self.source_names]

    def _era(self, saved: Mapping[str, Any]) -> Era:
        draws = saved["draws"]
        names = self.source_names if self.kind == "blend" else [WHOLE]
        return Era(tuple(draws.get(name, 0) for name in names), saved["streams"])

    def _line(self, source: Sequence[int]) -> Line:
        return Line(tuple(self.leaves[leaf] for leaf in source), self.seed)

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def own_unit(saved: Mapping[str, Any]) -> Any:
    """Return the unit of a saved run in its own batches, which may be parts of larger ones."""
    unit, parts = saved.get("unit", 1), saved.get("parts", 1)
    are_numbers = isinstance(unit, int) and isinstance(parts, int)
    return max(1, unit // parts) if are_numbers and parts > 1 else unit


def _then(mix: Mapping[str, Any]) -> dict[str, int]:
    """Return the draws with which sources continue after a saved mix, checked."""
    draws = mix.get("then", {})
    if isinstance(draws, dict) and all(
        isinstance(draw, int) and 0 <= draw < MAX_NUMBER for draw in draws.values()
    ):
        return draws
    raise StateError(
        f"the fingerprint of the state has {draws!r:.100} as positions; expected numbers of draws "
        "by dataset. The state is damaged"
    )


def _leaves_named(name: str, uids: Sequence[str]) -> list[str] | None:
    """Return the leaves of the source with a name, see `Line.order`; None if it has others."""
    leaves: list[str] = []
    rest = name
    while rest:
        first = next((u for u in uids if rest == u or rest.startswith(f"{u}{NAME_JOINT}")), None)
        if first is None:
            return None
        leaves.append(first)
        rest = rest[len(first) + len(NAME_JOINT) :]
    return leaves
