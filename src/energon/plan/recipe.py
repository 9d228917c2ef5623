"""All that decides the order of a run but the number of lanes, as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from energon.errors import StateError
from energon.plan.build import concat_plan, epochized_plan, mix_plan
from energon.plan.leaf import PlanLeaf
from energon.plan.line import Line
from energon.plan.mix import Mix
from energon.plan.rows import Plan

Mixes = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PlanRecipe:
    """What a plan is made of.

    Args:
        kind: "blend" draws from sources by weight; "epochized" permutes all samples as one
            line; "concat" lays the leaves end to end.
        leaves: The leaves with their sizes.
        seed: Seed of the run.
        repeat: Whether an epochized line starts again at its end.
        stripe: How many consecutive samples go to the same lane where a line keeps its order.
        shuffle_window: Rows that are permuted together after blending; 0 for none.
        sources: What a blend draws from, as numbers of leaves; None for each leaf by itself.
        mix: Shares of the sources of a blend; None for the weights of the leaves.
        unit: Consecutive rows of a lane that come from one source.
        batch_size: Rows of a batch, for schedules that count batches.
        past: The mixes of a run before it was restored with this one, as `mix_json` gave them.
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

    @property
    def is_striped(self) -> bool:
        """Whether `stripe` has a say in the order."""
        shuffles = any(leaf.shuffle_over_epochs is not None for leaf in self.leaves)
        return self.kind == "concat" or (self.kind == "epochized" and not shuffles)

    @property
    def blend_sources(self) -> tuple[tuple[int, ...], ...]:
        """The leaves of each source of a blend."""
        return self.sources or tuple((number,) for number in range(len(self.leaves)))

    @property
    def source_names(self) -> list[str]:
        """The names of the sources: that of the leaf, or those of all."""
        return [self._line(source).order.uid for source in self.blend_sources]

    @property
    def counts_batches(self) -> bool:
        """Whether weights change after so many batches."""
        return self.kind == "blend" and "batches" in self.blend_mix.units

    def __call__(self, lanes: int) -> Plan:
        """Return the plan for `lanes` lanes."""
        if self.kind == "concat":
            return concat_plan(self.leaves, lanes=lanes, stripe=self.stripe)
        if self.kind == "epochized":
            return epochized_plan(
                self.leaves,
                lanes=lanes,
                seed=self.seed,
                repeat=self.repeat,
                stripe=self.stripe,
                shuffle_window=self.shuffle_window,
            )
        return mix_plan(
            self.leaves,
            self.blend_sources,
            self._mixes,
            lanes=lanes,
            seed=self.seed,
            unit=self.unit,
            batch_size=self.batch_size,
            gone=self._gone,
            shuffle_window=self.shuffle_window,
        )

    @cached_property
    def blend_mix(self) -> Mix:
        """Shares of the sources, in numbers."""
        if self.mix is None:
            return Mix.flat([leaf.weight for leaf in self.leaves])
        return self.mix.settle([self._line(source).length for source in self.blend_sources])

    def mix_json(self) -> dict[str, Any] | None:
        """Return the mix as plain data; None if this is no blend."""
        if self.kind != "blend":
            return None
        return self.blend_mix.to_json(dict(enumerate(self.source_names)))

    def continuing(
        self, mix: Mapping[str, Any] | None, past: Mixes, *, unit: int, batch_size: int
    ) -> PlanRecipe:
        """Return the recipe of a run that went on until now with other mixes.

        Args:
            mix: What it was saved with, as `mix_json` gave it.
            past: The mixes before that.
            unit: Consecutive rows that came from one source.
            batch_size: Rows of a batch.

        Raises:
            StateError: If the rows that were read cannot be told any more.
        """
        if self.kind != "blend" or mix is None:
            return self
        past = past if mix == self.mix_json() else (*past, mix)
        recipe = replace(self, past=tuple(past))
        if unit != self.unit:
            raise StateError(
                f"the run has drawn {unit} samples in a row from one dataset, now it is "
                f"{self.unit}; which samples its epochs still lack cannot be told then. Keep the "
                "unit of the blend and, for whole batches, batch_size"
            )
        if batch_size != self.batch_size and any("batches" in each.units for each in recipe._mixes):
            raise StateError(
                f"weights are scheduled in batches, of which the run had {batch_size} samples "
                f"each, and now {self.batch_size}; what was drawn by then cannot be told any more. "
                "Keep batch_size, or schedule weights in samples (schedule_unit: samples)"
            )
        for number, name in enumerate(recipe._gone):
            if any(-1 - number in each.limits for each in recipe._mixes):
                raise StateError(
                    f"{name} is no longer in the blend, but had max_epochs; when its share went "
                    "to the others cannot be told any more. Give it weight 0 instead of taking "
                    "it out"
                )
        return recipe

    @property
    def _mixes(self) -> list[Mix]:
        """The mixes of the run from its beginning on; sources that are gone are below 0."""
        numbers = {name: number for number, name in enumerate(self.source_names)}
        numbers |= {name: -1 - number for number, name in enumerate(self._gone)}
        return [*(Mix.from_json(mix, numbers) for mix in self.past), self.blend_mix]

    @property
    def _gone(self) -> list[str]:
        """The names of sources that only the past knows."""
        names = {name: None for mix in self.past for name in Mix.names_in(mix)}
        return [name for name in names if name not in self.source_names]

    def _line(self, source: Sequence[int]) -> Line:
        return Line(tuple(self.leaves[leaf] for leaf in source), self.seed)

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
