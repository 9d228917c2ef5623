"""Report what lanes have drawn from each dataset, without iterating."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon.plan.blends.mix import Mix
from energon.plan.recipe import PlanRecipe
from energon.stages.base import State
from energon.stages.reading.read import rows_of_changes

_OUTCOMES = ("skipped", "failed")


def mix_report(
    recipe: PlanRecipe,
    *,
    lanes: int,
    states: Mapping[int, State | None],
    counts: Mapping[str, int],
    sample_bytes: Sequence[float],
) -> dict[str, Any]:
    """Return the draws of some lanes from each leaf, computed without iterating.

    Args:
        recipe: The order.
        lanes: Number of lanes of the run.
        states: Positions of the lanes in question; None at the beginning.
        counts: Statistics of hooks by name.
        sample_bytes: Average size of a sample of each leaf.
    """
    plan = recipe(lanes)
    drawn = np.zeros(len(recipe.leaves))
    for lane, state in states.items():
        changed = plan.with_changes(lane, rows_of_changes(state, len(recipe.past)))
        drawn += changed.leaf_counts(lane, state["read"] if state else 0)
    total = float(drawn.sum())
    tokens = _sample_tokens(recipe)
    report: dict[str, Any] = {}
    for number, leaf in enumerate(recipe.leaves):
        count = float(drawn[number])
        about: dict[str, Any] = {
            "samples": round(count),
            "share": round(count / total, 6) if total else 0.0,
            "epochs": round(count * lanes / len(states) / leaf.num_samples, 4) if states else 0.0,
            "bytes": round(count * sample_bytes[number]),
        }
        if number in tokens:
            about["tokens"] = round(count * tokens[number])
        report[leaf.uid] = {**about, **_outcomes(counts, leaf.uid)}
    return {"samples": round(total), "datasets": report}


def _sample_tokens(recipe: PlanRecipe) -> dict[int, float]:
    """Return the average tokens per sample, for leaves whose tokens the metadataset gives."""
    found: dict[int, float] = {}
    for source, tokens in _sizes(recipe.mix) if recipe.mix else ():
        leaves = recipe.blend_sources[source]
        samples = sum(recipe.leaves[leaf].num_samples for leaf in leaves)
        found |= dict.fromkeys(leaves, tokens / samples)
    return found


def _sizes(mix: Mix) -> list[tuple[int, float]]:
    found = []
    for entry in mix.entries:
        if isinstance(entry.node, Mix):
            found += _sizes(entry.node)
        elif entry.size is not None:
            found.append((entry.node, entry.size))
    return found


def _outcomes(counts: Mapping[str, int], name: str) -> dict[str, dict[str, int]]:
    """Return how often hooks skipped samples of a dataset, or failed on them."""
    found: dict[str, dict[str, int]] = {outcome: {} for outcome in _OUTCOMES}
    for key, count in counts.items():
        outcome, _, rest = key.partition(": ")
        hook, _, dataset = rest.partition(": ")
        if outcome in found and dataset == name:
            found[outcome][hook] = count
    return found
